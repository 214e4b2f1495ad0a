"""Define Jamba (arXiv 2403.19887): layers with Mamba mixers, and some with attention without positions; some have
experts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.decoder import attention_targets, mlp_targets
from dovetail.layers.experts import Experts
from dovetail.layers.mamba1 import Mamba1Mixer, Mamba1Shape
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.states import StateMixer
from dovetail_models.dense import layer_shape
from dovetail_models.hybrid import MixerLayer, earlier, state_group_of
from dovetail_models.moe import MoeModel

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail_models.decoder import Targets
    from dovetail_models.jamba_describe import JambaSizes


class JambaModel(MoeModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``JambaSizes``."""

    norm_name = "model.final_layernorm"

    def make_layer(self, index: int, mesh: Mesh) -> MixerLayer:
        """See ``DecoderModel``."""
        info = self.info
        config: JambaSizes = info.config
        hidden, place = info.hidden_size, earlier(config.states, index)
        shape = layer_shape(info).attention
        assert isinstance(shape, AttentionShape)
        if config.states[index]:
            sizes = dataclasses.asdict(config.mixer)
            mixer = Mamba1Mixer(Mamba1Shape(hidden_size=hidden, norm_eps=config.norm_eps, **sizes), place, mesh)
        else:
            mixer = SelfAttention(shape, AttentionLayer(place, info.head_dim**-0.5), mesh)
        experts = config.sparse[index]
        mlp = Experts(config.experts, mesh) if experts else GatedMLP(hidden, config.intermediate_size, mesh)
        return MixerLayer(hidden, config.norm_eps, mixer, mlp, state_group_of(info))

    def place_layers(self) -> None:
        """See ``DecoderModel``. ``make_layer`` has placed the layers."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, MixerLayer)
        yield from layer.norm.targets(f"{checkpoint_prefix}.input_layernorm", f"{parameter_prefix}.norm")
        yield from layer.mlp_norm.targets(f"{checkpoint_prefix}.pre_ff_layernorm", f"{parameter_prefix}.mlp_norm")
        if isinstance(layer.mixer, SelfAttention):
            yield from attention_targets(layer.mixer, f"{checkpoint_prefix}.self_attn", f"{parameter_prefix}.mixer")
        elif isinstance(layer.mixer, StateMixer):
            yield from layer.mixer.targets(f"{checkpoint_prefix}.mamba", f"{parameter_prefix}.mixer")
        theirs, ours = f"{checkpoint_prefix}.feed_forward", f"{parameter_prefix}.mlp"
        if isinstance(layer.mlp, GatedMLP):
            yield from mlp_targets(layer.mlp, theirs, ours)
        else:
            yield from self.experts_targets(layer.mlp, theirs, ours)
