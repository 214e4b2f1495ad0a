"""Make inputs of the operations of layers with a state for tests, and compute them token by token in float64."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch.nn import functional

from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer import ConvActivation, MixerBackend
from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape
from dovetail.interfaces.state_rows import StateRows
from dovetail.interfaces.state_space import ScanChannels, SSDHeads

Tensors = tuple[torch.Tensor, ...]


class MixerOperation(ABC):
    """Describe an operation with random parameters: how a backend computes its three forms, and what one token does.

    ``inputs`` are tensors ``[tokens, ...]``, of which the one-token form gets all and the advance some.
    """

    feature: ClassVar[Feature]
    shape: tuple[int, ...]
    """The shape of a state of one slot."""
    exact: bool = False
    """True if states are copies of inputs, in the dtype of inputs, and not computed in float32."""

    narrow: bool = False
    """True if states that are not ``exact`` are kept in bfloat16."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Make parameters on ``device``. ``dtype`` is that of inputs."""
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return normally distributed numbers on the device, in the dtype of inputs by default."""
        return torch.randn(shape, generator=self._generator).to(self.device, dtype or self.dtype)

    def _view(self, tokens: int, *shape: int) -> torch.Tensor:
        """Return random ``[tokens, *shape]``, a view of a wider tensor whose other numbers are NaN."""
        size = math.prod(shape)
        whole = self.random(tokens, size + 8).fill_(float("nan"))
        whole[:, 8:] = self.random(tokens, size)
        return whole[:, 8:].view(tokens, *shape) if len(shape) == 1 else whole[:, 8:].unflatten(1, shape)

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of states."""
        return self.dtype if self.exact else torch.bfloat16 if self.narrow else torch.float32

    @abstractmethod
    def inputs(self, tokens: int) -> Tensors:
        """Return random inputs."""

    @abstractmethod
    def prompt(self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """Compute rows."""

    @abstractmethod
    def step(self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Compute one token of each row."""

    @abstractmethod
    def advance(
        self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write the states after accepted drafts."""

    @abstractmethod
    def token(self, inputs: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of one token and the state after it, from float64 ``inputs`` (``[...]`` each) and state."""


class ShortConv(MixerOperation):
    """Describe a short convolution."""

    feature = Feature.MIXER_SHORT_CONV
    exact = True

    def __init__(
        self, device: torch.device, dtype: torch.dtype, width: int = 4, activation: ConvActivation = "silu"
    ) -> None:
        super().__init__(device, dtype)
        self.channels = 70
        self.activation: ConvActivation = activation
        self.shape = (self.channels, width - 1)
        self.weight = self.random(self.channels, width)
        self.bias = self.random(self.channels) if activation == "silu" else None

    def inputs(self, tokens: int) -> Tensors:
        """Return x."""
        return (self._view(tokens, self.channels),)

    def prompt(self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """See ``MixerOperation``."""
        return backend.short_conv(inputs[0], self.weight, self.bias, state, rows, self.activation)

    def step(self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """See ``MixerOperation``."""
        return backend.short_conv_step(inputs[0], self.weight, self.bias, state, slots, self.activation)

    def advance(
        self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:  # fmt: skip
        """See ``MixerOperation``."""
        backend.short_conv_advance(inputs[0], state, slots, starts, counts)

    def token(self, inputs: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``MixerOperation``."""
        seen = torch.cat((state, inputs[0][:, None]), 1)
        total = (seen * self.weight.double().cpu()).sum(1)
        if self.bias is not None:
            total = total + self.bias.double().cpu()
        return (functional.silu(total) if self.activation == "silu" else total), seen[:, 1:]


class GatedDelta(MixerOperation):
    """Describe the gated delta rule with one decay for each head."""

    feature: ClassVar[Feature] = Feature.MIXER_GATED_DELTA
    by_channel: ClassVar[bool] = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.heads = DeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=20)
        self.shape = self.heads.state
        self._decays = (4, 16) if self.by_channel else (4,)
        self.rate = torch.rand(4, generator=self._generator).to(device) * 2
        self.bias = self.random(*self._decays, dtype=torch.float32)

    def inputs(self, tokens: int) -> Tensors:
        """Return qkv, a and b."""
        return self._view(tokens, self.heads.width), self._view(tokens, *self._decays), self._view(tokens, 4)

    def _gates(self, inputs: Tensors) -> DeltaGates:
        return DeltaGates(inputs[1], inputs[2], self.rate, self.bias)

    def prompt(self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """See ``MixerOperation``."""
        return backend.gated_delta(inputs[0], self._gates(inputs), state, rows, self.heads)

    def step(self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """See ``MixerOperation``."""
        return backend.gated_delta_step(inputs[0], self._gates(inputs), state, slots, self.heads)

    def advance(
        self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:  # fmt: skip
        """See ``MixerOperation``."""
        backend.gated_delta_advance(inputs[0], self._gates(inputs), state, slots, starts, counts, self.heads)

    def token(self, inputs: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``MixerOperation``."""
        heads, (qkv, a, b) = self.heads, inputs
        q, k, v = qkv.split([32, 32, 80])
        q, k = (each.view(2, 16).repeat_interleave(2, 0) for each in (q, k))
        q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        decay = (
            -self.rate.double().cpu().view(4, 1) * functional.softplus(a + self.bias.double().cpu()).view(4, -1)
        ).exp()
        state = state * decay[:, :, None]
        change = b.sigmoid()[:, None] * (v.view(4, 20) - torch.einsum("hk,hkv->hv", k, state))
        state = state + torch.einsum("hk,hv->hkv", k, change)
        return torch.einsum("hk,hkv->hv", q, state) * heads.key_dim**-0.5, state


class KimiDelta(GatedDelta):
    """Describe the gated delta rule with a decay for each key channel."""

    feature: ClassVar[Feature] = Feature.MIXER_KDA
    by_channel: ClassVar[bool] = True


class SSD(MixerOperation):
    """Describe the recurrence of Mamba-2."""

    feature = Feature.MIXER_SSD

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.shape = (4, 12, 20)
        a = -torch.rand(4, generator=self._generator).to(device) * 4 - 0.1
        d, bias = self.random(4, dtype=torch.float32), self.random(4, dtype=torch.float32)
        self.heads = SSDHeads(a, d, bias, (0.02, 1.5))

    def inputs(self, tokens: int) -> Tensors:
        """Return x, dt, b and c."""
        return self._view(tokens, 4, 12), self._view(tokens, 4), self._view(tokens, 2, 20), self._view(tokens, 2, 20)

    def prompt(self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """See ``MixerOperation``."""
        x, dt, b, c = inputs
        return backend.ssd(x, dt, b, c, self.heads, state, rows)

    def step(self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """See ``MixerOperation``."""
        x, dt, b, c = inputs
        return backend.ssd_step(x, dt, b, c, self.heads, state, slots)

    def advance(
        self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:  # fmt: skip
        """See ``MixerOperation``."""
        x, dt, b, _ = inputs
        backend.ssd_advance(x, dt, b, self.heads, state, slots, starts, counts)

    def token(self, inputs: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``MixerOperation``."""
        x, dt, b, c = inputs
        a, d, bias = (each.double().cpu() for each in (self.heads.a, self.heads.d, self.heads.dt_bias))
        b, c = b.repeat_interleave(2, 0), c.repeat_interleave(2, 0)
        size = functional.softplus(dt + bias).clamp(*self.heads.limits)
        state = (size * a).exp()[:, None, None] * state + size[:, None, None] * x[:, :, None] * b[:, None, :]
        return (state * c[:, None, :]).sum(2) + d[:, None] * x, state


class SelectiveScan(MixerOperation):
    """Describe the recurrence of Mamba."""

    feature = Feature.MIXER_SELECTIVE_SCAN

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.shape = (37, 12)
        a = -torch.rand(self.shape, generator=self._generator).to(device) * 4 - 0.1
        self.channels = ScanChannels(a, self.random(37, dtype=torch.float32), self.random(37, dtype=torch.float32))

    def inputs(self, tokens: int) -> Tensors:
        """Return x, dt, b and c."""
        return self._view(tokens, 37), self._view(tokens, 37), self._view(tokens, 12), self._view(tokens, 12)

    def prompt(self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """See ``MixerOperation``."""
        x, dt, b, c = inputs
        return backend.selective_scan(x, dt, b, c, self.channels, state, rows)

    def step(self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """See ``MixerOperation``."""
        x, dt, b, c = inputs
        return backend.selective_scan_step(x, dt, b, c, self.channels, state, slots)

    def advance(
        self, backend: MixerBackend, inputs: Tensors, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:  # fmt: skip
        """See ``MixerOperation``."""
        x, dt, b, _ = inputs
        backend.selective_scan_advance(x, dt, b, self.channels, state, slots, starts, counts)

    def token(self, inputs: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``MixerOperation``."""
        x, dt, b, c = inputs
        a, d, bias = (each.double().cpu() for each in (self.channels.a, self.channels.d, self.channels.dt_bias))
        size = functional.softplus(dt + bias)[:, None]
        state = (size * a).exp() * state + size * x[:, None] * b
        return state @ c + d * x, state


OPERATIONS: dict[str, type[MixerOperation]] = {
    "short_conv": ShortConv,
    "gated_delta": GatedDelta,
    "kda": KimiDelta,
    "ssd": SSD,
    "selective_scan": SelectiveScan,
}
"""All operations, by the last part of their feature's name."""
