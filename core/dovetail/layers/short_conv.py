"""Compute the gated short convolutions of LFM2, which keep a few inputs of each request in place of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.mixer_shapes import CONV_NEEDS
from dovetail.interfaces.model import TensorShare, WeightTarget
from dovetail.layers.base import parameter
from dovetail.layers.decoder import linear_targets
from dovetail.layers.linear import ColumnLinear, row_linear
from dovetail.layers.states import StateMixer, StateShape, StateTargets, StepStates
from dovetail.layers.transforms import Reshape

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.mixer import MixerBackend


class GatedShortConv(StateMixer):
    """Project the input to b, c and x, convolve ``b * x`` over ``width`` tokens, multiply by c, and project back. Every
    rank computes its share of the channels."""

    needs = CONV_NEEDS

    def __init__(self, hidden_size: int, width: int, state_id: int, mesh: Mesh, *, bias: bool = False) -> None:
        super().__init__()
        self.divides_rows, mesh = mesh.attention == "data", mesh.of_attention
        self.state_id, self._channels = state_id, hidden_size
        self.project = ColumnLinear(hidden_size, dict.fromkeys(("b", "c", "x"), hidden_size), mesh, bias=bias)
        self.project.reads_selected = self.divides_rows
        self.out = row_linear(hidden_size, hidden_size, mesh, bias=bias)
        self._first, count = mesh.tp.share(hidden_size)
        self.conv_weight = parameter(count, width)
        self.conv_bias = parameter(count) if bias else None

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """See ``StateLayer``."""
        channels, width = self.conv_weight.shape
        return (StateShape((channels, width - 1)),)

    def mix(self, x: torch.Tensor, states: StepStates, rows: torch.Tensor | None) -> torch.Tensor:
        """See ``StateMixer``."""
        b, c, inputs = self.project.forward(x).chunk(3, 1)
        (state,), ops = states.memory[self.state_id], states.backend
        inputs = b * inputs
        mixed = states.short_conv(inputs, self.conv_weight, self.conv_bias, state, "none")
        states.keep(functools.partial(_advance, ops, state), inputs)
        return mixed * c if rows is None else mixed.index_select(0, rows) * c.index_select(0, rows)

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> StateTargets:
        """Yield the targets of the layer's tensors."""
        fields = ("weight", "bias") if self.conv_bias is not None else ("weight",)
        for field in fields:
            yield (
                f"{checkpoint_prefix}.in_proj.{field}",
                self.project.fused_targets(f"{parameter_prefix}.project.{field}"),
            )
        yield from linear_targets(self.out, f"{checkpoint_prefix}.out_proj", f"{parameter_prefix}.out")
        count, width = self.conv_weight.shape
        shares = (TensorShare(0, self._first, count, self._channels),) if count < self._channels else ()
        own = WeightTarget(f"{parameter_prefix}.conv_weight", shares=shares, transform=Reshape((count, 1, width)))
        yield f"{checkpoint_prefix}.conv.weight", own
        if self.conv_bias is not None:
            yield f"{checkpoint_prefix}.conv.bias", WeightTarget(f"{parameter_prefix}.conv_bias", shares=shares)


def _advance(
    ops: MixerBackend,
    state: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Write the states after accepted drafts (see ``StepStates.advance``)."""
    ops.short_conv_advance(tensors[0], state, slots, starts, counts)
