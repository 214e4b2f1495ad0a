"""Define broken models with experts: Qwen3-MoE with one fault each. The reference is the same model without the fault,
which reads all tokens at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from mutant import Mutant
from sound_model import SoundSuite

from dovetail.interfaces.mesh import Mesh
from dovetail.interfaces.model import ModelInfo, WeightTarget
from dovetail.layers.experts import Experts, Router
from dovetail.ops.parts import Addend, RankAddend
from dovetail.ops.routing import Routing, route
from dovetail.testing.model import Reference
from dovetail_models.moe import MoeModel

SMALL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
}


class SoundExperts(SoundSuite):
    """Build the model without a fault."""

    name = "qwen3_moe"
    configs: ClassVar = {"plain": SMALL}
    model_class = MoeModel


def with_experts(model: MoeModel, kind: type[Experts]) -> None:
    """Make the layers of experts of ``model`` instances of ``kind``, which adds no state."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.__class__ = kind


class NeverTheLast(Router):
    """Choose among all experts but the last."""

    def forward(self, x: torch.Tensor) -> Routing:
        logits = self.gate.forward(x)
        logits[:, -1] = -torch.inf
        return route(logits, self.rule, self.correction)


class WithoutTheLast(MoeModel):
    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__(info, mesh)
        for module in self.modules():
            if isinstance(module, Router):
                module.__class__ = NeverTheLast


class NeverChoosesTheLastExpert(SoundExperts):
    model_class = WithoutTheLast

    def reference(self, directory: Path) -> Reference:
        return lambda tokens: self.logits(self.load(directory), tokens, len(tokens))


class ExchangesExperts(MoeModel):
    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        targets = dict(super().weights_map())
        a, b = (f"model.layers.1.mlp.experts.{index}.down_proj.weight" for index in (0, 1))
        return {**targets, a: targets[b], b: targets[a]}


class ExchangesTwoExperts(SoundExperts):
    model_class = ExchangesExperts


class Equal(Router):
    """Give all chosen experts the same weight."""

    def forward(self, x: torch.Tensor) -> Routing:
        ids, weights = super().forward(x)
        return Routing(ids, torch.full_like(weights, 1 / weights.shape[1]))


class EqualWeights(MoeModel):
    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__(info, mesh)
        for module in self.modules():
            if isinstance(module, Router):
                module.__class__ = Equal


class WeightsExpertsEqually(SoundExperts):
    model_class = EqualWeights


class OwnExpertsOnly(Experts):
    """Add only what the experts of this rank compute, if ranks have whole experts."""

    def parts_forward(self, x: torch.Tensor) -> Addend:
        added = super().parts_forward(x)
        whole = len(self.held) == self.shape.routing.num_experts
        return added.x if isinstance(added, RankAddend) and not whole else added


class EachRankItsOwn(MoeModel):
    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__(info, mesh)
        with_experts(self, OwnExpertsOnly)


class LeavesOutTheExpertsOfOtherRanks(SoundExperts):
    model_class = EachRankItsOwn


MUTANTS = [
    Mutant(
        "never chooses one of its experts",
        "test_logits_depend_on_every_tensor",
        NeverChoosesTheLastExpert,
        SoundExperts,
        says="does not matter for any of",
    ),
    Mutant(
        "exchanges two experts", "test_logits_are_those_of_the_reference", ExchangesTwoExperts, SoundExperts, [(7,)]
    ),
    Mutant(
        "weights its experts equally",
        "test_logits_are_those_of_the_reference",
        WeightsExpertsEqually,
        SoundExperts,
        [(7,)],
    ),
    Mutant(
        "leaves out the experts of other ranks",
        "test_ranks_compute_the_logits_of_one",
        LeavesOutTheExpertsOfOtherRanks,
        SoundExperts,
    ),
]
