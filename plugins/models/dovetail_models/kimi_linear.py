"""Define Kimi Linear (arXiv 2510.26692): most layers are Kimi delta attention, which keeps states, and some attend over latents
without positions. Layers have experts, except for the first ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.decoder import attention_targets, mlp_targets
from dovetail.layers.experts import Experts
from dovetail.layers.kimi_delta import KimiDeltaAttention, KimiDeltaShape
from dovetail.layers.latent import LatentAttention, LatentShape
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.states import StateMixer
from dovetail_models.deepseek import latent_layer_shape
from dovetail_models.hybrid import MixerLayer, earlier, state_group_of
from dovetail_models.moe import MoeModel

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail_models.decoder import Targets
    from dovetail_models.kimi_linear_describe import KimiLinearSizes


class KimiLinearModel(MoeModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``KimiLinearSizes``."""

    def make_layer(self, index: int, mesh: Mesh) -> MixerLayer:
        """See ``DecoderModel``."""
        info = self.info
        config: KimiLinearSizes = info.config
        hidden, eps, place = info.hidden_size, config.norm_eps, earlier(config.states, index)
        if config.states[index]:
            sizes = KimiDeltaShape(hidden, config.linear_heads, config.linear_head_dim, config.conv_width, eps)
            mixer = KimiDeltaAttention(sizes, place, mesh)
        else:
            shape = latent_layer_shape(info).attention
            assert isinstance(shape, LatentShape)
            mixer = LatentAttention(shape, AttentionLayer(place, config.latent.scale), mesh)
        experts = config.sparse[index]
        mlp = Experts(config.experts, mesh) if experts else GatedMLP(hidden, config.intermediate_size, mesh)
        return MixerLayer(hidden, eps, mixer, mlp, state_group_of(info))

    def place_layers(self) -> None:
        """See ``DecoderModel``. ``make_layer`` has placed the layers."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer, theirs, ours = self.layers[index], checkpoint_prefix, parameter_prefix
        assert isinstance(layer, MixerLayer)
        yield from layer.norm.targets(f"{theirs}.input_layernorm", f"{ours}.norm")
        yield from layer.mlp_norm.targets(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm")
        if isinstance(layer.mixer, StateMixer):
            yield from layer.mixer.targets(f"{theirs}.self_attn", f"{ours}.mixer")
        else:
            yield from attention_targets(layer.mixer, f"{theirs}.self_attn", f"{ours}.mixer")
        if isinstance(layer.mlp, GatedMLP):
            yield from mlp_targets(layer.mlp, f"{theirs}.{self.info.config.dense_name}", f"{ours}.mlp")
        else:
            yield from self.experts_targets(layer.mlp, f"{theirs}.{self.info.config.names.layer}", f"{ours}.mlp")
