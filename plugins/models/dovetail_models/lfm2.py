"""Define LFM2: layers with gated short convolutions, and some with attention and norms over heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.model import WeightTarget
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.decoder import linear_targets
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.short_conv import GatedShortConv
from dovetail.layers.states import StateMixer
from dovetail_models.decoder import DecoderModel
from dovetail_models.dense import layer_shape
from dovetail_models.hybrid import MixerLayer, earlier, state_group_of

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail_models.decoder import Targets
    from dovetail_models.lfm2_describe import Lfm2Sizes


class Lfm2Model(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is an ``Lfm2Sizes``."""

    norm_name = "model.embedding_norm"

    def make_layer(self, index: int, mesh: Mesh) -> MixerLayer:
        """See ``DecoderModel``."""
        info = self.info
        config: Lfm2Sizes = info.config
        hidden, place = info.hidden_size, earlier(config.states, index)
        shape = layer_shape(info).attention
        assert isinstance(shape, AttentionShape)
        if config.states[index]:
            mixer = GatedShortConv(hidden, config.conv_width, place, mesh, bias=config.conv_bias)
        else:
            mixer = SelfAttention(shape, AttentionLayer(place, info.head_dim**-0.5), mesh)
        mlp = GatedMLP(hidden, config.intermediate_size, mesh)
        return MixerLayer(hidden, config.norm_eps, mixer, mlp, state_group_of(info))

    def place_layers(self) -> None:
        """See ``DecoderModel``. ``make_layer`` has placed the layers."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer, mixer = self.layers[index], f"{parameter_prefix}.mixer"
        assert isinstance(layer, MixerLayer)
        yield from layer.norm.targets(f"{checkpoint_prefix}.operator_norm", f"{parameter_prefix}.norm")
        yield from layer.mlp_norm.targets(f"{checkpoint_prefix}.ffn_norm", f"{parameter_prefix}.mlp_norm")
        if isinstance(layer.mixer, SelfAttention):
            theirs = f"{checkpoint_prefix}.self_attn"
            for part in ("q", "k", "v"):
                yield from linear_targets(layer.mixer.qkv, f"{theirs}.{part}_proj", f"{mixer}.qkv", part)
            yield from linear_targets(layer.mixer.out, f"{theirs}.out_proj", f"{mixer}.out")
            for part in ("q", "k"):
                yield f"{theirs}.{part}_layernorm.weight", WeightTarget(f"{mixer}.qk_norm.{part}_weight")
        elif isinstance(layer.mixer, StateMixer):
            yield from layer.mixer.targets(f"{checkpoint_prefix}.conv", mixer)
        assert isinstance(layer.mlp, GatedMLP)
        theirs, ours = f"{checkpoint_prefix}.feed_forward", f"{parameter_prefix}.mlp"
        for name, part in (("w1", "gate"), ("w3", "up")):
            yield from linear_targets(layer.mlp.gate_up, f"{theirs}.{name}", f"{ours}.gate_up", part)
        yield from linear_targets(layer.mlp.down, f"{theirs}.w2", f"{ours}.down")
