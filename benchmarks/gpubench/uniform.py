"""Let the layers of experts use all experts equally often, whatever their routers prefer."""

from __future__ import annotations

import functools

import torch

from dovetail.interfaces.expert_shapes import Routing, RoutingRule
from dovetail.layers import experts
from dovetail.ops.routing import route

TOKENS = 1 << 16
"""The most tokens of a step."""


def use_uniform_routing() -> None:
    """Replace the experts that routers choose, in all layers of this process: the tokens of a step take the experts in
    turn. Routers compute as before, and their weights are used."""
    experts.route = _routed  # pyright: ignore[reportPrivateImportUsage]


def _routed(logits: torch.Tensor, rule: RoutingRule, correction: torch.Tensor | None = None) -> Routing:
    weights = route(logits, rule, correction).weights
    return Routing(_in_turn(rule.num_experts, rule.top_k, logits.device)[: len(logits)], weights)


@functools.cache
def _in_turn(experts: int, top_k: int, device: torch.device) -> torch.Tensor:
    """Return int32 ``[TOKENS, top_k]`` in which every ``experts / top_k`` tokens have all experts, in the order of a fixed
    permutation. It is made once, by the first step, so that a captured step has no kernel for it."""
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0)).int()
    return order[torch.arange(TOKENS * top_k) % experts].view(TOKENS, top_k).to(device)
