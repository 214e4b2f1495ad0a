"""Compute the feed-forward layers of experts: products of each token with the weights of the experts that were chosen
for it, and the weighted sum of their results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from dovetail.ops.expert_shapes import SwiGLU
from dovetail.ops.routing import Routing


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Hold what this rank has of the weights of experts.

    ``gate_up`` is ``[experts, 2 * size, hidden]``: of each expert the rows of gate, then those of up. ``down`` is
    ``[experts, hidden, size]``. The experts are those from index ``first`` on, and ``size`` may be a rank's share of the
    intermediate values. ``gate_up_bias`` is ``[experts, 2 * size]`` and ``down_bias`` ``[experts, hidden]``, or None.
    With ``scaled_input`` the weight of an expert for a token multiplies its input, otherwise its result.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: SwiGLU
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    first: int = 0
    scaled_input: bool = False


def experts(x: torch.Tensor, routing: Routing, weights: ExpertWeights) -> torch.Tensor:
    """Return the weighted sums of the results of each token's experts, ``[tokens, hidden]``, of contiguous
    ``x [tokens, hidden]``. Experts that ``weights`` does not have add nothing. The sums are computed in float32."""
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
    return total.to(x.dtype)


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
