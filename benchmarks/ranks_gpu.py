"""Measure the microseconds in which GPUs of one host add up and gather tensors, through peer memory and through NCCL.

    python benchmarks/ranks_gpu.py [--ranks 2] [--hidden 4096] [--vocab 128256] [--rows 1 16 64 256 1024 8192]

One process runs for each GPU. Times are medians of graph replays, per call, of bfloat16. Sums are followed by the residual
and the norm: in the same kernel through peer memory, in the norm's kernel with NCCL. Measured on 2026-11-23 on two H200
(NVLink, 18 links; torch 2.11, triton 3.6), hidden 4096, in the same order of rows: norm alone 1.2, 1.3, 1.6, 3.0, 6.0, 68;
NCCL and norm 8.2, 8.8, 11.6, 29.9, 56.8, 317; peer memory 2.5, 3.2, 4.4, 9.1, 28.1, 191. Other designs, measured at the
same time:

- torch's symmetric memory and the norm: one shot 7.8, 9.1, 11.1, 21.9, 62.7, 446; two shots 8.6, 9.5, 10.5, 16.5, 42.1, 289.
- Our two shots, which send the same number of bytes for two ranks: -, 4.5, 5.8, 10.1, 30.0, 199.
- 8 warps per row instead of 16: 2.6, 3.1, 5.1, 10.0, 28.9, 191; 4 warps: 3.1, 3.6, 6.4, 11.5.
- A program for several rows that sends 1 to 8 rows ahead of those it receives: 9.4 to 12, 31 to 40, 196 to 237 from 256 rows on.
- Blocks of gathered rows of 2 KiB and 4 warps: 3.0, 7.9, 26.5, 94 for 1, 16, 64 and 256 rows of logits; of 8 KiB and 16 warps
  2.6, 8.4, 26.3, 93; NCCL and the copy that puts columns side by side 10, 32, 77, 236.
- All products of 32 layers of an 8B model of two ranks, and their 64 norms, in one graph: 1882, 2128 and 2367 for 1, 16 and
  64 rows if nothing is sent, 1973, 2217 and 2627 with peer memory, 2365, 2648 and 3284 with NCCL.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from dovetail.engine.mesh import connect
from dovetail.interfaces.mesh import Collectives
from dovetail.ops.norm import add_parts_rms_norm, add_rms_norm
from dovetail.ops.parts import Parts
from dovetail.ops.peer import PeerCollectives

EPS = 1e-5
SECONDS = 120.0
"""The time limit of the whole run after the kernels are compiled."""


def microseconds(action: Callable[[], object], collectives: Collectives, calls: int, replays: int = 15) -> float:
    """Return the median over replays of a graph of ``calls`` calls, in microseconds per call."""
    for _ in range(2):
        action()
    torch.cuda.synchronize()
    collectives.agree(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            action()
    graph.replay()
    torch.cuda.synchronize()
    collectives.agree(True)
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def sums(rows: int, hidden: int, peer: PeerCollectives, nccl: Collectives) -> dict[str, float]:
    """Return the times of a sum of ``rows`` rows, its residual and its norm. NCCL and the norm's kernel overwrite ``x``,
    whose values grow without changing the times."""
    x, residual = (torch.randn(rows, hidden, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(hidden, device="cuda").bfloat16()
    calls = 64 if rows < 1024 else 16
    actions: dict[str, Callable[[], object]] = {
        "norm alone": lambda: add_rms_norm(x, residual, weight, EPS),
        "NCCL": lambda: nccl.all_reduce_norm(x, residual, weight, EPS),
        "peer": lambda: peer.all_reduce_norm(x, residual, weight, EPS),
    }
    if 1 < rows <= 128:
        parts = torch.randn(4, rows, hidden, device="cuda")
        actions["norm alone of 4 parts"] = lambda: add_parts_rms_norm(Parts(parts), residual, weight, EPS)
        actions["peer, 4 parts"] = lambda: peer.all_reduce_norm(parts, residual, weight, EPS)
    return {name: microseconds(action, peer, calls) for name, action in actions.items()}


def gathers(rows: int, vocab: int, peer: PeerCollectives, nccl: Collectives) -> dict[str, float]:
    """Return the times in which ``rows`` rows of logits are gathered."""
    logits = torch.randn(rows, -(-vocab // peer.size), device="cuda").bfloat16()
    return {
        "gather, NCCL": microseconds(lambda: nccl.all_gather(logits, vocab), peer, 16),
        "gather, peer": microseconds(lambda: peer.all_gather(logits, vocab), peer, 16),
    }


def run_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """Measure, and print the table on rank 0."""
    torch.manual_seed(rank)
    peer = connect(rank, args.ranks, torch.device("cuda", rank), folder / "rendezvous").tp
    if not isinstance(peer, PeerCollectives):
        sys.exit("the GPUs cannot access each other's memory; the warning above says why")
    nccl = peer._others
    columns = []
    for rows in args.rows:
        columns.append(sums(rows, args.hidden, peer, nccl))
        if rows <= 256:
            columns[-1] |= gathers(rows, args.vocab, peer, nccl)
    if rank == 0:
        print(f"{'rows':38}" + "".join(f"{rows:9d}" for rows in args.rows))
        for name in dict.fromkeys(name for column in columns for name in column):
            print(f"{name:38}" + "".join(f"{c[name]:9.1f}" if name in c else " " * 9 for c in columns))
    peer.agree(True)
    peer.close()


def main() -> None:
    """Run a process for each rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 8192])
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run_rank, args=(rank, args, Path(folder))) for rank in range(args.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(SECONDS)
            if process.is_alive():
                process.kill()
        sys.exit(next((process.exitcode for process in ranks if process.exitcode), 0))


if __name__ == "__main__":
    main()
