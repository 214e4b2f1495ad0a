"""Test the kernels of MXFP4 weights in planes, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_mxfp4_planes_triton.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, SwiGLU
from dovetail.ops import experts as torch_experts
from dovetail.ops.mxfp4 import dequantize
from dovetail.ops.triton import mxfp4_planes
from dovetail.ops.triton.experts import add_up_pairs
from dovetail.ops.triton.mxfp4_tiles import Mxfp4Tile, Mxfp4Tiles


def test_planes_hold_every_code_in_every_column() -> None:
    codes = torch.randint(256, (3, 64), dtype=torch.uint8)
    planes = mxfp4_planes.in_planes(codes)
    assert planes.shape == codes.shape
    words = planes.view(torch.uint16).to(torch.int32).unflatten(1, (-1, 8))
    found = [
        (words >> sign & 1) << 3 | words >> low & 7
        for sign, low in mxfp4_planes._POSITIONS  # pyright: ignore[reportPrivateUsage]
    ]
    halves = codes.unflatten(1, (-1, 16)).to(torch.int32)
    assert torch.equal(torch.stack(found, 2).flatten(1), torch.cat((halves & 15, halves >> 4), 2).flatten(1))


@pytest.mark.parametrize(("tokens", "block_k"), [(1, 64), (13, 32)])
@pytest.mark.parametrize("kind", ["plain", "bias", "scaled", "some experts"])
def test_products_equal_those_in_double_precision(kind: str, block_k: int, tokens: int) -> None:
    torch.manual_seed(0)
    experts, hidden, size, top_k = 4, 160, 96, 3
    more = {"scaled_input": True} if kind == "scaled" else {"first": 4, "whole": 16} if kind == "some experts" else {}
    weights = ExpertWeights(
        torch.randint(256, (experts, 2 * size, hidden // 2), dtype=torch.uint8),
        torch.randint(256, (experts, hidden, size // 2), dtype=torch.uint8),
        SwiGLU(1.702, 0.8, 1.0) if kind == "bias" else SILU,
        torch.randn(experts, 2 * size) if kind == "bias" else None,
        torch.randn(experts, hidden) if kind == "bias" else None,
        format="mxfp4",
        gate_up_scale=torch.randint(121, 126, (experts, hidden // 32, 2 * size), dtype=torch.uint8),
        down_scale=torch.randint(121, 126, (experts, size // 32, hidden), dtype=torch.uint8),
        **{"whole": experts, **more},  # pyright: ignore[reportArgumentType]
    )
    assert weights.gate_up_scale is not None
    assert weights.down_scale is not None
    ids = torch.rand(tokens, weights.whole).topk(top_k, 1).indices.int()
    given, x = Routing(ids, torch.rand(tokens, top_k)), torch.randn(tokens, hidden) / 8
    planes = dataclasses.replace(
        weights, gate_up=mxfp4_planes.in_planes(weights.gate_up), down=mxfp4_planes.in_planes(weights.down)
    )
    tile = Mxfp4Tile(64, block_k, 4, 2)
    results = mxfp4_planes.pair_results(x, given, planes, Mxfp4Tiles(16, tile, tile), in_parts=False)
    wide = dataclasses.replace(
        weights,
        gate_up=dequantize(weights.gate_up, weights.gate_up_scale, torch.float32).double(),
        down=dequantize(weights.down, weights.down_scale, torch.float32).double(),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias.double(),
        down_bias=None if weights.down_bias is None else weights.down_bias.double(),
        gate_up_scale=None,
        down_scale=None,
        format="plain",
    )
    exact = torch_experts.experts(x.double(), given, wide)
    got = add_up_pairs(results, given, weights, None)
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)
