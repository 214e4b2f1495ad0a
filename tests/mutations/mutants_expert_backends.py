"""Define broken backends of experts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from mutant import Mutant, Suite

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing
from dovetail.interfaces.experts import ExpertsBackend, ExpertsContext, ExpertsProduct
from dovetail.interfaces.features import Feature
from dovetail.ops.experts import GroupedProduct
from dovetail.registry.specs import ComponentSpec
from dovetail.testing.experts import ExpertsSuite


class OneByOne(GroupedProduct):
    """Compute one token at a time, and return the halves of the result as parts."""

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        rows = []
        for token in range(len(x)):
            own = slice(token, token + 1)
            one = Routing(routing.ids[own], routing.weights[own])
            rows.append(super().forward(x[own], one, None if shared is None else shared[own]))
        return torch.cat(rows) if rows else x.clone()

    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor | None:
        return self.forward(x, routing, None).float().expand(2, -1, -1) / 2


class LosesAPart(OneByOne):
    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor | None:
        return self.forward(x, routing, None).float()[None] * torch.tensor([0.5, 0.4])[:, None, None]


class PartsOf16Bits(OneByOne):
    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor | None:
        return self.forward(x, routing, None).bfloat16()[None]


class DependsOnTheNumber(OneByOne):
    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        return super().forward(x, routing, shared) * (1 + 2.0**-20 * (len(x) % 2))


class PartsOfFewTokens(OneByOne):
    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor | None:
        return super().parts(x, routing) if len(x) < 20 else None


class WeightsEqually(GroupedProduct):
    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        equal = torch.full_like(routing.weights, 1 / routing.ids.shape[1])
        return super().forward(x, Routing(routing.ids, equal), shared)


class ChangesItsInput(GroupedProduct):
    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        result = super().forward(x, routing, shared)
        x.mul_(2)
        return result


class AlwaysFloat32(GroupedProduct):
    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        return super().forward(x, routing, shared).float()


class ForgetsTheShared(GroupedProduct):
    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        return super().forward(x, routing, None)


class AddsOthers(GroupedProduct):
    """Count experts from this rank's first one, modulo their number."""

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        count, first = len(self._weights.gate_up), self._weights.first
        return super().forward(x, Routing((routing.ids - first) % count + first, routing.weights), shared)


class FewTokensOfAnExpert(GroupedProduct):
    """Leave out what an expert has beyond 16 tokens."""

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        weights = routing.weights.clone()
        for expert in routing.ids.unique().tolist():
            token, place = (routing.ids == expert).nonzero(as_tuple=True)
            weights[token[16:], place[16:]] = 0
        return super().forward(x, Routing(routing.ids, weights), shared)


class OneBuffer(GroupedProduct):
    """Return results in memory that all layers share."""

    memory: ClassVar = torch.empty(1 << 16)

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        result = super().forward(x, routing, shared)
        return self.memory[: result.numel()].view_as(result).copy_(result)


class IgnoresScales(GroupedProduct):
    """Take the first scale of each expert for all of its rows."""

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
        scales = [scale if scale is None else scale[:, :1].expand(scale.shape[:2]) for scale in _scales(weights)]
        if weights.format in ("fp8_blocks", "mxfp4"):
            scales = [scale[:, :1, :1].expand_as(scale) for scale in _scales(weights) if scale is not None]
        super().__init__(dataclasses.replace(weights, gate_up_scale=scales[0], down_scale=scales[1]), dtype)


def _scales(weights: ExpertWeights) -> list[torch.Tensor | None]:
    return [weights.gate_up_scale, weights.down_scale]


def without(**changes: object) -> type[GroupedProduct]:
    """Return a product that ignores some fields of its weights."""

    class Ignores(GroupedProduct):
        def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
            super().__init__(dataclasses.replace(weights, **changes), dtype)  # type: ignore[arg-type]

    return Ignores


def suite(product: type[GroupedProduct] = GroupedProduct, *features: Feature, keeps_first: bool = False) -> Suite:
    class Made(ExpertsBackend):
        def __init__(self, config: object, context: ExpertsContext) -> None:
            self.first: ExpertsProduct | None = None
            self.dtype = context.dtype

        def product(self, weights: ExpertWeights) -> ExpertsProduct:
            if keeps_first:
                weights = ExpertWeights(weights.gate_up.clone(), weights.down.clone(), SILU, whole=weights.whole)
                self.first = self.first or product(weights, self.dtype)
                return self.first
            return product(weights, self.dtype)

    class Suite(ExpertsSuite):
        name = "torch_native"

        @property
        def spec(self) -> ComponentSpec:
            return dataclasses.replace(super().spec, offers=super().spec.offers | set(features))

        def make(self, context: ExpertsContext) -> ExpertsBackend:
            return Made(None, context)

    return Suite


SOUND = suite()
INVARIANT = Feature.EXPERTS_BATCH_INVARIANT
IN_PARTS = suite(OneByOne, INVARIANT)
RESULTS, PARTS = "test_results_are_those_of_each_expert", "test_parts_are_those_of_the_sum"
NINE = [("plain", 9)]

MUTANTS = [
    Mutant("weights its experts equally", RESULTS, suite(WeightsEqually), SOUND, NINE),
    Mutant("changes its input", RESULTS, suite(ChangesItsInput), SOUND, NINE, "was changed"),
    Mutant("ignores biases", RESULTS, suite(without(gate_up_bias=None, down_bias=None)), SOUND, [("biases", 9)]),
    Mutant("ignores the limit of the activation", RESULTS, suite(without(activation=SILU)), SOUND, [("clamped", 9)]),
    Mutant("weights results instead of inputs", RESULTS, suite(without(scaled_input=False)), SOUND, [("scaled inputs", 9)]),
    Mutant("answers in float32", "test_activations_may_have_16_bits", suite(AlwaysFloat32), SOUND, [(torch.bfloat16,)]),
    Mutant("loses tokens of an expert that has many", "test_choices_may_be_uneven", suite(FewTokensOfAnExpert), SOUND, [("one",)]),
    Mutant("forgets the shared expert", "test_the_shared_expert_is_added", suite(ForgetsTheShared), SOUND),
    Mutant("takes experts of other ranks for its own", "test_experts_of_other_ranks_add_nothing", suite(AddsOthers), SOUND, [("plain", 2, 4)]),
    Mutant("loses a part", PARTS, suite(LosesAPart), IN_PARTS),
    Mutant("returns parts of 16 bits", PARTS, suite(PartsOf16Bits), IN_PARTS),
    Mutant("returns all results in the same memory", "test_layers_do_not_disturb_each_other", suite(OneBuffer), SOUND),
    Mutant("ignores scales", "test_quantized_weights_are_multiplied", suite(IgnoresScales), SOUND, [("fp8_rows",), ("fp8_blocks",), ("mxfp4",)]),
    Mutant("keeps the first weights", "test_other_weights_give_other_results", suite(keeps_first=True), SOUND),
    Mutant("computes otherwise for another number of tokens", "test_batch_invariance", suite(DependsOnTheNumber, INVARIANT), IN_PARTS, [("plain",)], "other bits"),
    Mutant("has parts for few tokens only", "test_batch_invariance", suite(PartsOfFewTokens, INVARIANT), IN_PARTS, [("plain",)], "only some steps"),
]  # fmt: skip
