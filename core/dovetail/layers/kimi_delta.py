"""Compute Kimi delta attention (arXiv 2510.26692): the gated delta rule with a decay for each channel of a key."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.interfaces.mixer_shapes import KDA_NEEDS, DeltaGates, DeltaShape, StateShape
from dovetail.interfaces.model import TensorShare, WeightTarget
from dovetail.layers.base import parameter
from dovetail.layers.decoder import linear_targets
from dovetail.layers.linear import ColumnLinear, row_linear
from dovetail.layers.states import StateMixer, StateTargets, StepStates
from dovetail.layers.transforms import Reshape
from dovetail.ops.activation import sigmoid_mul
from dovetail.ops.norm import rms_norm

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.mixer import MixerBackend


@dataclass(frozen=True, slots=True)
class KimiDeltaShape:
    """Describe the sizes of a whole layer. Queries, keys and values have ``num_heads`` heads of ``head_dim``, which is also
    the rank of the projections that decays and gates of the outputs are computed from."""

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_width: int
    norm_eps: float


class KimiDeltaAttention(StateMixer):
    """Project the input to queries, keys and values, and to gates of the outputs and decays by way of fewer channels;
    convolve queries, keys and values; compute the gated delta rule; normalise each head of its outputs, gate it, and
    project back.

    Every rank computes its share of the heads. Its states of a request are the last inputs of the convolution and the state
    of the rule.
    """

    needs = KDA_NEEDS
    reads_once = False

    def __init__(self, shape: KimiDeltaShape, state_id: int, mesh: Mesh) -> None:
        super().__init__()
        self.divides_rows, mesh = mesh.attention == "data", mesh.of_attention
        self.shape, self.state_id = shape, state_id
        size, inner = shape.head_dim, shape.num_heads * shape.head_dim
        self._first, self._heads = mesh.tp.share(shape.num_heads)
        self._divided = mesh.tp.size > 1
        self.local = DeltaShape(self._heads, self._heads, size, size)
        parts = {"q": inner, "k": inner, "v": inner, "g_a": size}
        self.project = ColumnLinear(shape.hidden_size, parts, mesh, unit=size, whole=("g_a",))
        self.project.reads_selected = self.divides_rows
        gates = {"b": shape.num_heads, "f_a": size}
        self.gates = ColumnLinear(shape.hidden_size, gates, mesh, whole=("f_a",))
        self.f_b, self.g_b = (ColumnLinear(size, {"all": inner}, mesh, unit=size) for _ in range(2))
        self.gates.precise = self.f_b.precise = True  # their error grows with the recurrence
        self.conv_weight = parameter(self.local.width, shape.conv_width)
        self.a_log, self.dt_bias = (
            nn.Parameter(torch.empty(count, dtype=torch.float32), requires_grad=False)
            for count in (self._heads, self._heads * size)
        )
        self.norm_weight = parameter(size)
        self.out = row_linear(inner, shape.hidden_size, mesh)
        self._rate: torch.Tensor
        self._norm_weights: torch.Tensor

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        self._rate = self.a_log.detach().exp()
        self._norm_weights = self.norm_weight.detach().expand(self._heads, -1).contiguous()
        super().prepare()

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """See ``StateLayer``."""
        return StateShape((self.local.width, self.shape.conv_width - 1)), StateShape(self.local.state, "float32")

    def mix(self, x: torch.Tensor, states: StepStates, rows: torch.Tensor | None) -> torch.Tensor:
        """See ``StateMixer``."""
        if not self.prepared:
            self.prepare()
        local, size = self.local, self.shape.head_dim
        inputs, gate = self.project.forward(x).split((local.width, size), 1)
        b, low_rank = self.gates.forward(x).split((self._heads, size), 1)
        decays = self.f_b.forward(low_rank.contiguous()).unflatten(1, (self._heads, size))
        (conv, own), ops = states.memory[self.state_id], states.backend
        mixed = states.short_conv(inputs, self.conv_weight, None, conv)
        outputs = states.run(
            lambda part, rows: ops.gated_delta(part[0], self._gates(*part[1:]), own, rows, local),
            lambda part, slots: ops.gated_delta_step(part[0], self._gates(*part[1:]), own, slots, local),
            mixed,
            decays,
            b,
        )
        states.keep(functools.partial(self._advance, ops, (conv, own)), inputs, mixed, decays, b)
        if rows is not None:
            outputs, gate = outputs.index_select(0, rows), gate.index_select(0, rows)
        normed = rms_norm(outputs, self._norm_weights, self.shape.norm_eps)
        return sigmoid_mul(normed.flatten(1), self.g_b.forward(gate.contiguous()))

    def _gates(self, decays: torch.Tensor, b: torch.Tensor) -> DeltaGates:
        return DeltaGates(decays, b, self._rate, self.dt_bias.view(self._heads, -1))

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
        (conv, own), (inputs, mixed, decays, b) = memory, tensors
        ops.short_conv_advance(inputs, conv, slots, starts, counts)
        ops.gated_delta_advance(mixed, self._gates(decays, b), own, slots, starts, counts, self.local)

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> StateTargets:
        """See ``StateMixer``."""
        theirs, ours, shape = checkpoint_prefix, parameter_prefix, self.shape
        for part in ("q", "k", "v"):
            yield from linear_targets(self.project, f"{theirs}.{part}_proj", f"{ours}.project", part)
        yield from linear_targets(self.project, f"{theirs}.g_a_proj", f"{ours}.project", "g_a")
        yield from linear_targets(self.gates, f"{theirs}.b_proj", f"{ours}.gates", "b")
        yield from linear_targets(self.gates, f"{theirs}.f_a_proj", f"{ours}.gates", "f_a")
        yield from linear_targets(self.f_b, f"{theirs}.f_b_proj", f"{ours}.f_b", "all")
        yield from linear_targets(self.g_b, f"{theirs}.g_b_proj", f"{ours}.g_b", "all")
        yield from linear_targets(self.out, f"{theirs}.o_proj", f"{ours}.out")
        size = self._heads * shape.head_dim
        for index, part in enumerate("qkv"):
            reshape = Reshape((size, 1, shape.conv_width))
            target = WeightTarget(f"{ours}.conv_weight", index * size, size, self._share(0, shape.head_dim), reshape)
            yield f"{theirs}.{part}_conv1d.weight", target
        rates = Reshape((1, 1, self._heads, 1))
        yield f"{theirs}.A_log", WeightTarget(f"{ours}.a_log", None, None, self._share(2, 1), rates)
        yield f"{theirs}.dt_bias", WeightTarget(f"{ours}.dt_bias", shares=self._share(0, shape.head_dim))
        yield f"{theirs}.o_norm.weight", WeightTarget(f"{ours}.norm_weight")

    def _share(self, dim: int, unit: int) -> tuple[TensorShare, ...]:
        """Return this rank's share of a tensor with ``unit`` entries for each head in dimension ``dim``."""
        share = TensorShare(dim, self._first * unit, self._heads * unit, self.shape.num_heads * unit)
        return (share,) if self._divided else ()
