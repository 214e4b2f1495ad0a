"""Define Bamba (2024): layers with Mamba-2 mixers, some with attention, each with an MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.decoder import attention_targets, mlp_targets
from dovetail.layers.mamba import Mamba2Mixer
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.states import StateMixer
from dovetail_models.decoder import DecoderModel
from dovetail_models.dense import layer_shape
from dovetail_models.hybrid import MixerLayer, earlier, mixer_shape, state_group_of

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail_models.bamba_describe import BambaSizes
    from dovetail_models.decoder import Targets


class BambaModel(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``BambaSizes``."""

    norm_name = "model.final_layernorm"

    def make_layer(self, index: int, mesh: Mesh) -> MixerLayer:
        """See ``DecoderModel``."""
        info = self.info
        config: BambaSizes = info.config
        place = earlier(config.states, index)
        if config.states[index]:
            mixer = Mamba2Mixer(mixer_shape(info), place, mesh)
        else:
            shape = layer_shape(info).attention
            assert isinstance(shape, AttentionShape)
            mixer = SelfAttention(shape, AttentionLayer(place, info.head_dim**-0.5), mesh)
        mlp = GatedMLP(info.hidden_size, config.intermediate_size, mesh, bias=config.mlp_bias)
        return MixerLayer(info.hidden_size, config.norm_eps, mixer, mlp, state_group_of(info))

    def place_layers(self) -> None:
        """See ``DecoderModel``. ``make_layer`` has placed the layers."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer, theirs, ours = self.layers[index], checkpoint_prefix, parameter_prefix
        assert isinstance(layer, MixerLayer)
        assert isinstance(layer.mlp, GatedMLP)
        yield from layer.norm.targets(f"{theirs}.input_layernorm", f"{ours}.norm")
        yield from layer.mlp_norm.targets(f"{theirs}.pre_ff_layernorm", f"{ours}.mlp_norm")
        if isinstance(layer.mixer, SelfAttention):
            yield from attention_targets(layer.mixer, f"{theirs}.self_attn", f"{ours}.mixer")
        elif isinstance(layer.mixer, StateMixer):
            yield from layer.mixer.targets(f"{theirs}.mamba", f"{ours}.mixer")
        yield from mlp_targets(layer.mlp, f"{theirs}.feed_forward", f"{ours}.mlp")
