"""A decoder layer of the Llama family, for drafters whose models are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.model import WeightTarget
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.linear import FusedLinear, Linear
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rope import RopeConfig

if TYPE_CHECKING:
    from dovetail.layers.rotary import Rotation
    from dovetail.types import Batch


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and variants of a decoder layer. ``rope.context_len`` is the longest context that it is used for."""

    attention: AttentionShape
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    mlp_bias: bool = False


class DecoderLayer(Layer):
    """Pre-norm self-attention and a gated MLP. ``index`` is the layer's place in the drafter's room."""

    def __init__(self, shape: DecoderShape, index: int) -> None:
        super().__init__()
        hidden = shape.attention.hidden_size
        self.attn_norm = RMSNorm(hidden, shape.norm_eps)
        self.attn = SelfAttention(shape.attention, AttentionLayer(index, shape.attention.head_dim**-0.5))
        self.mlp_norm = RMSNorm(hidden, shape.norm_eps)
        self.mlp = GatedMLP(hidden, shape.intermediate_size, bias=shape.mlp_bias)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What this layer adds, and the residual stream before it is added, both ``[tokens, hidden_size]``. Overwrites ``x``."""
        if residual is None:
            x, residual = self.attn_norm.forward(x), x
        else:
            x, residual = self.attn_norm.add_forward(x, residual)
        x = self.attn.forward(x, rotation, batch)
        x, residual = self.mlp_norm.add_forward(x, residual)
        return self.mlp.forward(x), residual


def decoder_targets(layer: DecoderLayer, theirs: str, ours: str) -> Iterator[tuple[str, WeightTarget]]:
    """The checkpoint's names of a layer's tensors, all of which begin with ``theirs``, and where they go: parameters of the
    layer that the model calls ``ours``."""
    for name, target in _targets(layer):
        yield f"{theirs}.{name}", target._replace(parameter=f"{ours}.{target.parameter}")


def _targets(layer: DecoderLayer) -> Iterator[tuple[str, WeightTarget]]:
    yield "input_layernorm.weight", WeightTarget("attn_norm.weight")
    yield "post_attention_layernorm.weight", WeightTarget("mlp_norm.weight")
    if layer.attn.qk_norm is not None:
        yield "self_attn.q_norm.weight", WeightTarget("attn.qk_norm.q_weight")
        yield "self_attn.k_norm.weight", WeightTarget("attn.qk_norm.k_weight")
    yield from _projection(layer.attn.out, "attn.out", "self_attn.o_proj")
    yield from _projection(layer.mlp.down, "mlp.down", "mlp.down_proj")
    for part in ("q", "k", "v"):
        yield from _projection(layer.attn.qkv, "attn.qkv", f"self_attn.{part}_proj", part)
    for part in ("gate", "up"):
        yield from _projection(layer.mlp.gate_up, "mlp.gate_up", f"mlp.{part}_proj", part)


def _projection(layer: Linear, ours: str, theirs: str, part: str | None = None) -> Iterator[tuple[str, WeightTarget]]:
    rows = layer.rows(part) if isinstance(layer, FusedLinear) and part is not None else (None, None)
    for field in ("weight", "bias"):
        if getattr(layer, field) is not None:
            yield f"{theirs}.{field}", WeightTarget(f"{ours}.{field}", *rows)
