"""Compute the mixers of Mamba-2 (arXiv 2405.21060), which keep a state for each request in place of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.mixer_shapes import SSD_NEEDS
from dovetail.interfaces.model import TensorShare, WeightTarget
from dovetail.interfaces.state_space import SSDHeads
from dovetail.layers.base import parameter
from dovetail.layers.decoder import linear_targets
from dovetail.layers.linear import ColumnLinear, row_linear
from dovetail.layers.states import StateMixer, StateShape, StateTargets, StepStates
from dovetail.layers.transforms import Reshape
from dovetail.ops.gated_norm import gated_rms_norm

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.mixer import MixerBackend

GatedNormOrder = Literal["gate first", "norm first", "no norm"]


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Describe the sizes and variants of a whole Mamba-2 mixer. ``order`` is that of the gate and the norm of the
    outputs. ``multipliers`` multiply the projections of gate, inputs, b, c and step sizes. ``limits`` are those of
    ``SSDHeads``."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    norm_eps: float
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    order: GatedNormOrder = "gate first"
    multipliers: tuple[float, float, float, float, float] | None = None
    limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner_size(self) -> int:
        """Return the number of channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def parts(self) -> dict[str, int]:
        """Return the projections of the input and their sizes, in the order of checkpoints."""
        shared = self.num_groups * self.state_size
        return {"gate": self.inner_size, "x": self.inner_size, "b": shared, "c": shared, "dt": self.num_heads}


