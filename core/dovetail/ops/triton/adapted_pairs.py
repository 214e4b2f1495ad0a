"""Add the low-rank products of adapters to both products of experts, in any format of weights: the kernel of gate and up adds what
``AdaptedPairs.gate_up`` returns before it applies the activation, and ``AdaptedPairs.add_down`` adds to the results of ``down``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.triton.expert_low_rank import expand_pairs, shrink_pairs
from dovetail.ops.triton.routing import ExpertOrder, sort_by_expert

if TYPE_CHECKING:
    from dovetail.ops.adapter_weights import ExpertPairLowRank, TokenTiles


class PairAdapters(NamedTuple):
    """Hold the matrices that the adapters of all slots have for a layer of experts, and the slots of the tokens of a step."""

    low_rank: ExpertPairLowRank
    tokens: TokenTiles


class AdaptedPairs(NamedTuple):
    """Hold ``adapters`` of a step whose pairs of a token and an expert are sorted in ``order``. ``factors`` (float32 ``[tokens,
    top_k]``) are the weights of the results of experts, or None if these weights scale inputs."""

    adapters: PairAdapters
    order: ExpertOrder
    top_k: int
    factors: torch.Tensor | None

    def gate_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the adapters add to the products of contiguous ``x [tokens, hidden]`` with gate and up: ``[pairs, rows of an
        expert]`` in ``order``, in the dtype of ``x``. Inputs are not scaled. Mutates nothing."""
        low_rank, tokens = self.adapters
        given, own = (self.order, tokens, self.top_k), low_rank.gate_up
        added = torch.empty(len(self.order.pairs), own.b.shape[2], dtype=x.dtype, device=x.device)
        return expand_pairs(added, shrink_pairs(x, own, *given, by_pair=False), own, *given, onto=False)

    def add_down(self, results: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """Add the low-rank products of the activations ``inner [pairs, size]``, in ``order``, times ``factors`` to ``results [tokens,
        top_k, hidden]``, and return these."""
        low_rank, tokens = self.adapters
        given, own = (self.order, tokens, self.top_k), low_rank.down
        low = shrink_pairs(inner, own, *given, by_pair=True)
        return expand_pairs(results, low, own, *given, self.factors, onto=True)


def adapted_pairs(
    adapters: PairAdapters | None, order: ExpertOrder, routing: Routing, weights: ExpertWeights
) -> AdaptedPairs | None:
    """Return ``adapters`` with the ``order`` of the pairs of a step, or None without adapters."""
    if adapters is None:
        return None
    return AdaptedPairs(adapters, order, routing.ids.shape[1], None if weights.scaled_input else routing.weights)


def blocks_of_pairs(
    routing: Routing, weights: ExpertWeights, block_m: int, adapters: PairAdapters | None
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], int, AdaptedPairs | None]:
    """Return what kernels read about blocks of up to ``block_m`` pairs (see ``ExpertOrder``), the number of blocks, and ``adapters``
    with their order. Without adapters, each expert of one token is a block: kernels with ONE read ``routing.ids`` in place of the
    order, of the blocks and of their number."""
    ids = routing.ids
    if len(ids) == 1 and adapters is None:
        return (ids, ids, ids), ids.shape[1], None
    order = sort_by_expert(ids, weights.first, len(weights.down), block_m)
    return order[:3], len(order.blocks), adapted_pairs(adapters, order, routing, weights)
