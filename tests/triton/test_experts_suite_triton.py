"""Run the conformance suite of backends of experts with the kernels of ``triton``, interpreted on the CPU. The interpreter does
not multiply bfloat16.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_experts_suite_triton.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dovetail.gguf.block_types import TYPES
from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.interfaces.experts import ExpertsBackend, ExpertsContext, ExpertsProduct
from dovetail.ops import experts as ops
from dovetail.ops.packed_blocks import pack
from dovetail.registry.specs import ComponentSpec, Constraints
from dovetail.testing.experts import ExpertsSuite


def packed_as_on_cuda(weights: ExpertWeights) -> ExpertWeights:
    """Return the weights with packed blocks, if they are blocks of GGUF."""
    blocks = weights.blocks
    if blocks is None:
        return weights
    gate_up, down = (
        pack(tensor.flatten(0, 1), TYPES[kind]).view(*tensor.shape[:2], -1)
        for tensor, kind in ((weights.gate_up, blocks.gate_up), (weights.down, blocks.down))
    )
    packed = blocks._replace(packed=True)
    return dataclasses.replace(weights, gate_up=gate_up, down=down, blocks=packed)


class Interpreted(ExpertsProduct):
    """Compute what ``GroupedProduct`` computes on CUDA."""

    describe = "interpreted"

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights, self._kernels = packed_as_on_cuda(weights), ops._triton()

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        return self._kernels.experts(x, routing, self._weights, shared)

    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor | None:
        whole = len(self._weights.gate_up) == self._weights.whole
        in_parts = whole and 1 <= x.shape[0] <= ops.MOST_IN_PARTS
        return self._kernels.expert_parts(x, routing, self._weights) if in_parts else None


class Backend(ExpertsBackend):
    def __init__(self, config: object, context: ExpertsContext) -> None:
        self._context = context

    def product(self, weights: ExpertWeights) -> ExpertsProduct:
        if self._context.batch_invariant:
            return ops.InvariantProduct(weights, self._context.dtype)
        return Interpreted(weights)


class Suite(ExpertsSuite):
    name = "triton"
    device = "cpu"

    @property
    def spec(self) -> ComponentSpec:
        return dataclasses.replace(super().spec, constraints=Constraints(dtypes=("float32", "float16")))

    def make(self, context: ExpertsContext) -> ExpertsBackend:
        return Backend(None, context)


@pytest.mark.full
class TestTriton(Suite):
    """Run all cases."""


@pytest.mark.parametrize("variant", ["biases and clamped", "scaled inputs"])
def test_some_results(variant: str) -> None:
    for tokens in (1, 9):
        Suite().test_results_are_those_of_each_expert(variant, tokens)


def test_parts() -> None:
    Suite().test_parts_are_those_of_the_sum()
