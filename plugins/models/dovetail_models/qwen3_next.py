"""Define Qwen3-Next and Qwen3.5: most layers are gated delta nets, every fourth one attends, and gates what it attends to.
Norms multiply by one plus their weight. Layers have experts, except in the dense models of Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.decoder import attention_targets, mlp_targets
from dovetail.layers.delta_net import DeltaNetShape, GatedDeltaNet
from dovetail.layers.experts import Experts
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.layers.quantized import quantize_output
from dovetail.layers.states import step_states
from dovetail_models.moe import MoeModel, moe_layer_shape

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo
    from dovetail.layers.rotary import Rotation
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch
    from dovetail_models.decoder import Targets
    from dovetail_models.qwen3_next_describe import HybridMoeConfig


class HybridLayer(Layer):
    """Compute a norm and attention or a gated delta net, and a norm and a feed-forward layer. ``group`` is the cache group of
    a gated delta net."""

    def __init__(
        self, info: ModelInfo, mixer: SelfAttention | GatedDeltaNet, mlp: GatedMLP | Experts, group: int
    ) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(info.hidden_size, info.config.norm_eps, plus_one=True)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(info.hidden_size, info.config.norm_eps, plus_one=True)
        self.mlp = mlp
        self._group = group

    def connect(self) -> None:
        """See ``Layer.connect``."""
        if isinstance(self.mixer, SelfAttention):
            quantize_output(self.attn_norm, self.mixer.qkv)
        if isinstance(self.mlp, GatedMLP):
            quantize_output(self.mlp_norm, self.mlp.gate_up)

    def enter(self, x: Addend, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Block``."""
        if residual is not None:
            return self.attn_norm.add_forward(x, residual)
        assert isinstance(x, torch.Tensor)
        return self.attn_norm.forward(x), x

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[Addend, torch.Tensor]:
        """See ``Block``."""
        rows = None if last is None else batch.logit_rows
        if isinstance(self.mixer, SelfAttention):
            added = self.mixer.parts_forward(x, rotation, batch, last)
        else:
            added = self.mixer.parts_forward(x, step_states(batch, self._group), rows)
        if rows is not None:
            stream = stream.index_select(0, rows)
        x, stream = self.mlp_norm.add_forward(added, stream)
        return self.mlp.parts_forward(x), stream


class Qwen3NextModel(MoeModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``HybridMoeConfig``."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        if info.config.multimodal:
            self.embed_name, self.layers_name, self.norm_name = (
                f"model.language_model.{name}" for name in ("embed_tokens", "layers", "norm")
            )
        super().__init__(info, mesh)

    def make_layer(self, index: int, mesh: Mesh) -> HybridLayer:
        """See ``DecoderModel``."""
        info = self.info
        config: HybridMoeConfig = info.config
        kinds = [group.kind for group in info.cache_groups]
        earlier = config.linear[:index].count(config.linear[index])  # the layer's index within its cache group
        mlp = (
            Experts(config.experts, mesh)
            if config.sparse[index]
            else GatedMLP(info.hidden_size, config.intermediate_size, mesh)
        )
        if config.linear[index]:
            shape = DeltaNetShape(info.hidden_size, config.delta, config.conv_width, config.norm_eps, config.by_head)
            return HybridLayer(info, GatedDeltaNet(shape, earlier, mesh), mlp, kinds.index(CacheGroupKind.STATE))
        attention = moe_layer_shape(info).attention
        assert isinstance(attention, AttentionShape)
        shape = replace(attention, gated=True, norm_plus_one=True)
        constants = AttentionLayer(earlier, info.head_dim**-0.5)
        return HybridLayer(info, SelfAttention(shape, constants, mesh), mlp, kinds.index(CacheGroupKind.FULL))

    def place_layers(self) -> None:
        """See ``DecoderModel``. ``make_layer`` has placed the layers."""

    def make_norm(self) -> RMSNorm:
        """See ``DecoderModel``."""
        return RMSNorm(self.info.hidden_size, self.info.config.norm_eps, plus_one=True)

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer, mlp = self.layers[index], f"{checkpoint_prefix}.mlp"
        assert isinstance(layer, HybridLayer)
        yield from layer.attn_norm.targets(f"{checkpoint_prefix}.input_layernorm", f"{parameter_prefix}.attn_norm")
        yield from layer.mlp_norm.targets(
            f"{checkpoint_prefix}.post_attention_layernorm", f"{parameter_prefix}.mlp_norm"
        )
        if isinstance(layer.mixer, SelfAttention):
            yield from attention_targets(layer.mixer, f"{checkpoint_prefix}.self_attn", f"{parameter_prefix}.mixer")
        else:
            yield from layer.mixer.targets(f"{checkpoint_prefix}.linear_attn", f"{parameter_prefix}.mixer")
        if isinstance(layer.mlp, GatedMLP):
            yield from mlp_targets(layer.mlp, mlp, f"{parameter_prefix}.mlp")
        else:
            yield from self.experts_targets(layer.mlp, mlp, f"{parameter_prefix}.mlp")

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``. Nothing reads the tensors for images."""
        yield from super().ignored_weights()
        if self.info.config.multimodal:
            yield r"model\.visual\..+"
        yield r"mtp\..+"
