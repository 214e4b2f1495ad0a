"""Attend, or compute layers with states, in the rows of this rank only, and bring the results to all ranks (data-parallel
attention).

Between the layers, every rank has the hidden states of all tokens of a step. With data-parallel attention, a rank computes
all heads of attention for the requests whose keys and values it keeps, and nothing for the others:

    x [all tokens] -> rows of this rank -> q, k, v -> attention -> output projection -> zeros [all tokens] with these rows

The addends of all ranks add up to the result, as those of ranks that divide the heads do. So norms, experts, logits and
sampling are the same in both cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from dovetail.ops.parts import RankAddend

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.interfaces.mesh import Collectives
    from dovetail.layers.linear import Linear
    from dovetail.layers.rotary import Rotation
    from dovetail.types import Batch


class AttendsInRows(Protocol):
    """Describe a layer of attention: ``attend`` returns the input of the projection ``out`` for each token of a batch.
    ``divides_rows`` is True with data-parallel attention."""

    out: Linear
    divides_rows: bool

    def attend(self, x: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None) -> torch.Tensor: ...


def layers_of_own_rows(model: nn.Module) -> set[nn.Module]:
    """Return the layers of ``model`` that compute the tokens of ``Batch.own`` only: those within its layers of attention and
    with states, if attention is data-parallel."""
    divided = (module for module in model.modules() if getattr(module, "divides_rows", False))
    return {layer for module in divided for layer in module.modules()}


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """Hold the rows of a step whose keys and values this rank keeps.

    ``batch`` has these rows, prepared and planned; None if there are none. ``tokens`` (int64 ``[own tokens]``) are the
    indices of their tokens in the step. In a captured step, ``batch`` also has rows of padding: ``targets`` is then the
    number of tokens of the step for each of them, and equal to ``tokens`` otherwise; ``spare`` is 1 if there can be such
    rows. ``tp`` are the ranks.
    """

    batch: Batch | None
    tokens: torch.Tensor
    targets: torch.Tensor
    tp: Collectives
    spare: int = 0

    @property
    def positions(self) -> torch.Tensor:
        """Return the positions of the rows' tokens, int64 ``[own tokens]``."""
        return self.tokens if self.batch is None else self.batch.positions

    def addend(self, layer: AttendsInRows, x: torch.Tensor, rotation: Rotation) -> RankAddend:
        """Return what this rank adds to the result of ``layer`` for ``x``, the input of all tokens of the step. ``rotation``
        is that of ``positions``."""
        return self.addend_of(x, layer.out, lambda own, batch: layer.attend(own, rotation, batch))

    def addend_of(
        self, x: torch.Tensor, out: Linear, compute: Callable[[torch.Tensor, Batch], torch.Tensor]
    ) -> RankAddend:
        """Return what this rank adds to the result of a layer that ends with the projection ``out``, for ``x``, its input of all
        tokens of the step. ``compute`` returns the input of ``out`` for the tokens of this rank, given those of ``x`` and the batch."""
        count = x.shape[0]
        added = x.new_zeros(count + self.spare, out.out_features)
        if self.batch is not None:
            added.index_copy_(0, self.targets, out.forward(compute(x.index_select(0, self.tokens), self.batch)))
        return RankAddend(added[:count], self.tp)

    def sum_over_ranks(self, layer: AttendsInRows, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Return the result of ``layer`` for all tokens of the step."""
        return self.tp.all_reduce(self.addend(layer, x, rotation).x)
