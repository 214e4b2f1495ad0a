"""Define Granite 4: layers with Mamba-2 mixers, and some with attention, with the multipliers of Granite 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.decoder import attention_targets
from dovetail.layers.experts import Experts
from dovetail.layers.mamba import Mamba2Mixer
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.states import StateMixer
from dovetail_models.granite import GraniteMoeModel, shared_mlp_targets
from dovetail_models.hybrid import MixerLayer, earlier, mixer_shape, state_group_of
from dovetail_models.moe import moe_layer_shape

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail_models.decoder import Targets
    from dovetail_models.granite_hybrid_describe import GraniteHybridSizes


class GraniteHybridModel(GraniteMoeModel):
    """Compute ``GraniteMoeHybridForCausalLM``, with experts or without."""

    def make_layer(self, index: int, mesh: Mesh) -> MixerLayer:
        """See ``DecoderModel``."""
        info, config = self.info, self._config
        shape, place = self.multiplied(moe_layer_shape(info)), earlier(config.states, index)
        assert isinstance(shape.attention, AttentionShape)
        assert shape.scale is not None
        if config.states[index]:
            mixer = Mamba2Mixer(mixer_shape(info), place, mesh)
        else:
            mixer = SelfAttention(shape.attention, AttentionLayer(place, shape.scale), mesh)
        mlp = (
            Experts(config.experts, mesh)
            if config.sparse[index]
            else GatedMLP(info.hidden_size, config.intermediate_size, mesh)
        )
        return MixerLayer(info.hidden_size, shape.norm_eps, mixer, mlp, state_group_of(info))

    def place_layers(self) -> None:
        """See ``DecoderModel``. ``make_layer`` has placed the layers."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer, ours = self.layers[index], f"{parameter_prefix}.mlp"
        assert isinstance(layer, MixerLayer)
        yield from layer.norm.targets(f"{checkpoint_prefix}.input_layernorm", f"{parameter_prefix}.norm")
        yield from layer.mlp_norm.targets(
            f"{checkpoint_prefix}.post_attention_layernorm", f"{parameter_prefix}.mlp_norm"
        )
        if isinstance(layer.mixer, SelfAttention):
            yield from attention_targets(layer.mixer, f"{checkpoint_prefix}.self_attn", f"{parameter_prefix}.mixer")
        elif isinstance(layer.mixer, StateMixer):
            yield from layer.mixer.targets(f"{checkpoint_prefix}.mamba", f"{parameter_prefix}.mixer")
        if isinstance(layer.mlp, GatedMLP):
            yield from shared_mlp_targets(layer.mlp, checkpoint_prefix, ours)
            return
        yield from self.experts_targets(layer.mlp, f"{checkpoint_prefix}.{self._config.names.layer}", ours)
        assert layer.mlp.shared is not None
        yield from shared_mlp_targets(layer.mlp.shared, checkpoint_prefix, f"{ours}.shared")

    @property
    def _config(self) -> GraniteHybridSizes:
        return self.info.config
