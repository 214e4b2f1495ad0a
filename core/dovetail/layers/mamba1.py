"""Compute the mixers of Mamba (arXiv 2312.00752) as Jamba (arXiv 2403.19887) has them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.mixer_shapes import SCAN_NEEDS
from dovetail.interfaces.model import TensorShare, WeightTarget
from dovetail.interfaces.state_space import ScanChannels
from dovetail.layers.base import parameter
from dovetail.layers.decoder import linear_targets
from dovetail.layers.linear import ColumnLinear, row_linear
from dovetail.layers.norm import RMSNorm
from dovetail.layers.states import StateMixer, StateShape, StateTargets, StepStates
from dovetail.layers.transforms import Reshape

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.mixer import MixerBackend


@dataclass(frozen=True, slots=True)
class Mamba1Shape:
    """Describe the sizes and variants of a whole mixer. ``rank`` is the size from which step sizes are projected. ``bias``
    is that of the first and the last projection."""

    hidden_size: int
    inner_size: int
    state_size: int
    rank: int
    conv_width: int
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False


class Mamba1Mixer(StateMixer):
    """Project the input to inputs and gates, convolve the inputs, project them to step sizes, b and c, normalise these,
    compute the recurrence of ``ops.selective_scan``, gate its outputs and project back.

    Every rank computes its share of the channels. The ranks add up the projections of the inputs to step sizes, b and c.
    Parameters of channels that are not matrices are float32.
    """

    needs = SCAN_NEEDS

    def __init__(self, shape: Mamba1Shape, state_id: int, mesh: Mesh) -> None:
        super().__init__()
        self.divides_rows, mesh = mesh.attention == "data", mesh.of_attention
        self.shape, self.state_id = shape, state_id
        inner, width = shape.inner_size, shape.state_size
        self._first, self._count = mesh.tp.share(inner)
        self.project = ColumnLinear(shape.hidden_size, {"x": inner, "gate": inner}, mesh, bias=shape.bias)
        self.project.reads_selected = self.divides_rows
        self.select = row_linear(inner, shape.rank + 2 * width, mesh)
        self.dt = ColumnLinear(shape.rank, {"dt": inner}, mesh)
        self.out = row_linear(inner, shape.hidden_size, mesh, bias=shape.bias)
        self.dt_norm, self.b_norm, self.c_norm = (RMSNorm(size, shape.norm_eps) for size in (shape.rank, width, width))
        self.conv_weight = parameter(self._count, shape.conv_width)
        self.conv_bias = parameter(self._count) if shape.conv_bias else None
        self.a_log, self.d, self.dt_bias = _float32(self._count, width), _float32(self._count), _float32(self._count)
        self._parameters_of_channels: ScanChannels

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        a = -self.a_log.detach().exp()
        self._parameters_of_channels = ScanChannels(a, self.d.detach(), self.dt_bias.detach())
        super().prepare()

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """See ``StateLayer``."""
        conv = (self._count, self.shape.conv_width - 1)
        return StateShape(conv), StateShape((self._count, self.shape.state_size), "float32")

    def mix(self, x: torch.Tensor, states: StepStates, rows: torch.Tensor | None) -> torch.Tensor:
        """See ``StateMixer``."""
        if not self.prepared:
            self.prepare()
        width = self.shape.state_size
        inputs, gate = self.project.forward(x).chunk(2, 1)
        (conv, own), ops = states.memory[self.state_id], states.backend
        channels = self._parameters_of_channels
        x = states.short_conv(inputs, self.conv_weight, self.conv_bias, conv)
        dt, b, c = self.select.forward(x).split((self.shape.rank, width, width), 1)
        dt, b = self.dt.forward(self.dt_norm.forward(dt)), self.b_norm.forward(b)
        outputs = states.run(
            lambda part, rows: ops.selective_scan(part[0], part[1], part[2], part[3], channels, own, rows),
            lambda part, slots: ops.selective_scan_step(part[0], part[1], part[2], part[3], channels, own, slots),
            x,
            dt,
            b,
            self.c_norm.forward(c),
        )
        states.keep(functools.partial(self._advance, ops, (conv, own)), inputs, x, dt, b)
        if rows is not None:
            outputs, gate = outputs.index_select(0, rows), gate.index_select(0, rows)
        return (outputs.float() * functional.silu(gate.float())).to(outputs.dtype)

    def _advance(
        self,
        ops: MixerBackend,
        memory: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        slots: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """Write the states after accepted drafts (see ``StepStates.advance``)."""
        (conv, own), (inputs, x, dt, b) = memory, tensors
        ops.short_conv_advance(inputs, conv, slots, starts, counts)
        ops.selective_scan_advance(x, dt, b, self._parameters_of_channels, own, slots, starts, counts)

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> StateTargets:
        """Yield the targets of the mixer's tensors, with the names of Jamba's."""
        theirs, ours, shape = checkpoint_prefix, parameter_prefix, self.shape
        for field in ("weight", "bias") if shape.bias else ("weight",):
            yield f"{theirs}.in_proj.{field}", self.project.fused_targets(f"{ours}.project.{field}")
        yield from linear_targets(self.select, f"{theirs}.x_proj", f"{ours}.select")
        yield from linear_targets(self.dt, f"{theirs}.dt_proj", f"{ours}.dt", "dt")
        yield from linear_targets(self.out, f"{theirs}.out_proj", f"{ours}.out")
        for name in ("dt", "b", "c"):
            yield from getattr(self, f"{name}_norm").targets(f"{theirs}.{name}_layernorm", f"{ours}.{name}_norm")
        names = {"A_log": "a_log", "D": "d", "dt_proj.bias": "dt_bias"}
        names |= {"conv1d.bias": "conv_bias"} if shape.conv_bias else {}
        shares = (TensorShare(0, self._first, self._count, shape.inner_size),) if self._count < shape.inner_size else ()
        for name, own in names.items():
            yield f"{theirs}.{name}", WeightTarget(f"{ours}.{own}", shares=shares)
        reshaped = Reshape((self._count, 1, shape.conv_width))
        yield f"{theirs}.conv1d.weight", WeightTarget(f"{ours}.conv_weight", shares=shares, transform=reshaped)


def _float32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
