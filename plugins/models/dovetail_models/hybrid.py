"""Define what models share in which some layers keep a state for each request: which layers these are, and layers of two
norms, a mixer or attention, and an MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dovetail.interfaces.cache import CacheGroupKind
from dovetail.layers.attention import SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.experts import Experts
from dovetail.layers.latent import LatentAttention
from dovetail.layers.mamba import Mamba2Shape
from dovetail.layers.mlp import MLP, GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.layers.quantized import quantize_output
from dovetail.layers.states import StateMixer

if TYPE_CHECKING:
    from dovetail.interfaces.model import ModelInfo
    from dovetail.layers.rotary import Rotation
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch
    from dovetail_models.decoder import Targets


def mixer_shape(info: ModelInfo, **variants: Any) -> Mamba2Shape:
    """Return the shape of each mixer of a model whose ``config.mixer`` is a ``Mamba2Sizes``. ``variants`` are further fields
    of the shape."""
    sizes = {field.name: getattr(info.config.mixer, field.name) for field in dataclasses.fields(info.config.mixer)}
    return Mamba2Shape(hidden_size=info.hidden_size, **{"norm_eps": info.config.norm_eps, **sizes, **variants})


def state_group_of(info: ModelInfo) -> int:
    """Return the index of the cache group of states, or 0 if no layer keeps any."""
    kinds = [group.kind for group in info.cache_groups]
    return kinds.index(CacheGroupKind.STATE) if CacheGroupKind.STATE in kinds else 0


def earlier(kinds: Sequence[Any], index: int) -> int:
    """Return the index of layer ``index`` among the layers of its kind, which is that in their cache group."""
    return list(kinds[:index]).count(kinds[index])


class MixerLayer(Layer):
    """Compute a norm and a mixer or attention, and a norm and an MLP or experts. ``group`` is the cache group of
    states."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        mixer: StateMixer | SelfAttention | LatentAttention,
        mlp: GatedMLP | Experts,
        group: int,
        *,
        plus_one: bool = False,
    ) -> None:
        """With ``plus_one``, norms multiply by one plus their weight."""
        super().__init__()
        self.norm, self.mlp_norm = (RMSNorm(hidden_size, eps, plus_one=plus_one) for _ in range(2))
        self.mixer, self.mlp = mixer, mlp
        self._group = group

    def connect(self) -> None:
        """See ``Layer.connect``."""
        if isinstance(self.mixer, StateMixer):
            if self.mixer.reads_once:
                quantize_output(self.norm, self.mixer.project)
        else:
            quantize_output(self.norm, self.mixer.qkv if isinstance(self.mixer, SelfAttention) else self.mixer.qkv_a)
        if isinstance(self.mlp, GatedMLP):
            quantize_output(self.mlp_norm, self.mlp.gate_up)

    def enter(self, x: Addend, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Block``."""
        return self.norm.add_forward(x, residual)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[Addend, torch.Tensor]:
        """See ``Block``."""
        rows = None if last is None else batch.logit_rows
        if isinstance(self.mixer, StateMixer):
            added = self.mixer.parts_forward(x, batch, self._group, rows)
        else:
            added = self.mixer.parts_forward(x, rotation, batch, last)
        if rows is not None:
            stream = stream.index_select(0, rows)
        x, stream = self.mlp_norm.add_forward(added, stream)
        return self.mlp.parts_forward(x), stream


class AddsParts(Protocol):
    """Compute a layer whose results the next norm adds up."""

    def parts_forward(self, x: torch.Tensor) -> Addend:
        """Map ``x [tokens, hidden_size]`` to the same shape. See ``Linear.parts_forward``."""
        ...

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """Yield the targets of the layer's tensors."""
        ...


class OnePartLayer(Layer):
    """Compute a norm and one of: a mixer, attention, an MLP without a gate, another feed-forward layer. ``group`` is the cache group of
    states."""

    def __init__(
        self, hidden_size: int, eps: float, mixer: StateMixer | SelfAttention | MLP | AddsParts, group: int
    ) -> None:
        super().__init__()
        self.norm, self.mixer = RMSNorm(hidden_size, eps), mixer
        self._group = group

    def connect(self) -> None:
        """See ``Layer.connect``."""
        if isinstance(self.mixer, StateMixer):
            quantize_output(self.norm, self.mixer.project)
        elif isinstance(self.mixer, MLP | SelfAttention):
            quantize_output(self.norm, self.mixer.up if isinstance(self.mixer, MLP) else self.mixer.qkv)

    def enter(self, x: Addend, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Block``."""
        return self.norm.add_forward(x, residual)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[Addend, torch.Tensor]:
        """See ``Block``."""
        rows = None if last is None else batch.logit_rows
        if rows is not None:
            stream = stream.index_select(0, rows)
        if isinstance(self.mixer, SelfAttention):
            return self.mixer.parts_forward(x, rotation, batch, last), stream
        if isinstance(self.mixer, StateMixer):
            return self.mixer.parts_forward(x, batch, self._group, rows), stream
        return self.mixer.parts_forward(x if rows is None else x.index_select(0, rows)), stream
