"""Test the kernels that store keys and values with scales, interpreted, against the torch path and against the kernel that
stores them without scales.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_kv_scales_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.interfaces.store import KVScales
from dovetail.ops.kv_dtypes import KVScaleRows
from dovetail.ops.kv_scales import store_scaled as reference
from dovetail.ops.triton.kv_scales import store_scaled
from dovetail.ops.triton.rotary import rotate_and_store, rotate_and_store_scaled

FP8 = torch.float8_e4m3fn
each_kind = pytest.mark.parametrize("computed", [True, False], ids=["computed", "fixed"])


def scaled_numbers(heads: int, size: int, *, computed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers ``[2, 4 tokens, heads, size]`` that need no rounding, as rounding is not quite right where Triton is
    interpreted; how they are stored; and their scales, ``[2, 4, heads]``."""
    stored = torch.randint(-15, 16, (2, 4, heads, size)).float()
    stored[..., 1] = 448  # the largest number
    exponents = torch.randint(-9, 9, (2, 4 if computed else 1, heads)).expand(2, 4, heads)
    scales = torch.exp2(exponents.float())
    return stored * scales[..., None], stored, scales


def memory_of(heads: int, size: int, scales: torch.Tensor, *, computed: bool) -> tuple[torch.Tensor, KVScaleRows]:
    """Return memory of 12 places for keys and values, and their scales."""
    memory = torch.zeros(2, 12, heads, size).to(FP8)
    if computed:
        return memory, KVScaleRows(*torch.full((2, 12, heads), 7.0, dtype=torch.bfloat16).unbind(0))
    return memory, KVScaleRows(*scales[:, 0].contiguous().unbind(0))


def check(
    memory: torch.Tensor, rows: KVScaleRows, at: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor
) -> None:
    """Check that numbers and computed scales are at ``at``, and nothing else was written."""
    others = [place for place in range(12) if place not in at.tolist()]
    for own, row, wanted, scale in zip(memory, rows, stored, scales, strict=True):
        assert own.float()[at].equal(wanted)
        assert not own.float()[others].any()
        if rows.computed:
            assert row[at].float().equal(scale)
            assert (row[others] == 7).all()


@each_kind
@pytest.mark.parametrize(("heads", "size"), [(2, 8), (3, 12), (1, 64)])
def test_keys_and_values_are_stored_with_scales(heads: int, size: int, computed: bool) -> None:
    x, stored, scales = scaled_numbers(heads, size, computed=computed)
    qkv, at = torch.cat((torch.zeros(4, heads, size), *x.unbind(0)), 1), torch.tensor([7, 0, 4, 5])
    memory, rows = memory_of(heads, size, scales, computed=computed)
    exact, theirs = memory_of(heads, size, scales, computed=computed)
    store_scaled(qkv[:, heads : 2 * heads], qkv[:, 2 * heads :], *memory.unbind(0), rows, at)
    reference(*x.unbind(0), *exact.unbind(0), theirs, at)
    check(memory, rows, at, stored, scales)
    check(exact, theirs, at, stored, scales)


@each_kind
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 8), (3, 1, 12)])
def test_rotated_keys_are_stored_with_scales(heads: int, kv_heads: int, size: int, computed: bool) -> None:
    """A rotation by 0 and by 180 degrees needs no rounding; queries are those of the kernel without scales."""
    x, stored, scales = scaled_numbers(kv_heads, size, computed=computed)
    table = torch.stack((torch.ones(2, size), torch.zeros(2, size)), 1)
    table[1, 0] = -1
    qkv, at = torch.cat((torch.randn(4, heads, size), *x.unbind(0)), 1), torch.tensor([6, 4, 11, 1])
    positions = torch.tensor([0, 1, 1, 0])
    memory, rows = memory_of(kv_heads, size, scales, computed=computed)
    shape = 3, 4, kv_heads
    views = KVScales(*(own.view(shape) if computed else own.expand(shape) for own in rows))
    pages = (own.view(*shape, size) for own in memory)
    q = rotate_and_store_scaled(qkv, heads, kv_heads, table, positions, None, *pages, views, at)
    plain = torch.zeros(2, *shape, size).unbind(0)
    assert q.equal(rotate_and_store(qkv, heads, kv_heads, table, positions, None, *plain, at))
    stored[0, 1:3] *= -1
    check(memory, rows, at, stored, scales)
