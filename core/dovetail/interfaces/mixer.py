"""Define what computes layers that keep a state for each request: recurrences and short convolutions.

A backend has operations, of which each has three forms: over the rows of prompts, over one token of each decode row, and
``_advance``, which writes the states after those drafts that were accepted. A layer calls them between its projections.
Each operation is a feature (``mixer.ssd`` and others): a model needs those that its layers call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape
    from dovetail.interfaces.state_rows import StateRows
    from dovetail.interfaces.state_space import ScanChannels, SSDHeads

ConvActivation = Literal["silu", "none"]


@dataclass(frozen=True, slots=True)
class MixerContext:
    """Describe what a backend is built for: the layers with states of one model on one device. ``dtype`` is that of inputs
    and outputs; recurrences compute with their states in float32, and keep them in float32, or in bfloat16 if config says so
    (``mixer.bfloat16_states``)."""

    device: torch.device
    dtype: torch.dtype


class MixerStep(NamedTuple):
    """Describe the rows of a step: those of prompts (None: there are none), the slots of decode rows (int32, one token
    each), and rows of drafts, which do not write. With drafts there are no decode rows."""

    prompts: StateRows | None
    decodes: torch.Tensor
    drafts: StateRows | None = None


class MixerBackend(ABC):
    """Compute the operations of layers with a state. There is one instance per model and process.

    A state is a tensor ``[slots, ...]`` in which every request has a slot. It is contiguous except in the slot dimension:
    states of all layers may share memory, so that the stride from slot to slot is larger than a state. Slots that no row
    has may contain anything, NaN included, must not influence a result and stay as they are.

    ``StateRows`` describes rows of prompts and of drafts: row r begins with the state in its slot, or with zeros if it is
    fresh, and unless ``writes`` is False its slot contains the state after its last token afterwards. In the one-token
    form, token r belongs to the state in slot ``slots[r]`` (int32 ``[tokens]``), and no row is fresh. In the form
    ``_advance``, slot ``slots[r]`` gets the state after the tokens ``[starts[r], starts[r] + counts[r])`` (all int32
    ``[rows]``). No row is fresh, and counts may be 0. Slot 0 belongs to rows that pad a batch: in every form they begin with
    zeros, and nothing is written to it. Rows may have no tokens; their slots stay as they are.

    Inputs are contiguous except in the token dimension, and stay as they are. Sums are computed in float32. Rounding apart,
    results do not depend on how a row is divided among steps. Operations that a backend does not declare as features
    raise ``NotImplementedError``.
    """

    @abstractmethod
    def __init__(self, config: Any, context: MixerContext) -> None:
        """Build the backend. ``config`` is its own config section. Raises ``ConfigError`` if the backend cannot serve
        ``context``."""

    def plan(self, step: MixerStep) -> None:
        """Prepare a step, for example indices that all layers use. The engine calls this once per step, before the first
        layer. By default it does nothing."""

    def plan_capture(self, step: MixerStep) -> None:
        """Plan a step whose device tensors keep their addresses, for a graph of this number of rows.

        The engine calls this before it captures the layers. The captured operations must not synchronise, and must not
        depend on host numbers that change from step to step: in replays the tensors have other values, of the same
        shapes. Needs ``mixer.graph``. By default it does nothing.
        """

    def plan_replay(self, step: MixerStep) -> None:
        """Update what the backend keeps on the host, before each replay of a graph. ``step`` is that which was given to
        ``plan_capture``, with the lengths of this step. By default it does nothing."""

    def short_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        rows: StateRows,
        activation: ConvActivation = "silu",
    ) -> torch.Tensor:
        """Return ``activation(bias[c] + sum over i of weight[c, i] * x[t - width + 1 + i, c])`` for ``x [tokens,
        channels]``, of its shape and dtype. ``weight`` is ``[channels, width]``, ``bias`` ``[channels]``.

        The state of a row are its last inputs, ``[channels, width - 1]``, the oldest first. Inputs before the first token
        of a row are those of its state. Needs ``mixer.short_conv``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.short_conv")

    def short_conv_step(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        slots: torch.Tensor,
        activation: ConvActivation = "silu",
    ) -> torch.Tensor:
        """Compute ``short_conv`` for one token of each row."""
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.short_conv")

    def short_conv_advance(
        self, x: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Write the states after accepted drafts. ``x`` is that of ``short_conv``. Needs ``mixer.drafts`` too."""
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.short_conv with mixer.drafts")

    def gated_delta(
        self, qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, rows: StateRows, shape: DeltaShape
    ) -> torch.Tensor:
        """Return the outputs ``[tokens, value_heads, value_dim]`` of the gated delta rule (arXiv 2412.06464), in the dtype
        of ``qkv [tokens, shape.width]``, which has the queries of all key heads, the keys, and the values of all value
        heads.

        The decay of a token is ``d = exp(-rate * softplus(a + bias))`` and its strength ``beta = sigmoid(b)``. Queries and
        keys are divided by the square root of the sum of their squares plus 1e-6. They change the state S and read it:
        ``S = d * S;  S = S + beta * k (v - k S);  out = q S / sqrt(key_dim)``. States are float32 or bfloat16 ``[slots,
        *shape.state]``. A decay is one number for each value head (``mixer.gated_delta``), or one for each of its key
        channels (``gates.by_channel``: Kimi delta attention, arXiv 2510.26692, which needs ``mixer.kda``).
        """
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.gated_delta or mixer.kda")

    def gated_delta_step(
        self, qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, slots: torch.Tensor, shape: DeltaShape
    ) -> torch.Tensor:
        """Compute ``gated_delta`` for one token of each row."""
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.gated_delta or mixer.kda")

    def gated_delta_advance(
        self,
        qkv: torch.Tensor,
        gates: DeltaGates,
        state: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        shape: DeltaShape,
    ) -> None:
        """Write the states after accepted drafts. ``qkv`` and ``gates`` are those of ``gated_delta``. Needs
        ``mixer.drafts`` too."""
        raise NotImplementedError(
            f"{type(self).__name__} does not offer mixer.gated_delta or mixer.kda with mixer.drafts"
        )

    def ssd(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        heads: SSDHeads,
        state: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """Return the outputs of the recurrence of Mamba-2 (arXiv 2405.21060) for ``x [tokens, heads, head_dim]``, of its
        shape and dtype, with ``dt [tokens, heads]``, ``b`` and ``c [tokens, groups, state_size]``.

        Head h has the step size ``dt' = clamp(softplus(dt + dt_bias), limits)``, the group ``h // (heads / groups)`` and
        the state ``H = exp(dt' * a) * H + dt' * outer(x, b)``. Its output is ``H @ c + d * x``. States are float32 or bfloat16
        ``[slots, heads, head_dim, state_size]``. Needs ``mixer.ssd``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.ssd")

    def ssd_step(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        heads: SSDHeads,
        state: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Compute ``ssd`` for one token of each row."""
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.ssd")

    def ssd_advance(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        heads: SSDHeads,
        state: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """Write the states after accepted drafts. The inputs are those of ``ssd``. Needs ``mixer.drafts`` too."""
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.ssd with mixer.drafts")

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        channels: ScanChannels,
        state: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """Return the outputs of the recurrence of Mamba (arXiv 2312.00752) for ``x [tokens, channels]``, of its shape and
        dtype, with ``dt [tokens, channels]``, ``b`` and ``c [tokens, state_size]``.

        A channel has the step size ``dt' = softplus(dt + dt_bias)`` and the state ``h = exp(dt' * a) * h + dt' * x * b``.
        Its output is ``h @ c + d * x``. States are float32 or bfloat16 ``[slots, channels, state_size]``. Needs
        ``mixer.selective_scan``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.selective_scan")

    def selective_scan_step(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        channels: ScanChannels,
        state: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Compute ``selective_scan`` for one token of each row."""
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.selective_scan")

    def selective_scan_advance(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        channels: ScanChannels,
        state: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """Write the states after accepted drafts. The inputs are those of ``selective_scan``. Needs ``mixer.drafts``
        too."""
        raise NotImplementedError(f"{type(self).__name__} does not offer mixer.selective_scan with mixer.drafts")
