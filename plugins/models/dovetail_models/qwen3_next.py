"""Define Qwen3-Next and Qwen3.5: most layers are gated delta nets, every fourth one attends, and gates what it attends to.
Norms multiply by one plus their weight. Layers have experts, except in the dense models of Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.decoder import attention_targets, mlp_targets
from dovetail.layers.delta_net import DeltaNetShape, GatedDeltaNet
from dovetail.layers.experts import Experts
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail_models.hybrid import MixerLayer, earlier, state_group_of
from dovetail_models.moe import MoeModel, moe_layer_shape

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo
    from dovetail_models.decoder import Targets
    from dovetail_models.qwen3_next_describe import HybridMoeConfig


class Qwen3NextModel(MoeModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``HybridMoeConfig``."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        if info.config.multimodal:
            self.embed_name, self.layers_name, self.norm_name = (
                f"model.language_model.{name}" for name in ("embed_tokens", "layers", "norm")
            )
        super().__init__(info, mesh)

    def make_layer(self, index: int, mesh: Mesh) -> MixerLayer:
        """See ``DecoderModel``."""
        info, config = self.info, self.info.config
        mlp = (
            Experts(config.experts, mesh)
            if config.sparse[index]
            else GatedMLP(info.hidden_size, config.intermediate_size, mesh)
        )
        mixer = self._mixer(index, mesh)
        return MixerLayer(info.hidden_size, config.norm_eps, mixer, mlp, state_group_of(info), plus_one=True)

    def _mixer(self, index: int, mesh: Mesh) -> GatedDeltaNet | SelfAttention:
        info = self.info
        config: HybridMoeConfig = info.config
        own = earlier(config.linear, index)
        if config.linear[index]:
            shape = DeltaNetShape(info.hidden_size, config.delta, config.conv_width, config.norm_eps, config.by_head)
            return GatedDeltaNet(shape, own, mesh)
        attention = moe_layer_shape(info).attention
        assert isinstance(attention, AttentionShape)
        gated = replace(attention, gated=True, norm_plus_one=True)
        return SelfAttention(gated, AttentionLayer(own, info.head_dim**-0.5), mesh)

    def place_layers(self) -> None:
        """See ``DecoderModel``. ``make_layer`` has placed the layers."""

    def make_norm(self) -> RMSNorm:
        """See ``DecoderModel``."""
        return RMSNorm(self.info.hidden_size, self.info.config.norm_eps, plus_one=True)

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer, mlp = self.layers[index], f"{checkpoint_prefix}.mlp"
        assert isinstance(layer, MixerLayer)
        yield from layer.norm.targets(f"{checkpoint_prefix}.input_layernorm", f"{parameter_prefix}.norm")
        yield from layer.mlp_norm.targets(
            f"{checkpoint_prefix}.post_attention_layernorm", f"{parameter_prefix}.mlp_norm"
        )
        if isinstance(layer.mixer, SelfAttention):
            yield from attention_targets(layer.mixer, f"{checkpoint_prefix}.self_attn", f"{parameter_prefix}.mixer")
        elif isinstance(layer.mixer, GatedDeltaNet):
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
