"""Define Mamba-2 (arXiv 2405.21060): layers of a norm and a mixer with states, without attention and MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.layers.mamba import Mamba2Mixer
from dovetail_models.decoder import DecoderModel
from dovetail_models.hybrid import OnePartLayer, mixer_shape, state_group_of

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail_models.decoder import Targets


class Mamba2Model(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``Mamba2Settings``. The residual stream has the model's
    dtype, whatever ``residual_in_fp32`` is."""

    embed_name = "backbone.embeddings"
    layers_name = "backbone.layers"
    norm_name = "backbone.norm_f"
    body = "backbone."

    def make_layer(self, index: int, mesh: Mesh) -> OnePartLayer:
        """See ``DecoderModel``."""
        mixer = Mamba2Mixer(mixer_shape(self.info), index, mesh)
        return OnePartLayer(self.info.hidden_size, self.info.config.norm_eps, mixer, state_group_of(self.info))

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, OnePartLayer)
        assert isinstance(layer.mixer, Mamba2Mixer)
        yield from layer.norm.targets(f"{checkpoint_prefix}.norm", f"{parameter_prefix}.norm")
        yield from layer.mixer.targets(f"{checkpoint_prefix}.mixer", f"{parameter_prefix}.mixer")
