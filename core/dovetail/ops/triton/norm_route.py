"""Compute the norm before a layer of experts, the logits of its router and the choice of experts for one token, in one kernel.

Each program computes the norm of the whole row, which is in the L2 cache, and the logit of one expert. The last program to finish
chooses the experts by all logits, so that the result does not depend on which program that was.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import Routing, RoutingRule
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.matmul import workspace
from dovetail.ops.triton.routing import SCORINGS, chosen_experts

_MOST_COLUMNS = 8192
"""The largest row: a program holds all of it in registers."""


@triton.jit
def _norm_and_route(
    x, residual, norm_weight, gate, bias, correction, normed, total, logits, arrived, ids, weights, size, eps, experts, scale,
    TOP_K: tl.constexpr, SCORING: tl.constexpr, AFTER: tl.constexpr, RENORMALIZE: tl.constexpr, CORRECTED: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < size
    if PDL:
        gdc_launch_dependents()
    gate_row = tl.load(gate + expert.to(tl.int64) * size + at, inside, 0.0)
    weight = tl.load(norm_weight + at, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    dtype: tl.constexpr = normed.dtype.element_ty
    given = tl.load(x + at, inside, 0.0).to(tl.float32) + tl.load(residual + at, inside, 0.0).to(tl.float32)
    added = given.to(dtype)
    row = added.to(tl.float32)
    result = (row * tl.rsqrt(tl.sum(row * row, 0) / size + eps) * weight).to(dtype)
    if expert == 0:
        tl.store(total + at, added, inside)
        tl.store(normed + at, result, inside)
    logit = tl.sum(gate_row.to(tl.float32) * result.to(tl.float32), 0)
    if BIAS:
        logit += tl.load(bias + expert).to(tl.float32)
    tl.store(logits + expert, logit.to(logits.dtype.element_ty))
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == experts - 1:
        each, place = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
        found = tl.load(logits + each, each < experts, float("-inf"), cache_modifier=".cg").to(tl.float32)
        chosen_ids, chosen = chosen_experts(
            found,
            correction,
            experts,
            scale,
            0.0,
            TOP_K,
            SCORING,
            AFTER,
            RENORMALIZE,
            CORRECTED,
            1,
            1,
            1,
            BLOCK_E,
            1,
            BLOCK_K,
        )
        tl.store(ids + place, chosen_ids, place < TOP_K)
        tl.store(weights + place, chosen, place < TOP_K)
        tl.store(arrived, 0)


def fits(gate: torch.Tensor, rule: RoutingRule) -> bool:
    """Return whether ``norm_and_route`` computes the logits with ``gate [experts, hidden]`` and chooses by ``rule``."""
    return rule.groups == 1 and rule.scoring != "sparsemixer" and gate.shape[1] <= _MOST_COLUMNS


def norm_and_route(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    rule: RoutingRule,
    correction: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, Routing]:
    """Compute ``ops.routing.norm_and_route``."""
    assert x.shape == residual.shape == (1, gate.shape[1])
    assert gate.is_contiguous()
    experts, size = gate.shape
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    logits = torch.empty(experts, dtype=torch.float32 if rule.float32 else x.dtype, device=x.device)
    ids = torch.empty(1, rule.top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(1, rule.top_k, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    launch(
        _norm_and_route, (experts,),
        x, residual, norm_weight, gate, bias, correction, normed, total, logits, workspace(x.device).arrived, ids, weights,
        size, eps, experts, rule.scale,
        TOP_K=rule.top_k, SCORING=SCORINGS[rule.scoring], AFTER=rule.after_choice, RENORMALIZE=rule.renormalize,
        CORRECTED=correction is not None, BIAS=bias is not None, BLOCK=block,
        BLOCK_E=triton.next_power_of_2(experts), BLOCK_K=triton.next_power_of_2(rule.top_k),
        num_warps=max(1, block // 1024),
    )  # fmt: skip
    return normed, total, Routing(ids, weights)
