"""Test the kernels of experts with MXFP4 weights, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_mxfp4_triton.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dovetail.interfaces.expert_shapes import Routing
from dovetail.ops import experts as torch_experts
from dovetail.ops.expert_scratch import ExpertScratch
from dovetail.ops.mxfp4 import dequantize, powers
from dovetail.ops.triton import expert_layers as layers
from dovetail.ops.triton import experts_many, mxfp4, mxfp4_numbers, mxfp4_plain
from dovetail.ops.triton.mxfp4_tiles import MOST_SHARED, Mxfp4Tile, Mxfp4Tiles, reads_ahead, shared_bytes, tiles_of
from mxfp4_layers import TOLERANCES, choose, double, weights_of

kernels: Any = mxfp4
numbers: Any = mxfp4_numbers


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@triton.jit
def _dequantize(codes, scales, low, high, HALF_K: tl.constexpr, BLOCK_N: tl.constexpr) -> None:
    row, at, group = tl.arange(0, BLOCK_N), tl.arange(0, HALF_K), tl.arange(0, HALF_K // 16)
    dtype: tl.constexpr = low.dtype.element_ty
    tile = tl.load(codes + row[:, None] * HALF_K + at[None, :])
    factors = numbers.scale_factors(
        tl.load(scales + group[:, None] * BLOCK_N + row[None, :]), dtype, BLOCK_N, HALF_K, False
    )
    place = row[:, None] * HALF_K + at[None, :]
    tl.store(low + place, numbers.dequantized_codes(tile, factors, False, dtype, False))
    tl.store(high + place, numbers.dequantized_codes(tile, factors, True, dtype, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_code_and_scale_is_exact(dtype: torch.dtype) -> None:
    kernel: Any = _dequantize
    scales = torch.arange(104, 129) if dtype is torch.float16 else torch.arange(65, 192)
    scales = torch.cat((scales, scales[: -len(scales) % 16]))[: 128 if len(scales) > 32 else 32]
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(16, len(scales) // 16, 16, 16)
    codes = codes.permute(2, 0, 1, 3).reshape(16, -1)  # rows have different bytes, and their groups different scales
    groups = codes.shape[1] // 16
    groups_wanted = triton.next_power_of_2(groups)
    codes = torch.cat((codes, codes[:, : (groups_wanted - groups) * 16]), 1).contiguous()
    scale = torch.stack([scales.roll(row) for row in range(16)], 1)
    scale = torch.cat([scale] * -(-groups_wanted // len(scale)))[:groups_wanted].to(torch.uint8).contiguous()
    low, high = (torch.full(codes.shape, torch.nan, dtype=dtype) for _ in range(2))
    kernel[(1,)](codes, scale, low, high, HALF_K=codes.shape[1], BLOCK_N=16)
    rest = 1.0 if dtype is torch.float16 else 2.0**63
    got = torch.stack((low, high)).double().unflatten(-1, (-1, 16)).permute(1, 2, 0, 3).flatten(1) * rest
    expected = dequantize(codes, torch.full_like(scale, 127), torch.float64)
    expected *= powers(scale, torch.float64).T.repeat_interleave(32, 1)
    assert torch.equal(got, expected)


EVEN, UNEVEN = Mxfp4Tile(32, 32, 4, 2), Mxfp4Tile(64, 64, 4, 2)


@pytest.mark.parametrize(
    ("tokens", "tile", "dtype"),
    [
        (1, UNEVEN, torch.float32),
        (21, UNEVEN, torch.float16),
        pytest.param(1, EVEN, torch.float16, marks=pytest.mark.full),
        pytest.param(2, UNEVEN, torch.float16, marks=pytest.mark.full),
        pytest.param(40, EVEN, torch.float32, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "bias", "scaled", "some experts"])
def test_products_equal_those_in_double_precision(
    monkeypatch: pytest.MonkeyPatch, tokens: int, kind: str, tile: Mxfp4Tile, dtype: torch.dtype
) -> None:
    block_m = 8 if tokens < 8 else 16
    monkeypatch.setattr(kernels, "tiles_of", lambda *_: Mxfp4Tiles(block_m, tile, tile))
    experts, hidden, size, top_k = 4, 160, 96, 3
    more = {"scaled_input": True} if kind == "scaled" else {"first": 4, "whole": 16} if kind == "some experts" else {}
    weights = weights_of(experts, hidden, size, dtype, bias=kind == "bias", **more)
    ids = choose(tokens, weights.whole, top_k)
    if kind == "some experts":
        ids[0] = torch.tensor([15, 0, 5])
    given = Routing(ids, torch.rand(tokens, top_k))
    x = (torch.randn(tokens, hidden) / 8).to(dtype)
    shared = torch.randn(tokens, hidden).to(dtype) if kind == "plain" else None
    exact = torch_experts.experts(x.double(), given, double(weights), shared)
    got = layers.experts(x, given, weights, shared)
    assert got.dtype is dtype
    assert ((got.double() - exact).abs() <= TOLERANCES[dtype] * (exact.abs() + 1)).all()
    if shared is None and kind != "some experts":
        parts = layers.expert_parts(x, given, weights)
        assert parts.shape == (top_k, tokens, hidden)
        assert ((parts.double().sum(0) - exact).abs() <= TOLERANCES[dtype] * (exact.abs() + 1)).all()


# rows of a tile without a pair are read from memory that was never written, multiplied, and not stored
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["bias", "scaled", "some experts"])
def test_many_tokens_are_multiplied_with_dequantized_weights(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(mxfp4_plain, "MEAN_PAIRS", 4)
    monkeypatch.setattr(experts_many, "processors", lambda _: 3)
    experts, hidden, size, top_k, tokens = 3, 96, 64, 2, 19
    more = {"scaled_input": True} if kind == "scaled" else {"first": 3, "whole": 9} if kind == "some experts" else {}
    weights = weights_of(experts, hidden, size, torch.float16, bias=kind == "bias", **more)
    given, x = (
        Routing(choose(tokens, weights.whole, top_k), torch.rand(tokens, top_k)),
        torch.randn(tokens, hidden).half(),
    )
    assert mxfp4_plain.pays(x, top_k, weights)
    assert not mxfp4_plain.pays(x.float(), top_k, weights)
    scratch = ExpertScratch()
    exact = torch_experts.experts(x.double() / 8, given, double(weights))
    got = layers.experts(x / 8, given, weights, scratch=scratch)
    assert ((got.double() - exact).abs() <= TOLERANCES[torch.float16] * (exact.abs() + 1)).all()
    assert [*scratch._memory] == [experts * 2 * size * hidden]
    assert torch.equal(layers.experts(x / 8, given, weights), got)  # in memory of the call


def test_layers_of_one_size_share_memory_until_the_last_use() -> None:
    scratch, like = ExpertScratch(), torch.empty(0, dtype=torch.bfloat16)
    first, second = scratch.take(24, (2, 3, 4), like), scratch.take(24, (3, 4), like)
    assert (first.shape, first.dtype, second.shape) == ((2, 3, 4), torch.bfloat16, (3, 4))
    assert first.data_ptr() == second.data_ptr()
    assert scratch.take(12, (3, 4), like).data_ptr() != first.data_ptr()
    assert ExpertScratch().take(24, (2, 3, 4), like).data_ptr() != first.data_ptr()


def test_every_code_and_scale_of_a_layer_is_dequantized_exactly() -> None:
    weights = weights_of(3, 160, 352, torch.float16, bias=False)
    for codes, scale in ((weights.gate_up, weights.gate_up_scale), (weights.down, weights.down_scale)):
        assert scale is not None
        for dtype in (torch.float16, torch.bfloat16):
            out = torch.full((*codes.shape[:2], 2 * codes.shape[2]), torch.nan, dtype=dtype)
            got = mxfp4_plain.dequantize(codes, scale, out)
            assert torch.equal(got.float(), dequantize(codes, scale, torch.float32))


def test_no_tokens_and_tiles_of_the_rule() -> None:
    weights = weights_of(4, 64, 32, torch.float32, bias=False)
    empty = Routing(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
    assert layers.experts(torch.empty(0, 64), empty, weights).shape == (0, 64)
    for tokens in (1, 2, 40):
        given = Routing(choose(tokens, 4, 2), torch.rand(tokens, 2))
        x = torch.randn(tokens, 64)
        exact = torch_experts.experts(x.double(), given, double(weights))
        torch.testing.assert_close(layers.experts(x, given, weights).double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(32, 4, 2880, 2880), (128, 4, 2880, 1440), (32, 4, 64, 32)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_into_shared_memory(sizes: tuple[int, int, int, int], itemsize: int) -> None:
    for tokens in (1, 2, 8, 9, 16, 17, 64, 256, 1024, 8192, 65536):
        tiles = tiles_of(tokens, *sizes, 1.0, itemsize)
        assert tokens > 8 or tiles.block_m == 8, "an expert has one block, and its weight is read once"
        for tile in (tiles.gate_up, tiles.down):
            assert shared_bytes(tile, tiles.block_m, itemsize) <= MOST_SHARED
            assert tile.block_n >= 16 * tile.warps, "no two warps dequantize the same rows"
            assert itemsize > 2 or sizes[2] < 256 or reads_ahead(tile)
