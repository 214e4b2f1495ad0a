"""Define the dense Llama family: pre-norm decoder layers of self-attention and a gated MLP, with rotary positions.

Llama 2 (arXiv 2307.09288), Llama 3 (2407.21783), Mistral (2310.06825), Qwen2 (2407.10671), MiMo (2505.07608), Qwen3
(2505.09388).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.layers.decoder import DecoderLayer, DecoderShape, decoder_targets
from dovetail.layers.transforms import SplitHalves
from dovetail_models.decoder import DecoderModel, attention_sizes

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo
    from dovetail_models.decoder import Targets
    from dovetail_models.dense_describe import DenseConfig


class DenseModel(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``DenseConfig``."""

    def make_layer(self, index: int, mesh: Mesh) -> DecoderLayer:
        """See ``DecoderModel``."""
        return DecoderLayer(layer_shape(self.info), index, mesh, self.info.config.windows[index])

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer)
        return decoder_targets(layer, checkpoint_prefix, parameter_prefix)


def layer_shape(info: ModelInfo) -> DecoderShape:
    """Return the shape of each layer of a model whose ``config`` is a ``DenseConfig``."""
    config: DenseConfig = info.config
    rope = config.rope
    attention = replace(
        attention_sizes(info),
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
        order=SplitHalves(info.head_dim, rope.rotary_dim) if rope is not None and rope.partial_dim else None,
    )
    return DecoderShape(attention, config.intermediate_size, config.norm_eps, config.mlp_bias)
