"""Define a decoder layer of the Llama family and the names of its tensors in checkpoints, for target models and
drafters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.model import WeightTarget
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.latent import LatentAttention, LatentShape, latent_targets
from dovetail.layers.linear import Linear
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.layers.one_row import OneRow, one_row
from dovetail.layers.projection_norm import NormedProjections
from dovetail.layers.quantized import quantize_output
from dovetail.ops.parts import Summed

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.layers.experts import Experts
    from dovetail.layers.layer_norm import LayerNorm
    from dovetail.layers.rotary import Rotation
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch

Targets = Iterator[tuple[str, WeightTarget | list[WeightTarget]]]
"""Yield names in a checkpoint and the targets of their tensors."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Describe the sizes and variants of a whole decoder layer, with self-attention or latent attention. ``scale``
    multiplies the attention logits; by default it is ``head_dim ** -0.5``."""

    attention: AttentionShape | LatentShape
    intermediate_size: int
    norm_eps: float
    mlp_bias: bool = False
    scale: float | None = None


class DecoderLayer(Layer):
    """Compute pre-norm self-attention and a feed-forward layer: a gated MLP, unless ``mlp`` is given. ``index`` is the
    layer's index in the model and in the KV pool; for ``window`` see ``AttentionLayer``."""

    def __init__(
        self,
        shape: DecoderShape,
        index: int,
        mesh: Mesh,
        window: int | None = None,
        mlp: GatedMLP | Experts | None = None,
    ) -> None:
        super().__init__()
        hidden = shape.attention.hidden_size
        self.attn_norm: RMSNorm | LayerNorm = RMSNorm(hidden, shape.norm_eps)
        scale = shape.attention.head_dim**-0.5 if shape.scale is None else shape.scale
        constants = AttentionLayer(index, scale, window)
        self.attn: SelfAttention | LatentAttention
        if isinstance(shape.attention, LatentShape):
            self.attn = LatentAttention(shape.attention, constants, mesh)
        else:
            self.attn = SelfAttention(shape.attention, constants, mesh)
        self.mlp_norm: RMSNorm | LayerNorm = RMSNorm(hidden, shape.norm_eps)
        self.mlp = mlp or GatedMLP(hidden, shape.intermediate_size, mesh, bias=shape.mlp_bias)
        self._one_row: OneRow | None = None

    def connect(self) -> None:
        """See ``Layer.connect``."""
        quantize_output(self.attn_norm, self.attn.qkv if isinstance(self.attn, SelfAttention) else self.attn.qkv_a)
        if isinstance(self.mlp, GatedMLP):
            quantize_output(self.mlp_norm, self.mlp.gate_up)
        self._one_row = one_row(self.attn_norm, self.attn, self.mlp_norm, self.mlp)

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        self._one_row = None
        super().prepare()

    def enter(self, x: Addend, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of ``forward``, both ``[tokens, hidden_size]``: the norm of ``x + residual``, and that sum,
        which later layers do not change. Overwrites ``x`` with the sum, unless ``x`` is not a tensor. Without
        ``residual``, ``x`` itself is the sum. If ``OneRow`` computes the layer of one token, both are the sum: then ``forward``
        computes the norm.
        """
        if self._one_row is not None and self._one_row.takes(x, residual):
            total = x.total if isinstance(x, Summed) else x
            assert isinstance(total, torch.Tensor)
            return total, total
        return self.attn_norm.add_forward(x, residual)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[Addend, torch.Tensor]:
        """Compute the layer from what ``enter`` returns.

        Return what this layer adds, for ``enter`` of the next layer or for ``RMSNorm.add_forward``, and the residual
        stream before that is added. Both are ``[tokens, hidden_size]``; with ``last``, they have the rows of ``last``
        only (see ``SelfAttention.forward``).
        """
        one = self._one_row
        if one is not None and x is stream:  # `enter` left the norm of one token to `OneRow`
            assert last is None, "steps of one token are not narrowed"
            total = one.forward(stream, rotation, batch)
            return Summed(total), total
        added = self.attn.parts_forward(x, rotation, batch, last)
        if last is not None:
            assert batch.logit_rows is not None
            stream = stream.index_select(0, batch.logit_rows)
        x, stream = self.mlp_norm.add_forward(added, stream)
        return self.mlp.parts_forward(x), stream


def decoder_targets(
    layer: DecoderLayer, checkpoint_prefix: str, parameter_prefix: str, mlp_name: str = "mlp"
) -> Targets:
    """Yield the targets of the tensors of ``layer``, except those of experts. Names in the checkpoint begin with
    ``checkpoint_prefix``, those of the MLP with ``{checkpoint_prefix}.{mlp_name}``, parameters of the model with
    ``parameter_prefix``."""
    yield from layer.attn_norm.targets(f"{checkpoint_prefix}.input_layernorm", f"{parameter_prefix}.attn_norm")
    yield from layer.mlp_norm.targets(f"{checkpoint_prefix}.post_attention_layernorm", f"{parameter_prefix}.mlp_norm")
    yield from attention_targets(layer.attn, f"{checkpoint_prefix}.self_attn", f"{parameter_prefix}.attn")
    if isinstance(layer.mlp, GatedMLP):
        yield from mlp_targets(layer.mlp, f"{checkpoint_prefix}.{mlp_name}", f"{parameter_prefix}.mlp")


def attention_targets(attn: SelfAttention | LatentAttention, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
    """Yield the targets of ``decoder_targets`` that belong to attention."""
    if isinstance(attn, LatentAttention):
        yield from latent_targets(attn, checkpoint_prefix, parameter_prefix)
        return
    if attn.qk_norm is not None:
        yield from attn.qk_norm.targets(checkpoint_prefix, f"{parameter_prefix}.qk_norm", attn.order)
    if isinstance(attn.qkv, NormedProjections):
        yield from attn.qkv.norm_targets(checkpoint_prefix, f"{parameter_prefix}.qkv")
    if attn.sinks is not None:
        yield f"{checkpoint_prefix}.sinks", attn.sinks_target(f"{parameter_prefix}.sinks")
    for name, _ in linear_targets(attn.qkv, f"{checkpoint_prefix}.q_proj", f"{parameter_prefix}.qkv", "q"):
        yield name, attn.query_targets(f"{parameter_prefix}.qkv.{name.rpartition('.')[2]}")
    for part in ("k", "v"):
        yield from linear_targets(attn.qkv, f"{checkpoint_prefix}.{part}_proj", f"{parameter_prefix}.qkv", part)
    yield from linear_targets(attn.out, f"{checkpoint_prefix}.o_proj", f"{parameter_prefix}.out")


def mlp_targets(mlp: GatedMLP, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
    """Yield the targets of ``decoder_targets`` that belong to the MLP."""
    for part in ("gate", "up"):
        yield from linear_targets(mlp.gate_up, f"{checkpoint_prefix}.{part}_proj", f"{parameter_prefix}.gate_up", part)
    yield from linear_targets(mlp.down, f"{checkpoint_prefix}.down_proj", f"{parameter_prefix}.down")


def linear_targets(layer: Linear, checkpoint_prefix: str, parameter_prefix: str, part: str | None = None) -> Targets:
    """Yield the targets of the weight and bias of a linear layer, or of ``part`` of a fused one."""
    for field in ("weight", "bias"):
        if field == "weight" or getattr(layer, field) is not None:  # a quantization may have other names for a weight
            yield f"{checkpoint_prefix}.{field}", layer.target(f"{parameter_prefix}.{field}", part)
