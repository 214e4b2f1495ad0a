"""Test the kernels of experts with MXFP4 weights that dequantize a weight once for up to 64 pairs, interpreted on the CPU, against plain
float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_mxfp4_words_triton.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.interfaces.expert_shapes import Routing
from dovetail.ops import experts as torch_experts
from dovetail.ops.triton import expert_layers as layers
from dovetail.ops.triton import mxfp4_words
from dovetail.ops.triton.routing import sort_by_expert
from mxfp4_layers import TOLERANCES, choose, double, weights_of

words: Any = mxfp4_words


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def skewed(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """Choose expert 1 for all tokens, expert 2 for a third of them, and others."""
    ids = choose(tokens, experts, top_k)
    for row, chosen in enumerate(ids):
        first = [1] + [2] * (row % 3 == 0)
        chosen.copy_(torch.tensor([*first, *(e for e in range(3, experts) if e % 2 == row % 2)])[:top_k])
    return ids


@pytest.mark.parametrize(
    ("hidden", "size", "kind"),
    [
        (160, 192, "bias"),
        (224, 128, "some experts"),
        pytest.param(128, 416, "scaled", marks=pytest.mark.full),
        pytest.param(288, 256, "plain", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("tokens", [60, *(pytest.param(tokens, marks=pytest.mark.full) for tokens in (9, 24, 150))])
def test_products_equal_those_in_double_precision(
    monkeypatch: pytest.MonkeyPatch, tokens: int, hidden: int, size: int, kind: str
) -> None:
    """Sizes have last chunks of 32, 64, 96 and 128 columns, and last tiles of 64 to 128 rows. Of 60 tokens, blocks have 60, 20 and fewer
    pairs."""
    monkeypatch.setattr(mxfp4_words, "pays", lambda *_: True)
    dtype, experts, top_k = torch.float16, 8, 3
    more = {"scaled_input": True} if kind == "scaled" else {"first": 1, "whole": 12} if kind == "some experts" else {}
    weights = weights_of(experts, hidden, size, dtype, bias=kind == "bias", **more)
    given = Routing(skewed(tokens, weights.whole, top_k), torch.rand(tokens, top_k))
    x = (torch.randn(tokens, hidden) / 8).to(dtype)
    assert words.fits(x, weights)
    exact = torch_experts.experts(x.double(), given, double(weights))
    got = layers.experts(x, given, weights)
    assert got.dtype is dtype
    assert ((got.double() - exact).abs() <= 2 * TOLERANCES[dtype] * (exact.abs() + 1)).all()
    if tokens == 60 and kind != "some experts":
        parts = layers.expert_parts(x, given, weights)
        assert ((parts.double().sum(0) - exact).abs() <= 2 * TOLERANCES[dtype] * (exact.abs() + 1)).all()


@pytest.mark.parametrize(("width", "sorted_apart"), [(128, False), (160, True), (2880, False)])
def test_columns_are_in_the_order_of_words(monkeypatch: pytest.MonkeyPatch, width: int, sorted_apart: bool) -> None:
    """A word of 16 bits has columns ``2 i``, ``2 i + 16``, ``2 i + 1`` and ``2 i + 17`` of a block of 32, in this order."""
    monkeypatch.setattr(mxfp4_words, "ONE_KERNEL", 5 if sorted_apart else 6)
    x = torch.arange(3 * width).view(3, width).to(torch.float16 if width < 600 else torch.int32)
    ids = choose(3, 8, 2)
    order, got = words.sorted_and_ordered(x, ids, 2, 5, 16)
    whole, last = divmod(width - 1, 128)
    starts = [128 * chunk for chunk in range(whole)] + [width - 128]
    for chunk, start in enumerate(starts):
        repeated = 127 - last if chunk == whole else 0
        for word in range(repeated // 4, 32):
            first = start + word // 8 * 32 + word % 8 * 2
            for plane, column in enumerate((first, first + 16, first + 1, first + 17)):
                assert torch.equal(got[:, 128 * chunk + 32 * plane + word], x[:, column])
    expected = sort_by_expert(ids, 2, 5, 16)
    count = int(expected.used)
    assert int(order.used) == count
    assert torch.equal(order.blocks[:count], expected.blocks[:count])
    pairs = int(expected.blocks[:count, 2].max())
    assert torch.equal(order.pairs[:pairs], expected.pairs[:pairs])


def test_sizes_that_do_not_fit_are_multiplied_by_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4_words, "pair_results", lambda *_, **__: pytest.fail("the kernel needs 128 columns"))
    weights, x = weights_of(4, 96, 128, torch.float16, bias=False), torch.randn(40, 96).half() / 8
    assert not words.fits(x, weights)
    given = Routing(choose(40, 4, 2), torch.rand(40, 2))
    exact = torch_experts.experts(x.double(), given, double(weights))
    got = layers.experts(x, given, weights)
    assert ((got.double() - exact).abs() <= 2 * TOLERANCES[torch.float16] * (exact.abs() + 1)).all()
