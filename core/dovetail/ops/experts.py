"""Compute the feed-forward layers of experts: products of each token with the weights of the experts that were chosen
for it, and the weighted sum of their results."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch.nn import functional

from dovetail.ops.expert_shapes import ExpertWeights, Routing, SwiGLU
from dovetail.ops.parts import Parts


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import experts

    return experts


def experts(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weighted sums of the results of each token's experts, ``[tokens, hidden]``, of contiguous
    ``x [tokens, hidden]``, plus ``shared [tokens, hidden]`` if it is given. Experts that ``weights`` does not have add
    nothing. The sums are computed in float32."""
    if x.is_cuda:
        return _triton().experts(x, routing, weights, shared)
    num_experts, top_k = weights.gate_up.shape[0], routing.ids.shape[1]
    order = routing.ids.flatten().argsort(stable=True)
    counts = torch.bincount(routing.ids.flatten(), minlength=weights.first + num_experts).tolist()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    flat, end = routing.weights.flatten(), sum(counts[: weights.first])
    for expert in range(num_experts):
        start, end = end, end + counts[weights.first + expert]
        if start < end:
            pairs = order[start:end]
            tokens, factors = pairs // top_k, flat[pairs].unsqueeze(1)
            total.index_add_(0, tokens, _expert(x[tokens], factors, expert, weights))
    return (total if shared is None else total.add_(shared)).to(x.dtype)


def expert_parts(x: torch.Tensor, routing: Routing, weights: ExpertWeights) -> Parts | None:
    """Return ``experts`` as parts that are not added up yet, one for each of a token's experts. Return None if the
    result is not computed in parts for this number of tokens."""
    if not x.is_cuda or len(weights.gate_up) != weights.whole:
        return None
    kernels = _triton()
    return Parts(kernels.expert_parts(x, routing, weights)) if 1 < x.shape[0] <= kernels.MOST_PARTS else None


def _expert(x: torch.Tensor, factors: torch.Tensor, expert: int, weights: ExpertWeights) -> torch.Tensor:
    """Return the weighted results of one expert in float32."""
    if weights.scaled_input:
        x = (x * factors).to(x.dtype)
    gate_up_bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert]
    down_bias = None if weights.down_bias is None else weights.down_bias[expert]
    gate, up = functional.linear(x, weights.gate_up[expert], gate_up_bias).chunk(2, 1)
    result = functional.linear(_activated(gate, up, weights.activation), weights.down[expert], down_bias).float()
    return result if weights.scaled_input else result * factors


def _activated(gate: torch.Tensor, up: torch.Tensor, activation: SwiGLU) -> torch.Tensor:
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    opened = functional.silu(gate) if activation.alpha == 1.0 else gate * torch.sigmoid(activation.alpha * gate)
    return opened * (up + activation.offset if activation.offset else up)
