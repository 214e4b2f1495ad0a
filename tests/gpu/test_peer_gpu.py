"""Test sums and gathers through peer memory on CUDA: with one process for each of two GPUs, and with several ranks on
one GPU, whose kernels run at the same time.

Run on a machine with two GPUs: python -m pytest tests/gpu/test_peer_gpu.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch.distributed import FileStore

from dovetail.engine.mesh import connect
from dovetail.ops.ipc import ipc_memory
from dovetail.ops.peer import PeerCollectives
from dovetail.testing.collectives import EPS, check_gather, check_sums, rank_tensors, same_bits, sum_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
LIMIT = 20_000_000_000
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def run_ranks(arguments: list[list[str]], seconds: float = 240) -> list[tuple[int, str]]:
    """Run a process for each list of arguments, and return exit codes and what was written."""
    commands = [[sys.executable, __file__, *given] for given in arguments]
    ranks = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    end = time.monotonic() + seconds
    try:
        written = [process.communicate(timeout=end - time.monotonic())[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, text) for process, text in zip(ranks, written, strict=True)]


@two_devices
@pytest.mark.parametrize("what", ["sums", "graphs", "ipc"])
def test_two_devices(what: str, tmp_path: Path) -> None:
    for code, text in run_ranks([[what, str(rank), str(tmp_path)] for rank in range(2)]):
        assert code == 0, text


@two_devices
def test_a_rank_that_ends_does_not_hang_the_other(tmp_path: Path) -> None:
    for code, text in run_ranks([["lost", str(rank), str(tmp_path)] for rank in range(2)], 90):
        assert code == 0, text


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_on_one_device(ranks: int) -> None:
    ((code, text),) = run_ranks([["streams", str(ranks)]])
    assert code == 0, text


def connected(rank: int, folder: Path, timeout: float = 30.0) -> PeerCollectives:
    collectives = connect(rank, 2, torch.device("cuda", rank), folder / "rendezvous", timeout).tp
    assert isinstance(collectives, PeerCollectives), "the GPUs cannot access each other's memory"
    return collectives


def sums(rank: int, folder: Path) -> None:
    collectives, device = connected(rank, folder), torch.device("cuda", rank)
    for dtype, tolerance in TOLERANCE.items():
        for size in (8, 1024, 4096, 5120, 8192):
            for seed, rows in enumerate((1, 2, 7, 16, 64, 128, 300, 1)):
                for parts in (0, 3) if rows <= 16 else (0,):
                    check_sums(collectives, rank_tensors(2, rows, size, dtype, device, seed, parts), tolerance)
    for rows in (1, 8192, 9000, 17000):
        check_sums(collectives, rank_tensors(2, rows, 4096, torch.bfloat16, device, rows), 4e-3)
    for rows in (1, 64, 200):
        for width in (2 * 64128, 2 * 64128 - 8):
            check_gather(collectives, rows, 64128, width, torch.bfloat16, device)
        check_gather(collectives, rows, 1000, 2 * 1000 - 4, torch.float32, device)
    tensors = rank_tensors(2, 9000, 4096, torch.bfloat16, device, 5)
    whole = collectives.all_reduce_norm(tensors.addends[rank], tensors.residual, tensors.weight, EPS)
    first = collectives.all_reduce_norm(tensors.addends[rank][:3], tensors.residual[:3], tensors.weight, EPS)
    for one, other in zip(first, whole, strict=True):
        assert torch.equal(one, other[:3]), "the bits of a row depend on the number of rows"


def ipc(rank: int, folder: Path) -> None:
    """Share memory in the way that is tried second, without ``connect``'s choice."""
    device = torch.device("cuda", rank)
    others = connected(rank, folder)._others
    store = FileStore(str(folder / "ipc"), 2)
    collectives = PeerCollectives(others, ipc_memory(store, rank, 2, device), 30.0)
    for rows in (1, 7, 300, 1):
        check_sums(collectives, rank_tensors(2, rows, 4096, torch.bfloat16, device, rows), 4e-3)
    check_gather(collectives, 7, 64128, 2 * 64128 - 8, torch.bfloat16, device)


def graphs(rank: int, folder: Path) -> None:
    """Replay a graph of sums of different sizes, while the ranks run at different speeds."""
    collectives, device = connected(rank, folder), torch.device("cuda", rank)
    steps = [rank_tensors(2, rows, 4096, torch.bfloat16, device, rows) for rows in (1, 64, 7, 256, 1, 1024, 16)]

    def run() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [collectives.all_reduce_norm(t.addends[rank], t.residual, t.weight, EPS) for t in steps]

    for _, total in run():
        total.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    exact = [sum_of(tensors.addends, torch.bfloat16) + tensors.residual for tensors in steps]
    for replay in range(600):
        if replay % 5 == 2 * rank:
            torch.cuda._sleep(20_000)
        graph.replay()
        if replay % 50 == 49:
            for (norm, total), expected in zip(results, exact, strict=True):
                assert torch.equal(total, expected)
                assert same_bits(collectives, norm)
                total.zero_()


