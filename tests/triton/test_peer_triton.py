"""Test the sums and gathers of peer memory, interpreted: several processes share memory, and one process shares memory
with a rank that is not there.

TRITON_INTERPRET=1 python -m pytest tests/triton/test_peer_triton.py
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dovetail.ops.triton import peer
from dovetail.ops.triton.peer_words import EMPTY

HALF = torch.float16  # the interpreter truncates to bfloat16 instead of rounding
LIMIT = 10**9


def words(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32).flatten()


class Pair:
    """Two ranks in one process, of which only one computes."""

    def __init__(self, rank: int, rows: int, size: int, space: int = 0) -> None:
        self.rank, self.rows, self.row_bytes = rank, rows, 2 * size
        space = space or peer.one_shot_bytes(2, rows, 2 * size)
        self.memory = [torch.full((space // 4,), EMPTY, dtype=torch.int32) for _ in range(2)]
        self.uses = torch.zeros(rows, dtype=torch.int32)
        table = torch.tensor([memory.data_ptr() for memory in self.memory])
        self.channels = peer.Channels(rank, 2, table, self.uses, self.row_bytes)

    def slot(self, rank: int, slot: int) -> torch.Tensor:
        """Return the words of a slot of every channel, [rows, words]."""
        return self.memory[rank].view(2, self.rows, self.row_bytes // 4)[slot]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_sent_and_emptied(rank: int) -> None:
    torch.manual_seed(rank)
    rows, size = 3, 40
    pair = Pair(rank, rows, size)
    for use in range(5):
        mine, theirs = torch.randn(rows, size).to(HALF), torch.randn(rows, size).to(HALF)
        mine[0, :6] = -0.0
        mine[1, 3], mine[1, 4], mine[2, 5] = float("nan"), float("inf"), -0.0
        mine[1, 8:10] = torch.tensor([-0.0, 1.0]).to(HALF)
        pair.slot(rank, use % 2)[:] = words(theirs).view(rows, -1)
        total = peer.one_shot(pair.channels, mine, None, None, 0.0, LIMIT)[1]
        assert torch.equal(total.nan_to_num(7.0), (mine.float() + theirs.float()).to(HALF).nan_to_num(7.0))
        assert total.isnan().sum() == 1
        sent = pair.slot(1 - rank, use % 2)
        assert not (sent == EMPTY).any(), "data that looks like an empty slot was sent"
        assert torch.equal(sent.contiguous().view(HALF).nan_to_num(7.0), mine.nan_to_num(7.0))
        assert (pair.memory[rank] == EMPTY).all(), "a slot was not emptied"
        assert (pair.slot(1 - rank, (use + 1) % 2) == EMPTY).all(), "the wrong slot was used"
        assert pair.uses.tolist() == [use + 1] * rows
        sent[:] = EMPTY  # as the other rank would have done


def test_channels_count_their_uses_separately() -> None:
    pair = Pair(0, 4, 8)
    for rows in (4, 1, 3, 1):
        for row in range(rows):
            pair.slot(0, int(pair.uses[row]) % 2)[row] = 0
        peer.one_shot(pair.channels, torch.ones(rows, 8).to(HALF), None, None, 0.0, LIMIT)
    assert pair.uses.tolist() == [4, 2, 2, 1]
    assert (pair.memory[0] == EMPTY).all()


def test_parts_are_rounded_before_they_are_sent() -> None:
    pair = Pair(0, 2, 16)
    parts = torch.randn(3, 2, 16)
    pair.slot(0, 0)[:] = 0
    residual, weight = torch.zeros(2, 16).to(HALF), torch.ones(16).to(HALF)
    total = peer.one_shot(pair.channels, parts, residual, weight, 1e-5, LIMIT)[1]
    rounded = (parts[0] + parts[1] + parts[2]).to(HALF)
    assert torch.equal(total, rounded)
    assert torch.equal(pair.slot(1, 0).contiguous().view(HALF), rounded)


@pytest.mark.parametrize("chunks", [32, 64, 512, 1024, 4096])
def test_no_two_threads_have_the_same_chunk(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "INTERPRETED", False)
    assert 32 * peer.warps_of(chunks) <= chunks


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks(ranks: int, tmp_path: Path) -> None:
    commands = [[sys.executable, __file__, str(rank), str(ranks), str(tmp_path)] for rank in range(ranks)]
    processes = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)


def run_rank(rank: int, ranks: int, folder: Path) -> None:
    """Check sums and gathers of more and of fewer rows than there are channels, in one shot and in two."""
    from dovetail.engine.mesh import connect
    from dovetail.ops.peer import PeerCollectives
    from dovetail.ops.triton import peer_rules
    from dovetail.testing.collectives import check_gather, check_sums, rank_tensors

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    size = 40
    row, wide = 2 * size, 16 * size  # gathered rows have two blocks
    peer_rules.is_one_shot = lambda ranks, rows, row_bytes: rows <= 5
    peer_rules.ONE_SHOT_BYTES, peer_rules.CHANNEL_BYTES = (5 if ranks > 2 else 3) * row, (3 if ranks == 2 else 6) * row
    peer_rules.GATHER_CHUNKS, peer_rules.GATHER_BYTES = 32, 3 * wide
    numbers = itertools.count()
    shared: list[torch.Tensor] = []

    def share(space: int) -> tuple[torch.Tensor, list[int]]:
        number = next(numbers)
        files = [folder / f"{number}.{other}" for other in range(ranks)]
        files[rank].write_bytes(bytes(space))
        others.agree(True)
        found = [torch.from_file(str(file), shared=True, size=space // 4, dtype=torch.int32) for file in files]
        shared.extend(found)
        return found[rank], [memory.data_ptr() for memory in found]

    others = connect(rank, ranks, cpu, folder / "rendezvous").tp
    collectives = PeerCollectives(others, share, 60.0)
    for seed, rows in enumerate((2, 7, 1, 5, 0)):
        for parts in (0, 2) if rows == 2 else (0,):
            tensors = rank_tensors(ranks, rows, size, HALF, cpu, seed, parts)
            check_sums(collectives, tensors, 2e-3)
    single = rank_tensors(ranks, 3, size, torch.float32, cpu, 99).addends
    got = collectives.all_reduce(single[rank].clone())  # through gloo
    torch.testing.assert_close(got, sum(single))
    for rows in (1, 4):
        check_gather(collectives, rows, 8 * size, ranks * 8 * size, HALF, cpu)
        check_gather(collectives, rows, 8 * size, ranks * 8 * size - 8, HALF, cpu)
        check_gather(collectives, rows, 4 * size + 4, ranks * (4 * size + 4) - 12, torch.float32, cpu)
    collectives.agree(True)
    assert len(shared) == 4 * ranks, "one shot, two shots, two widths of gathered rows"
    assert all((memory == EMPTY).all() for memory in shared), "a slot was not emptied"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from quick_interpreter import quick_interpreter

    with quick_interpreter():
        run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
