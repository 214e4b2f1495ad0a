"""Choose the experts of each token, and the weights of their results.

A router gives every token a logit for every expert. What follows from the logits differs from model to model, and is
described by a ``RoutingRule``. Everything is computed in float32. Of experts with equal scores the one with the lowest
index is chosen first, on every device.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from dovetail.interfaces.expert_shapes import Routing, RoutingRule


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import routing

    return routing


def route(logits: torch.Tensor, rule: RoutingRule, correction: torch.Tensor | None = None) -> Routing:
    """Return what ``rule`` chooses by ``logits [tokens, experts]``. ``correction`` is the bias for the choice, float32
    ``[experts]``. The experts of a token are in descending order of the scores by which they were chosen."""
    if logits.is_cuda:
        return _triton().route(logits, rule, correction)
    logits = logits.float()
    if rule.scoring == "sparsemixer":
        return _sparsemixer(logits, rule)
    scores = logits if rule.after_choice else _scores(logits, rule)
    choice = scores if correction is None else scores + correction
    if rule.groups > 1:
        choice = _within_groups(choice, rule)
    ids = _largest(choice, rule.top_k)
    weights = scores.gather(1, ids)
    if rule.after_choice:
        weights = _scores(weights, rule)
    return Routing(ids.int(), _finished(weights, rule))


def _scores(logits: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    return logits.softmax(1) if rule.scoring == "softmax" else logits.sigmoid()


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the ``count`` largest scores of each row; of equal ones the lowest first, which ``topk``
    does not promise."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _within_groups(choice: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Return ``choice`` with -inf for the experts of the groups that are not kept."""
    members = choice.unflatten(1, (rule.groups, -1))
    best = members.topk(min(rule.group_top, members.shape[2]), dim=2).values.sum(2)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _largest(best, rule.groups_kept), True)
    return members.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)


def _finished(weights: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    if rule.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * rule.scale if rule.scale != 1.0 else weights


def _sparsemixer(logits: torch.Tensor, rule: RoutingRule) -> Routing:
    left, ids, weights = logits, list[torch.Tensor](), list[torch.Tensor]()
    for _ in range(rule.top_k):
        chosen = _largest(left, 1)
        best = left.gather(1, chosen)
        far = (best - logits) / logits.abs().maximum(best) > 2 * rule.jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(1).gather(1, chosen))
        ids.append(chosen)
        left = left.scatter(1, chosen, -torch.inf)
    return Routing(torch.cat(ids, 1).int(), _finished(torch.cat(weights, 1), rule))
