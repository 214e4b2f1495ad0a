"""Let the layers of experts use the experts that a benchmark prescribes, whatever their routers prefer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from dovetail.interfaces.expert_shapes import Routing, RoutingRule
from dovetail.layers import experts
from dovetail.ops.routing import route

TOKENS = 1 << 16
"""The most tokens of a step."""


def replace_routing(kind: str) -> None:
    """Replace the experts that routers choose, in all layers of this process. Routers compute as before, and their weights
    are used.

    With the kind ``uniform`` the tokens of a step take the experts in turn; with ``same`` every token takes the first ones.
    """
    ids = KINDS[kind]

    def routed(logits: torch.Tensor, rule: RoutingRule, correction: torch.Tensor | None = None) -> Routing:
        weights = route(logits, rule, correction).weights
        return Routing(ids(rule.num_experts, rule.top_k, logits.device)[: len(logits)], weights)

    experts.route = routed  # pyright: ignore[reportPrivateImportUsage]


@functools.cache
def _in_turn(experts: int, top_k: int, device: torch.device) -> torch.Tensor:
    """Return int32 ``[TOKENS, top_k]`` in which every ``experts / top_k`` tokens have all experts, in the order of a fixed
    permutation. It is made once, by the first step, so that a captured step has no kernel for it."""
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0)).int()
    return order[torch.arange(TOKENS * top_k) % experts].view(TOKENS, top_k).to(device)


@functools.cache
def _the_same(experts: int, top_k: int, device: torch.device) -> torch.Tensor:
    """Return int32 ``[TOKENS, top_k]`` in which every token has the first experts."""
    return torch.arange(top_k, dtype=torch.int32, device=device).repeat(TOKENS, 1)


KINDS: dict[str, Callable[[int, int, torch.device], torch.Tensor]] = {"uniform": _in_turn, "same": _the_same}
