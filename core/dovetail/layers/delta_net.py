"""Compute gated delta nets (Yang et al. 2024, arXiv 2412.06464), the layers of Qwen3-Next and Qwen3.5 that keep a state
instead of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.interfaces.mixer_shapes import DELTA_NEEDS, DeltaGates, DeltaShape
from dovetail.interfaces.model import TensorShare, WeightTarget
from dovetail.layers.base import parameter
from dovetail.layers.linear import ColumnLinear, row_linear
from dovetail.layers.states import StateMixer, StateShape, StateTargets, StepStates
from dovetail.layers.transforms import PartsTogether, Reshape
from dovetail.ops.gated_norm import gated_rms_norm

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.mixer import MixerBackend


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """Describe the sizes of a whole gated delta net. ``by_head`` is the layout of a checkpoint: True if the projections of
    a key head and its value heads are together (Qwen3-Next), False if each projection is a tensor (Qwen3.5)."""

    hidden_size: int
    heads: DeltaShape
    conv_width: int
    norm_eps: float
    by_head: bool = True


class GatedDeltaNet(StateMixer):
    """Project the input to queries, keys, values, gates of the outputs (``project``), and what strengths and decays are
    computed from (``ba``); convolve queries, keys and values; compute the gated delta rule; normalise each head of its
    outputs, gate it, and project back.

    Every rank computes its share of the key heads and the value heads that use them. Its states of a request are the
    last inputs of the convolution and the state of the rule.
    """

    needs = DELTA_NEEDS
    reads_once = False

    def __init__(self, shape: DeltaNetShape, state_id: int, mesh: Mesh) -> None:
        super().__init__()
        self.divides_rows, mesh = mesh.attention == "data", mesh.of_attention
        self.shape, self.state_id, heads = shape, state_id, shape.heads
        group = heads.value_heads // heads.key_heads
        self._first, count = mesh.tp.share(heads.key_heads)
        assert mesh.tp.size == 1 or count * mesh.tp.size == heads.key_heads, "ranks must divide the key heads"
        self.local = DeltaShape(count, count * group, heads.key_dim, heads.value_dim)
        self._divided = mesh.tp.size > 1
        keys, values = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
        parts = {"q": keys, "k": keys, "v": values, "z": values}
        unit = {"q": heads.key_dim, "k": heads.key_dim, "v": group * heads.value_dim, "z": group * heads.value_dim}
        self.project = ColumnLinear(shape.hidden_size, parts, mesh, unit=unit)
        self.project.reads_selected = self.divides_rows
        self.ba = ColumnLinear(shape.hidden_size, dict.fromkeys("ba", heads.value_heads), mesh, unit=group)
        self.ba.precise = True  # few rows, whose error grows with the recurrence
        self.conv_weight = parameter(self.local.width, shape.conv_width)
        self.a_log, self.dt_bias = (
            nn.Parameter(torch.empty(self.local.value_heads, dtype=torch.float32), requires_grad=False)
            for _ in range(2)
        )
        self.norm_weight = parameter(heads.value_dim)
        self.out = row_linear(values, shape.hidden_size, mesh)
        self._rate: torch.Tensor
        self._norm_weights: torch.Tensor

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        self._rate = self.a_log.detach().exp()
        self._norm_weights = self.norm_weight.detach().repeat(self.local.value_heads)
        super().prepare()

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """See ``StateLayer``."""
        conv = StateShape((self.local.width, self.shape.conv_width - 1))
        return conv, StateShape(self.local.state, "float32")

    def mix(self, x: torch.Tensor, states: StepStates, rows: torch.Tensor | None) -> torch.Tensor:
        """See ``StateMixer``."""
        if not self.prepared:
            self.prepare()
        local, rate, bias = self.local, self._rate, self.dt_bias
        mixed, z = self.project.forward(x).split((local.width, local.value_heads * local.value_dim), 1)
        b, a = self.ba.forward(x).split((local.value_heads, local.value_heads), 1)
        (conv, own), ops, inputs = states.memory[self.state_id], states.backend, mixed
        mixed = states.short_conv(inputs, self.conv_weight, None, conv)
        outputs = states.run(
            lambda part, rows: ops.gated_delta(part[0], DeltaGates(part[1], part[2], rate, bias), own, rows, local),
            lambda part, slots: ops.gated_delta_step(
                part[0], DeltaGates(part[1], part[2], rate, bias), own, slots, local
            ),
            mixed,
            a,
            b,
        ).flatten(1)
        states.keep(functools.partial(self._advance, ops, (conv, own)), inputs, mixed, a, b)
        if rows is not None:
            outputs, z = outputs.index_select(0, rows), z.index_select(0, rows)
        return gated_rms_norm(
            outputs, z, self._norm_weights, self.shape.norm_eps, local.value_dim, norm_first=True
        )  # fmt: skip

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
        (conv, own), (inputs, mixed, a, b) = memory, tensors
        ops.short_conv_advance(inputs, conv, slots, starts, counts)
        gates = DeltaGates(a, b, self._rate, self.dt_bias)
        ops.gated_delta_advance(mixed, gates, own, slots, starts, counts, self.local)

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> StateTargets:
        """See ``StateMixer``."""
        yield from self._projection_targets(checkpoint_prefix, parameter_prefix)
        yield f"{checkpoint_prefix}.out_proj.weight", self.out.target(f"{parameter_prefix}.out.weight")
        yield f"{checkpoint_prefix}.norm.weight", WeightTarget(f"{parameter_prefix}.norm_weight")
        yield f"{checkpoint_prefix}.conv1d.weight", list(self._conv_targets(f"{parameter_prefix}.conv_weight"))
        for theirs, ours in (("A_log", "a_log"), ("dt_bias", "dt_bias")):
            share = self._share(self.shape.heads.value_heads // self.shape.heads.key_heads)
            yield f"{checkpoint_prefix}.{theirs}", WeightTarget(f"{parameter_prefix}.{ours}", shares=share)

    def _projection_targets(self, checkpoint_prefix: str, parameter_prefix: str) -> StateTargets:
        qkvz, ba, heads = f"{parameter_prefix}.project.weight", f"{parameter_prefix}.ba.weight", self.shape.heads
        group = heads.value_heads // heads.key_heads
        if self.shape.by_head:
            values = group * heads.value_dim
            for name, target, sizes in (
                ("in_proj_qkvz", qkvz, (heads.key_dim, heads.key_dim, values, values)),
                ("in_proj_ba", ba, (group, group)),
            ):
                whole = WeightTarget(target, shares=self._share(sum(sizes)), transform=PartsTogether(sizes))
                yield f"{checkpoint_prefix}.{name}.weight", whole
            return
        yield f"{checkpoint_prefix}.in_proj_qkv.weight", list(self._conv_targets(qkvz, conv=False))
        yield f"{checkpoint_prefix}.in_proj_z.weight", self.project.target(qkvz, "z")
        for part in "ba":
            yield f"{checkpoint_prefix}.in_proj_{part}.weight", self.ba.target(ba, part)

    def _share(self, unit: int) -> tuple[TensorShare, ...]:
        """Return this rank's share of a tensor with ``unit`` rows for each key head."""
        count = self.local.key_heads
        share = TensorShare(0, self._first * unit, count * unit, self.shape.heads.key_heads * unit)
        return (share,) if self._divided else ()

    def _conv_targets(self, parameter_name: str, *, conv: bool = True) -> Iterator[WeightTarget]:
        """Yield the targets of a tensor with rows of all queries, then all keys and all values."""
        heads, local = self.shape.heads, self.local
        value = heads.value_heads // heads.key_heads * heads.value_dim
        start = before = 0
        for unit in (heads.key_dim, heads.key_dim, value):
            size = local.key_heads * unit
            share = TensorShare(0, before + self._first * unit, size, heads.width)
            reshape = Reshape((size, 1, self.shape.conv_width)) if conv else None
            yield WeightTarget(parameter_name, start, size, (share,), reshape)
            start, before = start + size, before + heads.key_heads * unit
