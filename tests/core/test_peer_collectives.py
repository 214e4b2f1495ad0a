"""Test which sums and gathers go through peer memory, without a GPU.

.venv/bin/python -m pytest -q tests/core/test_peer_collectives.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from dovetail.interfaces.mesh import Mesh, OneRank
from dovetail.layers.linear import RowLinear
from dovetail.layers.norm import RMSNorm
from dovetail.ops import peer
from dovetail.ops.parts import Parts, RankAddend
from dovetail.ops.peer import PeerCollectives, Share
from dovetail.ops.triton import peer_rules

MOST_PARTS_ROWS = 128
"""Products of up to this number of rows are returned in parts."""


class Others(OneRank):
    """Be one of two ranks, of which the other adds nothing, and count calls."""

    size = 2

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_reduce")
        return x

    def all_reduce_norm(self, x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append("all_reduce_norm")
        return super().all_reduce_norm(x, *others)

    def all_gather(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        self.calls.append("all_gather")
        return torch.cat([x, x], 1)[:, :width]


class PeerMemoryUsed(Exception):
    pass


def allocate(space: int) -> tuple[torch.Tensor, list[int]]:
    raise PeerMemoryUsed


@pytest.fixture
def others() -> Others:
    return Others()


@pytest.fixture
def collectives(others: Others) -> PeerCollectives:
    return PeerCollectives(others, allocate, 1.0)


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("row_bytes", [16, 2048, 8192, 10240, 16384, 32768])
def test_channels_hold_what_the_rule_sends_through_them(ranks: int, row_bytes: int) -> None:
    for one_shot in (True, False):
        rows = peer_rules.channel_rows(ranks, row_bytes, one_shot=one_shot)
        assert rows >= 1
        assert rows * row_bytes <= peer_rules.CHANNEL_BYTES
        assert one_shot or rows % ranks == 0, "a channel of two shots has a row of each rank"
    for rows in range(1, MOST_PARTS_ROWS + 1):
        one_shot = peer_rules.is_one_shot(ranks, rows, row_bytes)
        assert rows <= peer_rules.channel_rows(ranks, row_bytes, one_shot=one_shot), "parts are added up at once"


def test_two_ranks_add_up_in_one_shot_and_more_ranks_only_what_is_little() -> None:
    assert all(peer_rules.is_one_shot(2, rows, 8192) for rows in (1, 100, 100_000))
    for ranks in range(3, 9):
        kinds = [peer_rules.is_one_shot(ranks, rows, 8192) for rows in (1, 16, 10_000)]
        assert kinds == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_of_16_bits_go_through_peer_memory(collectives: PeerCollectives, dtype: torch.dtype) -> None:
    x = torch.ones(3, 16, dtype=dtype)
    with pytest.raises(PeerMemoryUsed):
        collectives.all_reduce(x)
    with pytest.raises(PeerMemoryUsed):
        collectives.all_reduce_norm(x, x, x[0], 1e-5)
    with pytest.raises(PeerMemoryUsed):
        collectives.all_reduce_norm(torch.ones(2, 3, 16), x, x[0], 1e-5)
    with pytest.raises(PeerMemoryUsed):
        collectives.all_gather(x)


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(3, 16),  # float32
        torch.ones(3, 12, dtype=torch.bfloat16),  # no multiple of 16 bytes
        torch.ones(0, 16, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_other_tensors_do_not(collectives: PeerCollectives, others: Others, x: torch.Tensor) -> None:
    collectives.all_reduce(x)
    collectives.all_reduce_norm(x, x, torch.ones(x.shape[1], dtype=x.dtype), 1e-5)
    assert others.calls == ["all_reduce", "all_reduce_norm"]


@pytest.mark.parametrize("shape", [(2, 12), (3, 2, 12)], ids=["sums", "parts"])
def test_a_norm_with_a_weight_of_more_bits_follows_the_sum(
    collectives: PeerCollectives, others: Others, shape: tuple[int, ...]
) -> None:
    """The fused kernels read weights of the tensors' dtype. The sum goes through peer memory if it can."""
    x, residual = torch.randn(shape), torch.randn(2, 12).bfloat16()
    x = x if len(shape) == 3 else x.bfloat16()
    weight = 1 + torch.rand(12) * 1e-3
    normed, total = collectives.all_reduce_norm(x.clone(), residual, weight, 1e-5)
    assert others.calls == ["all_reduce"]
    added = x.sum(0).bfloat16() if len(shape) == 3 else x
    assert torch.equal(total, added + residual)
    exact = torch.nn.functional.rms_norm(total.double(), (12,), weight.double(), 1e-5)
    torch.testing.assert_close(normed.double(), exact, rtol=2**-8, atol=0)
    with pytest.raises(PeerMemoryUsed):
        collectives.all_reduce_norm(torch.ones(2, 16).bfloat16(), torch.ones(2, 16).bfloat16(), torch.ones(16), 1e-5)