def end() -> NoReturn:
    """End the process with status 0, and without the destructors of CUDA's libraries, which fail after a failed kernel."""
    sys.stdout.flush()
    os._exit(0)


def lost(rank: int, folder: Path) -> None:
    collectives, device = connected(rank, folder, 4.0), torch.device("cuda", rank)
    tensors = rank_tensors(2, 4, 4096, torch.bfloat16, device, 1)
    check_sums(collectives, tensors, 4e-3)
    if rank:
        time.sleep(1)  # until the other rank has its answer
        return
    start = time.monotonic()
    collectives.all_reduce_norm(tensors.addends[0], tensors.residual, tensors.weight, EPS)
    with pytest.raises(RuntimeError):
        torch.cuda.synchronize()
    assert time.monotonic() - start < 30
    end()  # here, because shared memory that is freed after a failed kernel aborts the process


def streams_of(ranks: int, kind: str) -> None:
    """Every rank has a stream. Their kernels wait for each other, so all of them must fit on the device."""
    from dovetail.ops.triton import peer
    from dovetail.ops.triton.peer_words import EMPTY

    device, dtype, most, size = torch.device("cuda"), torch.bfloat16, 24, 4096
    space = {
        "one_shot": peer.one_shot_bytes(ranks, most, 2 * size),
        "two_shot": peer.two_shot_bytes(ranks, most, 2 * size),
        "gather": peer.gather_bytes(ranks, most, 512),
    }[kind]
    memory = [torch.full((space // 4,), EMPTY, dtype=torch.int32, device=device) for _ in range(ranks)]
    table = torch.tensor([each.data_ptr() for each in memory], device=device)
    count, row_bytes = (-(-most // ranks) if kind == "two_shot" else most), 8192 if kind == "gather" else 2 * size
    channels = [
        peer.Channels(rank, ranks, table, torch.zeros(count, dtype=torch.int32, device=device), row_bytes)
        for rank in range(ranks)
    ]
    streams = [torch.cuda.Stream() for _ in range(ranks)]

    def run(rank: int, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.cuda.stream(streams[rank]):
            if kind == "gather":
                return (peer.gather(channels[rank], x, ranks * size - 8, LIMIT),)
            return getattr(peer, kind)(channels[rank], x, residual, weight, EPS, LIMIT)

    compile_first(ranks, kind, channels, size)
    for seed, rows in enumerate((1, 2, 7, 16, 5, 1, 3)):
        for parts in (0, 2) if kind != "gather" else (0,):
            tensors = rank_tensors(ranks, rows, size, dtype, device, seed, parts)
            torch.cuda.synchronize()
            got = [run(rank, tensors.addends[rank], *tensors[1:]) for rank in range(ranks)]
            torch.cuda.synchronize()
            exact = sum_of(tensors.addends, dtype) + tensors.residual
            for result in got:
                if kind == "gather":
                    assert torch.equal(result[0], torch.cat(tensors.addends, 1)[:, :-8])
                else:
                    assert torch.equal(result[1], exact)
                    assert torch.equal(result[0], got[0][0])
    assert all((each == EMPTY).all() for each in memory)


def compile_first(ranks: int, kind: str, channels: list, size: int) -> None:
    """Have kernels compiled with memory in which everything has arrived, so that the first launch waits for nothing."""
    from dovetail.ops.triton import peer

    for parts in (0, 2):
        tensors = rank_tensors(ranks, 1, size, torch.bfloat16, torch.device("cuda"), 0, parts)
        own = [torch.zeros(1 << 21, dtype=torch.int32, device="cuda") for _ in range(ranks)]
        table = torch.tensor([each.data_ptr() for each in own], device="cuda")
        for given in channels:
            alone = given._replace(table=table, uses=torch.zeros_like(given.uses))
            if kind == "gather":
                peer.gather(alone, tensors.addends[0] if not parts else tensors.residual, ranks * size - 8, LIMIT)
            else:
                getattr(peer, kind)(alone, tensors.addends[0], *tensors[1:], EPS, LIMIT)
            for each in own:
                each.zero_()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["streams", ranks]:
            for kind in ("one_shot", "two_shot", "gather"):
                streams_of(int(ranks), kind)
        case [what, rank, folder]:
            {"sums": sums, "graphs": graphs, "ipc": ipc, "lost": lost}[what](int(rank), Path(folder))
    end()