class Mamba2Mixer(StateMixer):
    """Project the input to gate, inputs, b, c and step sizes, convolve inputs, b and c, compute the recurrence of
    ``ops.ssd``, gate and normalise its outputs, and project back.

    Every rank computes its share of the heads, and the groups of these heads: if there are fewer groups than ranks,
    several ranks compute the same one. Parameters that are not matrices are float32.
    """

    needs = SSD_NEEDS

    def __init__(self, shape: Mamba2Shape, state_id: int, mesh: Mesh) -> None:
        super().__init__()
        self.divides_rows, mesh = mesh.attention == "data", mesh.of_attention
        self.shape, self.state_id, self._tp = shape, state_id, mesh.tp
        parts, unit = shape.parts, {"gate": shape.head_dim, "x": shape.head_dim, "dt": 1}
        unit |= {"b": shape.state_size, "c": shape.state_size}
        self.project = ColumnLinear(shape.hidden_size, parts, mesh, bias=shape.in_bias, unit=unit)
        self.project.reads_selected = self.divides_rows
        self.out = row_linear(shape.inner_size, shape.hidden_size, mesh, bias=shape.out_bias)
        self._first_head, self._heads = mesh.tp.share(shape.num_heads)
        self._groups = mesh.tp.share(shape.num_groups)[1]
        inner, shared = self._heads * shape.head_dim, self._groups * shape.state_size
        self._sizes = {"gate": inner, "x": inner, "b": shared, "c": shared, "dt": self._heads}
        channels = inner + 2 * shared
        self.conv_weight = parameter(channels, shape.conv_width)
        self.conv_bias = parameter(channels) if shape.conv_bias else None
        self.a_log, self.d, self.dt_bias = (_float32(self._heads) for _ in range(3))
        self.norm_weight = None if shape.order == "no norm" else parameter(inner)
        self._parameters_of_heads: SSDHeads
        self._multiplier: torch.Tensor | None = None

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        limits = self.shape.limits
        self._parameters_of_heads = SSDHeads(-self.a_log.detach().exp(), self.d.detach(), self.dt_bias.detach(), limits)
        if self.shape.multipliers is not None:
            of_parts = zip(self._sizes.values(), self.shape.multipliers, strict=True)
            self._multiplier = torch.cat([self.conv_weight.new_full((size,), factor) for size, factor in of_parts])
        super().prepare()

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """See ``StateLayer``."""
        shape = self.shape
        conv = (len(self.conv_weight), shape.conv_width - 1)
        return StateShape(conv), StateShape((self._heads, shape.head_dim, shape.state_size), "float32")

    def mix(self, x: torch.Tensor, states: StepStates, rows: torch.Tensor | None) -> torch.Tensor:
        """See ``StateMixer``."""
        if not self.prepared:
            self.prepare()
        shape, sizes = self.shape, self._sizes
        projected = self.project.forward(x)
        if self._multiplier is not None:
            projected = projected.mul_(self._multiplier)
        gate, mixed, dt = projected.split([sizes["gate"], sizes["x"] + 2 * sizes["b"], sizes["dt"]], 1)
        (conv, own), ops, inputs = states.memory[self.state_id], states.backend, mixed
        heads = self._parameters_of_heads
        mixed = states.short_conv(inputs, self.conv_weight, self.conv_bias, conv)
        x, b, c = mixed.split([sizes["x"], sizes["b"], sizes["c"]], 1)
        x = x.unflatten(1, (self._heads, shape.head_dim))
        b, c = (each.unflatten(1, (self._groups, shape.state_size)) for each in (b, c))
        outputs = states.run(
            lambda part, rows: ops.ssd(part[0], part[1], part[2], part[3], heads, own, rows),
            lambda part, slots: ops.ssd_step(part[0], part[1], part[2], part[3], heads, own, slots),
            x,
            dt,
            b,
            c,
        ).flatten(1)
        states.keep(functools.partial(self._advance, ops, (conv, own)), inputs, x, dt, b)
        if rows is not None:
            outputs, gate = outputs.index_select(0, rows), gate.index_select(0, rows)
        return self._gated(outputs, gate)

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
        ops.ssd_advance(x, dt, b, self._parameters_of_heads, own, slots, starts, counts)

    def _gated(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.norm_weight is None:
            return (outputs.float() * functional.silu(gate.float())).to(outputs.dtype)
        shape, first = self.shape, self.shape.order == "norm first"
        if shape.num_groups >= self._tp.size:
            size = outputs.shape[1] // self._groups
            return gated_rms_norm(outputs, gate, self.norm_weight, shape.norm_eps, size, norm_first=first)
        return self._norm_across_ranks(outputs.float(), functional.silu(gate.float()), first).to(outputs.dtype)

    def _norm_across_ranks(self, outputs: torch.Tensor, opened: torch.Tensor, norm_first: bool) -> torch.Tensor:
        """Normalise groups whose channels several ranks have. The ranks add up the sums of squares of all groups, each
        in the column of its group."""
        assert self.norm_weight is not None
        values = outputs if norm_first else outputs * opened
        squares = values.new_zeros(len(values), self.shape.num_groups)
        group = self._tp.share(self.shape.num_groups)[0]
        squares[:, group] = values.square().sum(1)
        mean = self._tp.all_reduce(squares)[:, group] * (self.shape.num_groups / self.shape.inner_size)
        normed = values * (mean + self.shape.norm_eps).rsqrt()[:, None] * self.norm_weight.float()
        return normed * opened if norm_first else normed

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> StateTargets:
        """Yield the targets of the mixer's tensors, with the names that all published models have."""
        shape = self.shape
        for field in ("weight", "bias") if shape.in_bias else ("weight",):
            yield (
                f"{checkpoint_prefix}.in_proj.{field}",
                self.project.fused_targets(f"{parameter_prefix}.project.{field}"),
            )
        yield from linear_targets(self.out, f"{checkpoint_prefix}.out_proj", f"{parameter_prefix}.out")
        places = list(self._conv_places())
        yield (
            f"{checkpoint_prefix}.conv1d.weight",
            [
                WeightTarget(
                    f"{parameter_prefix}.conv_weight",
                    start,
                    share.size,
                    (share,),
                    Reshape((share.size, 1, shape.conv_width)),
                )
                for start, share in places
            ],
        )
        if shape.conv_bias:
            name = f"{parameter_prefix}.conv_bias"
            yield (
                f"{checkpoint_prefix}.conv1d.bias",
                [WeightTarget(name, at, each.size, (each,)) for at, each in places],
            )
        for theirs, ours in (("A_log", "a_log"), ("D", "d"), ("dt_bias", "dt_bias")):
            yield f"{checkpoint_prefix}.{theirs}", self._share(f"{parameter_prefix}.{ours}", 1)
        if self.norm_weight is not None:
            yield f"{checkpoint_prefix}.norm.weight", self._share(f"{parameter_prefix}.norm_weight", shape.head_dim)

    def _share(self, name: str, unit: int) -> WeightTarget:
        """Return the target of a tensor with ``unit`` numbers for each head."""
        whole = self.shape.num_heads * unit
        share = TensorShare(0, self._first_head * unit, self._heads * unit, whole)
        return WeightTarget(name, shares=(share,) if self._tp.size > 1 else ())

    def _conv_places(self) -> Iterator[tuple[int, TensorShare]]:
        """Yield for inputs, b and c where their channels begin in the parameters, and their share of the checkpoint's
        channels."""
        shape, sizes = self.shape, self._sizes
        whole: Mapping[str, int] = shape.parts
        first = {"x": self._first_head * shape.head_dim}
        first |= dict.fromkeys(("b", "c"), self._tp.share(shape.num_groups)[0] * shape.state_size)
        start = before = 0
        for name in ("x", "b", "c"):
            total = whole["x"] + whole["b"] + whole["c"]
            yield start, TensorShare(0, before + first[name], sizes[name], total)
            start += sizes[name]
            before += whole[name]


def _float32(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
