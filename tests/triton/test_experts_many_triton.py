"""Test the kernels of experts for many tokens, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_experts_many_triton.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, SwiGLU
from dovetail.ops import experts as torch_experts
from dovetail.ops.triton import expert_layers as layers
from dovetail.ops.triton import experts, experts_many
from dovetail.ops.triton.expert_tiles import ExpertTile, ExpertTiles, tiles_of


# rows of pairs that are not stored are memory that nothing has written, which may be infinite
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("per_sm", "block_m"), [(1, 64), (2, 16)])
@pytest.mark.parametrize("kind", ["plain", "bias", "scaled", "some experts"])
def test_products_equal_those_in_double_precision(
    kind: str, per_sm: int, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(experts_many, "processors", lambda _: 5)
    number, hidden, size, top_k, tokens = 4, 48, 40, 2, 41
    more = {"scaled_input": True} if kind == "scaled" else {"first": 2, "whole": 8} if kind == "some experts" else {}
    weights = ExpertWeights(
        gate_up=torch.randn(number, 2 * size, hidden).half() / 4,
        down=torch.randn(number, hidden, size).half() / 4,
        activation=SwiGLU(1.702, 0.8, 1.0) if kind == "bias" else SILU,
        gate_up_bias=torch.randn(number, 2 * size).half() if kind == "bias" else None,
        down_bias=torch.randn(number, hidden).half() if kind == "bias" else None,
        **{"whole": number, **more},  # pyright: ignore[reportArgumentType]
    )
    ids = torch.rand(tokens, weights.whole).topk(top_k, 1).indices.int()
    given, x = Routing(ids, torch.rand(tokens, top_k)), torch.randn(tokens, hidden).half()
    tile = ExpertTile(32, 32, 4, 2, per_sm)
    assert experts_many.fits(x, weights)
    got = layers.experts(x, given, weights, None, ExpertTiles(block_m, tile, tile))
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    wide = {name: None if getattr(weights, name) is None else getattr(weights, name).double() for name in names}
    expected = torch_experts.experts(x.double(), given, dataclasses.replace(weights, **wide))
    torch.testing.assert_close(got.double(), expected, atol=1e-2, rtol=1e-2)
    if kind != "some experts":
        parts = experts.pair_results(x, given, weights, ExpertTiles(block_m, tile, tile), in_parts=True)
        torch.testing.assert_close(parts.double().sum(0), expected, atol=1e-2, rtol=1e-2)


def test_many_pairs_of_each_expert_use_these_kernels_where_they_fit() -> None:
    for tokens in (64, 2048, 8192):
        for fits in (False, True):
            tiles = tiles_of(tokens, 128, 8, 2048, 768, 1.0, 2, fits)
            assert (tiles.gate_up.per_sm is not None) == (fits and tokens == 8192)
            assert (tiles.down.per_sm is not None) == (fits and tokens == 8192)


def test_layers_that_descriptors_cannot_address_do_not_fit() -> None:
    weights = ExpertWeights(torch.zeros(2, 40, 16), torch.zeros(2, 16, 20))
    assert not experts_many.fits(torch.zeros(3, 16, dtype=torch.float16), weights)
    assert not experts_many.fits(torch.zeros(3, 16), weights)
