"""Test MXFP4 codes and scales against transformers and plain Python.

.venv/bin/python -m pytest -q tests/core/test_mxfp4.py
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dovetail.engine.warmup import EXPERT_TOKENS, PROMPT_TOKENS
from dovetail.ops import mxfp4
from dovetail.ops.triton.mxfp4_tiles import tiles_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_those_of_transformers(dtype: torch.dtype) -> None:
    """All bytes with all scales that bfloat16 has."""
    torch.manual_seed(0)
    blocks = torch.arange(256, dtype=torch.uint8).repeat(64)[torch.randperm(64 * 256)].view(2, 32, 16, 16)
    scales = torch.randint(10, 250, (2, 32, 16), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT
    codes = mxfp4.halved(blocks.flatten(-2))
    got = mxfp4.dequantize(codes, scales.mT.contiguous(), dtype)
    assert got.dtype is dtype
    assert torch.equal(got, expected)
    assert torch.equal(got.signbit(), expected.signbit())


def nearest(value: float, scale: float) -> float:
    """Return the E2M1 number nearest to a value, of two equally near ones that of the even code."""
    ratio = abs(value) / scale
    code = min(range(8), key=lambda code: (abs(mxfp4.VALUES[code] - ratio), code % 2))
    return math.copysign(mxfp4.VALUES[code] * scale, value)


def test_quantized_weights_are_the_nearest() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 5, 96) * torch.rand(3, 5, 1).exp2() ** 9
    weight[0, 0, :32] = 0.0
    weight[0, 1, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9]).repeat(4)  # the middles
    weight[0, 1, 1:32:2] *= -1
    codes, scale = mxfp4.quantize(weight)
    assert codes.shape == (3, 5, 48)
    assert scale.shape == (3, 3, 5)
    got = mxfp4.dequantize(codes, scale, torch.float32)
    for index in range(3 * 5 * 3):
        expert, row, block = index // 15, index // 3 % 5, index % 3
        values = weight[expert, row, block * 32 : block * 32 + 32].tolist()
        largest = max(map(abs, values))
        power = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else 1.0
        assert got[expert, row, block * 32 : block * 32 + 32].tolist() == [nearest(value, power) for value in values]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_blocks_with_no_number_have_no_number_as_scale(value: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 40] = value
    codes, scale = mxfp4.quantize(weight)
    assert (scale == mxfp4.NAN_SCALE).tolist() == [[False, False], [False, True]]
    assert mxfp4.dequantize(codes, scale, torch.float32)[1, 32:].isnan().all()


def test_numbers_that_are_codes_stay() -> None:
    codes = mxfp4.halved(torch.randint(256, (4, 64), dtype=torch.uint8))
    weight = mxfp4.dequantize(codes, torch.full((4, 4), 120, dtype=torch.uint8), torch.float32)
    weight[:, ::32] = 6 * 2.0**-7  # so that a block has its scale
    assert torch.equal(mxfp4.dequantize(*mxfp4.quantize(weight), torch.float32), weight)


@pytest.mark.parametrize("value", [1e-38, 3e-39, 3e38])
def test_numbers_at_the_ends_of_the_range(value: float) -> None:
    weight = torch.full((1, 32), value)
    got = mxfp4.dequantize(*mxfp4.quantize(weight), torch.float32)
    assert (got / weight - 1).abs().max() <= 0.26


@pytest.mark.parametrize("sizes", [(32, 4, 2880, 2880), (128, 4, 2880, 2880), (128, 8, 2048, 768), (8, 2, 4096, 14336)])
def test_every_tile_is_compiled_before_prompts_need_it(sizes: tuple[int, int, int, int]) -> None:
    noted = {tiles_of(tokens, *sizes, 1.0, 2) for tokens in (*PROMPT_TOKENS, *EXPERT_TOKENS)}
    assert {tiles_of(tokens, *sizes, 1.0, 2) for tokens in range(1, 9000, 7)} <= noted
