"""Test the backend of experts ``triton`` on CUDA with its conformance suite, graphs and rehearsal included, and that these cases
fail for backends that are wrong.

Run on a GPU machine: python -m pytest tests/gpu/test_experts_backends_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.interfaces.experts import ExpertsBackend, ExpertsContext, ExpertsProduct
from dovetail.ops.experts import GroupedProduct
from dovetail.testing.experts import ExpertsSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestTritonOnCuda(ExpertsSuite):
    name = "triton"
    device = "cuda"


class TestLargerLayers(ExpertsSuite):
    name = "triton"
    device = "cuda"
    hidden, size = 2048, 768


class KeepsTheFirstChoice(GroupedProduct):
    """Compute the experts of the first call in all calls with as many tokens."""

    first: Routing | None = None

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        if self.first is None or len(self.first.ids) != len(routing.ids):
            self.first = Routing(routing.ids.clone(), routing.weights.clone())
        return super().forward(x, self.first, shared)


class ReadsItsChoice(GroupedProduct):
    """Read on the host which experts were chosen, which must exist."""

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        assert int(routing.ids.max()) < self._weights.whole, "there is no such expert"
        return super().forward(x, routing, shared)


def broken(product: type[GroupedProduct]) -> ExpertsSuite:
    class Made(ExpertsBackend):
        def __init__(self, config: object, context: ExpertsContext) -> None:
            self._dtype = context.dtype

        def product(self, weights: ExpertWeights) -> ExpertsProduct:
            return product(weights, self._dtype)

    class Suite(TestTritonOnCuda):
        def make(self, context: ExpertsContext) -> ExpertsBackend:
            return Made(None, context)

    return Suite()


def test_the_suite_finds_graphs_that_keep_a_choice() -> None:
    TestTritonOnCuda().test_graphs(torch.bfloat16)
    with pytest.raises(AssertionError, match="difference of"):
        broken(KeepsTheFirstChoice).test_graphs(torch.bfloat16)


def test_the_suite_finds_products_that_read_what_was_not_computed() -> None:
    with pytest.raises(AssertionError, match="no such expert"):
        broken(ReadsItsChoice).test_rehearsal()
