"""Test the kernels of experts for many tokens, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_experts_many_triton.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, SwiGLU
from dovetail.ops import experts as torch_experts
from dovetail.ops.triton import experts_many
from dovetail.ops.triton.experts import add_up_pairs
from dovetail.ops.triton.experts_many import ManyTile, ManyTiles


@pytest.mark.parametrize(("persistent", "block_m"), [(0, 64), (1, 16)])
@pytest.mark.parametrize("kind", ["plain", "bias", "scaled", "some experts"])
def test_products_equal_those_in_double_precision(
    kind: str, persistent: int, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(experts_many, "processors", lambda _: 5)
    experts, hidden, size, top_k, tokens = 4, 48, 40, 2, 41
    more = {"scaled_input": True} if kind == "scaled" else {"first": 2, "whole": 8} if kind == "some experts" else {}
    weights = ExpertWeights(
        gate_up=torch.randn(experts, 2 * size, hidden).half() / 4,
        down=torch.randn(experts, hidden, size).half() / 4,
        activation=SwiGLU(1.702, 0.8, 1.0) if kind == "bias" else SILU,
        gate_up_bias=torch.randn(experts, 2 * size).half() if kind == "bias" else None,
        down_bias=torch.randn(experts, hidden).half() if kind == "bias" else None,
        **{"whole": experts, **more},  # pyright: ignore[reportArgumentType]
    )
    ids = torch.rand(tokens, weights.whole).topk(top_k, 1).indices.int()
    given, x = Routing(ids, torch.rand(tokens, top_k)), torch.randn(tokens, hidden).half()
    tile = ManyTile(32, 32, 4, 2, persistent)
    assert experts_many.fits(x, weights)
    got = add_up_pairs(
        experts_many.pair_results(x, given, weights, ManyTiles(block_m, tile, tile)), given, weights, None
    )
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    wide = {name: None if getattr(weights, name) is None else getattr(weights, name).double() for name in names}
    expected = torch_experts.experts(x.double(), given, dataclasses.replace(weights, **wide))
    torch.testing.assert_close(got.double(), expected, atol=1e-2, rtol=1e-2)


def test_layers_that_descriptors_cannot_address_do_not_fit() -> None:
    weights = ExpertWeights(torch.zeros(2, 40, 16), torch.zeros(2, 16, 20))
    assert not experts_many.fits(torch.zeros(3, 16, dtype=torch.float16), weights)
    assert not experts_many.fits(torch.zeros(3, 16), weights)
