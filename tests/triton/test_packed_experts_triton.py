"""Test the kernel of experts with packed blocks of GGUF, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_packed_experts_triton.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.gguf_blocks import random_blocks

from dovetail.gguf.block_types import TYPES
from dovetail.gguf.blocks import dequantize
from dovetail.interfaces.expert_shapes import SILU, ExpertBlocks, ExpertWeights, Routing, SwiGLU
from dovetail.ops import experts as torch_experts
from dovetail.ops.expert_formats import dequantized
from dovetail.ops.expert_scratch import ExpertScratch
from dovetail.ops.packed_blocks import PACKED, pack
from dovetail.ops.triton import expert_layers as layers
from dovetail.ops.triton import experts_many, packed_plain
from dovetail.ops.triton.packed_experts import block_of, tile_of

TOLERANCES = {torch.float32: 4e-5, torch.float16: 4e-3}
OTHERS = [kind for kind in PACKED if kind not in ("Q4_K", "Q6_K")]


def weights_of(
    kinds: tuple[str, str], experts: int, hidden: int, size: int, dtype: torch.dtype, *, bias: bool, **more: Any
) -> tuple[ExpertWeights, ExpertWeights]:
    """Return packed weights of random blocks, and the weights for which they stand in float64."""
    given, exact = [], []
    for kind, rows, columns in ((kinds[0], 2 * size, hidden), (kinds[1], hidden, size)):
        blocks = random_blocks(kind, experts * rows, columns)
        plain = dequantize(blocks, TYPES[kind]).double()
        given.append(pack(blocks, TYPES[kind]).view(experts, rows, -1))
        exact.append(plain.view(experts, rows, columns))
    weights = ExpertWeights(
        *given,
        activation=SwiGLU(1.702, 0.8, 1.0) if bias else SILU,
        gate_up_bias=torch.randn(experts, 2 * size).to(dtype) if bias else None,
        down_bias=torch.randn(experts, hidden).to(dtype) if bias else None,
        format="gguf",
        blocks=ExpertBlocks(*kinds, packed=True),
        **{"whole": experts, **more},
    )
    biases = {
        name: own.double() for name in ("gate_up_bias", "down_bias") if (own := getattr(weights, name)) is not None
    }
    return weights, dataclasses.replace(weights, gate_up=exact[0], down=exact[1], format="plain", blocks=None, **biases)


@pytest.mark.parametrize(
    ("kinds", "tokens", "dtype"),
    [
        (("Q4_K", "Q6_K"), 1, torch.float16),
        (("Q4_K", "Q6_K"), 9, torch.float32),
        *(pytest.param((kind, kind), 5, torch.float32, marks=pytest.mark.full) for kind in PACKED),
        *(pytest.param((kind, "Q4_0"), 21, torch.float16, marks=pytest.mark.full) for kind in OTHERS),
    ],
)
@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(one, marks=pytest.mark.full) for one in ("bias", "scaled", "some experts"))]
)
def test_products_are_those_of_the_dequantized_weights(
    kinds: tuple[str, str], tokens: int, dtype: torch.dtype, kind: str
) -> None:
    torch.manual_seed(0)
    large = any(TYPES[one].elements == 256 for one in kinds)
    experts, hidden, size, top_k = 3, 256 if large else 160, 256 if large else 96, 2
    more = {"scaled_input": True} if kind == "scaled" else {"first": 3, "whole": 9} if kind == "some experts" else {}
    weights, exact = weights_of(kinds, experts, hidden, size, dtype, bias=kind == "bias", **more)
    ids = torch.rand(tokens, weights.whole).topk(top_k, 1).indices.int()
    if kind == "some experts":
        ids[0] = torch.tensor([8, 4])
    given = Routing(ids, torch.rand(tokens, top_k))
    largest = float(exact.gate_up.abs().max())
    x = (torch.randn(tokens, hidden) / max(largest, 0.1) / 8).to(dtype)
    shared = torch.randn(tokens, hidden).to(dtype) if kind == "plain" else None
    expected = torch_experts.experts(x.double(), given, exact, shared)
    got = layers.experts(x, given, weights, shared)
    assert got.dtype is dtype
    allowed = TOLERANCES[dtype] * (1 + float(expected.square().mean().sqrt()))
    assert (got.double() - expected).abs().max() <= allowed
    if shared is None and kind != "some experts":
        parts = layers.expert_parts(x, given, weights)
        assert (parts.double().sum(0) - expected).abs().max() <= allowed
    plain = dequantized(weights, torch.float32)
    torch.testing.assert_close(plain.gate_up.double(), exact.gate_up, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(plain.down.double(), exact.down, rtol=1e-6, atol=1e-9)


def test_many_tokens_are_multiplied_with_dequantized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(packed_plain, "MEAN_PAIRS", 4)
    monkeypatch.setattr(experts_many, "processors", lambda _: 3)
    weights, exact = weights_of(("Q4_0", "Q8_0"), 3, 160, 96, torch.float16, bias=True, first=3, whole=9)
    x = (torch.randn(19, 160) / float(exact.gate_up.abs().max()) / 8).half()
    given = Routing(torch.rand(19, 9).topk(2, 1).indices.int(), torch.rand(19, 2))
    assert packed_plain.pays(x, 2, weights)
    assert not packed_plain.pays(x.float(), 2, weights)
    scratch = ExpertScratch()
    expected = torch_experts.experts(x.double(), given, exact)
    got = layers.experts(x, given, weights, scratch=scratch)
    allowed = TOLERANCES[torch.float16] * (1 + float(expected.square().mean().sqrt()))
    assert (got.double() - expected).abs().max() <= allowed
    assert [*scratch._memory] == [3 * 2 * 96 * 160]


def test_tiles_hold_whole_units_of_any_number_of_columns() -> None:
    for packing in PACKED.values():
        for columns in (32, 96, 256, 1408, 2048):
            assert tile_of(columns, packing).block_k % packing.unit == 0
    assert [block_of(tokens, 128, 8, 1.0) for tokens in (1, 256, 512, 4096)] == [16, 16, 32, 64]
