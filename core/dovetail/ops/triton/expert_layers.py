"""Compute layers of experts on CUDA, with weights in any format."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.expert_shapes import ExpertFormat, ExpertWeights, Routing
from dovetail.ops.expert_scratch import ExpertScratch
from dovetail.ops.triton import experts as plain
from dovetail.ops.triton import experts_fp8, experts_one, integers, mxfp4, mxfp4_plain, packed_experts, packed_plain
from dovetail.ops.triton.adapted_pairs import PairAdapters
from dovetail.ops.triton.expert_tiles import ExpertTiles

if TYPE_CHECKING:
    from dovetail.ops.adapter_weights import ExpertPairLowRank, TokenTiles

_PAIR_RESULTS: dict[ExpertFormat, Callable[..., torch.Tensor]] = {
    "plain": plain.pair_results,
    "fp8_rows": experts_fp8.pair_results,
    "fp8_blocks": experts_fp8.pair_results,
    "mxfp4": mxfp4.pair_results,
    "int4": integers.pair_results,
    "int8": integers.pair_results,
    "gguf": packed_experts.pair_results,
}
_DEQUANTIZED: dict[ExpertFormat, ModuleType] = {"mxfp4": mxfp4_plain, "gguf": packed_plain}
"""The kernels that dequantize weights first, which take less time for many tokens."""


def _pair_results(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, scratch: ExpertScratch | None, *, in_parts: bool
) -> torch.Tensor:
    kernels = _DEQUANTIZED.get(weights.format)
    if kernels is not None and kernels.pays(x, routing.ids.shape[1], weights):
        return kernels.pair_results(x, routing, weights, scratch or ExpertScratch(), in_parts=in_parts)
    return _PAIR_RESULTS[weights.format](x, routing, weights, in_parts=in_parts)


def experts(
    x: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    shared: torch.Tensor | None = None,
    tiles: ExpertTiles | None = None,
    scratch: ExpertScratch | None = None,
) -> torch.Tensor:
    """Compute ``ops.experts.experts``. With ``tiles``, which a caller gives for every number of tokens, weights are plain, and
    the bits of a token do not depend on the others: its products are added up along their columns in one order, then its
    experts in their order. Weights that are dequantized in each step are written to ``scratch``, or without it to memory of this call."""
    assert x.is_contiguous()
    if not x.shape[0]:
        return torch.empty_like(x)
    if tiles is not None:
        results = plain.pair_results(x, routing, weights, tiles, in_parts=False)
    elif x.shape[0] == 1 and weights.format == "plain":
        return experts_one.one_token(x, routing, weights, shared, in_parts=False)
    else:
        results = _pair_results(x, routing, weights, scratch, in_parts=False)
    return plain.add_up_pairs(results, routing, weights, shared)


def adapted_experts(
    x: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    shared: torch.Tensor | None,
    low_rank: ExpertPairLowRank,
    tokens: TokenTiles,
) -> torch.Tensor:
    """Compute ``ops.experts.adapted_experts``."""
    assert x.is_contiguous()
    if not x.shape[0]:
        return torch.empty_like(x)
    adapters = PairAdapters(low_rank, tokens)
    results = _PAIR_RESULTS[weights.format](x, routing, weights, in_parts=False, adapters=adapters)
    return plain.add_up_pairs(results, routing, weights, shared)


def expert_parts(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, scratch: ExpertScratch | None = None
) -> torch.Tensor:
    """Return the weighted results of each token's experts, float32 ``[top_k, tokens, hidden]``, of which ``experts`` is
    the sum over the first dimension. ``scratch`` is as in ``experts``. All experts are this rank's, and there is at least one token."""
    if x.shape[0] == 1 and weights.format == "plain":
        return experts_one.one_token(x, routing, weights, None, in_parts=True)
    return _pair_results(x, routing, weights, scratch, in_parts=True)
