"""Define decoder layers of LayerNorm, self-attention and an MLP without a gate, for GPT-2, GPT-NeoX and their relatives,
and the base class of their models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.attention import SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.decoder import linear_targets
from dovetail.layers.layer_norm import LayerNorm
from dovetail.layers.mlp import MLP, GatedMLP
from dovetail.layers.transforms import SplitHalves
from dovetail.ops.parts import sum_addends
from dovetail_models.blocks import last_rows
from dovetail_models.decoder import DecoderModel, attention_sizes

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo
    from dovetail.layers.attention import AttentionShape
    from dovetail.layers.rotary import Rotation
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch
    from dovetail_models.decoder import Targets
    from dovetail_models.layer_norm_describe import LayerNormConfig


class LayerNormLayer(Layer):
    """Compute attention and then an MLP, each after its own norm. See ``decoder.Block``."""

    def __init__(self, info: ModelInfo, index: int, mesh: Mesh) -> None:
        super().__init__()
        config: LayerNormConfig = info.config
        hidden, eps = info.hidden_size, config.norm_eps
        self.attn_norm = LayerNorm(hidden, eps, bias=config.norm_bias)
        constants = AttentionLayer(index, config.scales[index], config.windows[index])
        self.attn = SelfAttention(_attention_shape(info), constants, mesh)
        self.mlp_norm = LayerNorm(hidden, eps, bias=config.norm_bias) if config.mlp_norm else None
        sizes = hidden, config.intermediate_size, mesh
        if config.gated:
            self.mlp = GatedMLP(*sizes, bias=config.mlp_bias)
        else:
            self.mlp = MLP(*sizes, config.activation, bias=config.mlp_bias)

    def enter(self, x: Addend, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``decoder.Block``."""
        return self.attn_norm.add_forward(x, residual)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[Addend, torch.Tensor]:
        """See ``decoder.Block``."""
        added = self.attn.parts_forward(x, rotation, batch, last)
        assert self.mlp_norm is not None
        x, stream = self.mlp_norm.add_forward(added, last_rows(stream, batch, last))
        return self.mlp.parts_forward(x), stream


class ParallelLayer(LayerNormLayer):
    """Compute attention and an MLP of the same residual stream, with a norm each or with one for both."""

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[Addend, torch.Tensor]:
        """See ``decoder.Block``."""
        added = self.attn.parts_forward(x, rotation, batch, last)
        stream = last_rows(stream, batch, last)
        x = last_rows(x, batch, last) if self.mlp_norm is None else self.mlp_norm.forward(stream)
        return sum_addends(added, self.mlp.parts_forward(x)), stream


def _attention_shape(info: ModelInfo) -> AttentionShape:
    """Return the shape of the attention of each layer."""
    config: LayerNormConfig = info.config
    rope = config.rope
    order = None
    if rope is not None and (config.rotated_pairs or rope.partial_dim):
        order = SplitHalves(info.head_dim, rope.rotary_dim, config.rotated_pairs)
    return replace(
        attention_sizes(info),
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        order=order,
    )


class LayerNormModel(DecoderModel):
    """Compute a model of ``LayerNormLayer`` or ``ParallelLayer`` whose ``config`` is a ``LayerNormConfig``. Its final norm is a
    LayerNorm."""

    def make_layer(self, index: int, mesh: Mesh) -> LayerNormLayer:
        """See ``DecoderModel``."""
        kind = ParallelLayer if self.info.config.parallel else LayerNormLayer
        return kind(self.info, index, mesh)

    def make_norm(self) -> LayerNorm:
        """See ``DecoderModel``."""
        return LayerNorm(self.info.hidden_size, self.info.config.norm_eps, bias=self.info.config.norm_bias)

    def norms(self, index: int, names: tuple[str, str], theirs: str, ours: str) -> Targets:
        """Yield the targets of the norms of layer ``index`` before attention and, if it has its own, before the MLP.
        ``names`` are their names in the checkpoint, within ``theirs``."""
        layer = self.layer(index)
        yield from layer.attn_norm.targets(f"{theirs}.{names[0]}", f"{ours}.attn_norm")
        if layer.mlp_norm is not None:
            yield from layer.mlp_norm.targets(f"{theirs}.{names[1]}", f"{ours}.mlp_norm")

    def products(self, index: int, names: tuple[str, str, str], theirs: str, ours: str) -> Targets:
        """Yield the targets of the output projection of attention and of both products of an MLP without a gate."""
        layer = self.layer(index)
        assert isinstance(layer.mlp, MLP)
        yield from linear_targets(layer.attn.out, f"{theirs}.{names[0]}", f"{ours}.attn.out")
        yield from linear_targets(layer.mlp.up, f"{theirs}.{names[1]}", f"{ours}.mlp.up", "up")
        yield from linear_targets(layer.mlp.down, f"{theirs}.{names[2]}", f"{ours}.mlp.down")

    def projections(self, index: int, prefix: str, ours: str) -> Targets:
        """Yield the targets of q, k and v, which are ``{prefix}.q_proj`` and so on in the checkpoint."""
        for part in ("q", "k", "v"):
            yield from linear_targets(self.layer(index).attn.qkv, f"{prefix}.{part}_proj", f"{ours}.attn.qkv", part)

    def layer(self, index: int) -> LayerNormLayer:
        """Return layer ``index``."""
        layer = self.layers[index]
        assert isinstance(layer, LayerNormLayer)
        return layer