def test_parts_are_added_up_for_others(collectives: PeerCollectives, others: Others) -> None:
    parts, residual = torch.randn(3, 2, 12), torch.randn(2, 12).bfloat16()
    total = collectives.all_reduce_norm(parts, residual, residual[0], 1e-5)[1]
    assert others.calls == ["all_reduce_norm"]
    assert torch.equal(total, (parts[0] + parts[1] + parts[2]).bfloat16() + residual)


@pytest.mark.parametrize(
    ("x", "width"),
    [
        (torch.ones(3, 16, dtype=torch.int64), None),
        (torch.ones(3, 12, dtype=torch.bfloat16), None),
        (torch.ones(3, 16, dtype=torch.bfloat16), 31),
        (torch.ones(0, 16, dtype=torch.bfloat16), None),
        (torch.ones(16, 16, dtype=torch.bfloat16).t(), None),
        (torch.ones(49, dtype=torch.bfloat16)[1:].view(3, 16), None),  # its address is no multiple of 16 bytes
    ],
)
def test_other_gathers_do_not(collectives: PeerCollectives, others: Others, x: torch.Tensor, width: int | None) -> None:
    collectives.all_gather(x, width)
    assert others.calls == ["all_gather"]


def test_nothing_is_allocated_in_a_capture(
    collectives: PeerCollectives, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    collectives.all_reduce(torch.ones(3, 16, dtype=torch.bfloat16))
    assert others.calls == ["all_reduce"]


def test_a_second_way_to_share_memory_is_tried(
    others: Others, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = torch.zeros(4, dtype=torch.int32)

    def broken(*_: object) -> Share:
        raise RuntimeError("no group\nmore")

    def works(*_: object) -> Share:
        return lambda space: (memory, [memory.data_ptr(), 1])

    monkeypatch.setattr(peer, "_unreachable", lambda *_: None)
    monkeypatch.setattr(peer, "symmetric_memory", broken)
    for second, expected in ((works, PeerCollectives), (broken, Others)):
        monkeypatch.setattr(peer, "ipc_memory", second)
        found = peer.peer_collectives(others, HashStore(), torch.device("cpu"), 1.0)
        assert type(found) is expected
        assert "no peer memory by broken: RuntimeError: no group" in caplog.text
    assert "NCCL adds up and gathers" in caplog.text


def test_memory_without_an_address_is_refused(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(peer, "_unreachable", lambda *_: None)
    for addresses in ([memory.data_ptr(), 0], [memory.data_ptr() + 4, 8], [memory.data_ptr()]):

        def wrong(*_: object, addresses: list[int] = addresses) -> Share:
            return lambda space: (memory, addresses)

        monkeypatch.setattr(peer, "symmetric_memory", wrong)
        monkeypatch.setattr(peer, "ipc_memory", wrong)
        assert peer.peer_collectives(others, HashStore(), torch.device("cpu"), 1.0) is others


class SplitProduct:
    """Return every product in two parts."""

    most_rows = 4

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def parts(self, x: torch.Tensor) -> Parts:
        half = x.shape[1] // 2
        products = [x[:, :half] @ self.weight[:, :half].T, x[:, half:] @ self.weight[:, half:].T]
        return Parts(torch.stack(products))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize("adds_parts", [True, False])
def test_row_linear_leaves_parts_to_collectives_that_add_them_up(others: Others, adds_parts: bool) -> None:
    others.adds_parts = adds_parts
    layer, norm = RowLinear(16, 8, Mesh(others)), RMSNorm(8, 1e-5)
    layer.weight.data.normal_()
    norm.weight.data.normal_()
    layer.prepare()
    layer._product._few_rows = SplitProduct(layer.weight)  # type: ignore
    layer._product._compiled = None  # type: ignore
    layer._in_parts = True
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    added = layer.parts_forward(x)
    assert isinstance(added, RankAddend)
    assert added.x.shape == ((2, 3, 8) if adds_parts else (3, 8))
    assert others.calls == [], "the sum over ranks is left to the norm"
    others.all_reduce_norm = lambda x, *rest: OneRank.all_reduce_norm(others, x.sum(0) if x.ndim == 3 else x, *rest)
    total = norm.add_forward(added, residual)[1]
    torch.testing.assert_close(total, x @ layer.weight.T + residual)
