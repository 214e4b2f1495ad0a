"""Define Nemotron-H (arXiv 2504.03624): layers of one norm and a Mamba-2 mixer, attention without positions, or an MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.decoder import attention_targets, linear_targets
from dovetail.layers.mamba import Mamba2Mixer
from dovetail.layers.mlp import MLP
from dovetail_models.dense import layer_shape
from dovetail_models.hybrid import OnePartLayer, earlier, mixer_shape
from dovetail_models.mamba2 import Mamba2Model

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail_models.decoder import Targets
    from dovetail_models.nemotron_h_describe import NemotronHSizes


class NemotronHModel(Mamba2Model):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``NemotronHSizes``."""

    def make_layer(self, index: int, mesh: Mesh) -> OnePartLayer:
        """See ``DecoderModel``."""
        info = self.info
        config: NemotronHSizes = info.config
        place, kind = earlier(config.kinds, index), config.kinds[index]
        if kind == "mamba":
            part = Mamba2Mixer(mixer_shape(info), place, mesh)
        elif kind == "attention":
            shape = layer_shape(info).attention
            assert isinstance(shape, AttentionShape)
            part = SelfAttention(shape, AttentionLayer(place, info.head_dim**-0.5), mesh)
        else:
            part = MLP(info.hidden_size, config.intermediate_size, mesh, config.activation, bias=config.mlp_bias)
        group = sum(each.kind is not CacheGroupKind.STATE for each in info.cache_groups)
        return OnePartLayer(info.hidden_size, config.norm_eps, part, group)

    def place_layers(self) -> None:
        """See ``DecoderModel``. ``make_layer`` has placed the layers."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer, theirs, ours = self.layers[index], f"{checkpoint_prefix}.mixer", f"{parameter_prefix}.mixer"
        assert isinstance(layer, OnePartLayer)
        yield from layer.norm.targets(f"{checkpoint_prefix}.norm", f"{parameter_prefix}.norm")
        if isinstance(layer.mixer, SelfAttention):
            yield from attention_targets(layer.mixer, theirs, ours)
        elif isinstance(layer.mixer, MLP):
            yield from linear_targets(layer.mixer.up, f"{theirs}.up_proj", f"{ours}.up", "up")
            yield from linear_targets(layer.mixer.down, f"{theirs}.down_proj", f"{ours}.down")
        else:
            yield from layer.mixer.targets(theirs, ours)
