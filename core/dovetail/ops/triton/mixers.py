"""Compute the operations of layers with a state with the kernels of ``dovetail.ops.triton``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.interfaces.mixer import ConvActivation, MixerBackend
from dovetail.ops.triton import gated_delta, selective_scan, short_conv, ssd

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape
    from dovetail.interfaces.state_rows import StateRows
    from dovetail.interfaces.state_space import ScanChannels, SSDHeads


class TritonMixer(MixerBackend):
    """Compute every operation with Dovetail's own kernels. The host never waits."""

    def __init__(self, *_: object) -> None:
        """Hold nothing: one instance serves any model."""

    def short_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        rows: StateRows,
        activation: ConvActivation = "silu",
    ) -> torch.Tensor:
        """See ``MixerBackend``."""
        return short_conv.short_conv(x, weight, bias, state, rows, activation)

    def short_conv_step(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        slots: torch.Tensor,
        activation: ConvActivation = "silu",
    ) -> torch.Tensor:
        """See ``MixerBackend``."""
        return short_conv.short_conv_step(x, weight, bias, state, slots, activation)

    def short_conv_advance(
        self,
        x: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """See ``MixerBackend``."""
        short_conv.short_conv_advance(x, state, slots, starts, counts)

    def gated_delta(
        self,
        qkv: torch.Tensor,
        gates: DeltaGates,
        state: torch.Tensor,
        rows: StateRows,
        shape: DeltaShape,
    ) -> torch.Tensor:
        """See ``MixerBackend``."""
        return gated_delta.gated_delta(qkv, gates, state, rows, shape)

    def gated_delta_step(
        self,
        qkv: torch.Tensor,
        gates: DeltaGates,
        state: torch.Tensor,
        slots: torch.Tensor,
        shape: DeltaShape,
    ) -> torch.Tensor:
        """See ``MixerBackend``."""
        return gated_delta.gated_delta_step(qkv, gates, state, slots, shape)

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
        """See ``MixerBackend``."""
        gated_delta.gated_delta_advance(qkv, gates, state, slots, starts, counts, shape)

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
        """See ``MixerBackend``."""
        return ssd.ssd(x, dt, b, c, heads, state, rows)

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
        """See ``MixerBackend``."""
        return ssd.ssd_step(x, dt, b, c, heads, state, slots)

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
        """See ``MixerBackend``."""
        ssd.ssd_advance(x, dt, b, heads, state, slots, starts, counts)

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
        """See ``MixerBackend``."""
        return selective_scan.selective_scan(x, dt, b, c, channels, state, rows)

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
        """See ``MixerBackend``."""
        return selective_scan.selective_scan_step(x, dt, b, c, channels, state, slots)

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
        """See ``MixerBackend``."""
        selective_scan.selective_scan_advance(x, dt, b, channels, state, slots, starts, counts)
