"""Define OLMo 2 (arXiv 2501.00656) and OLMo 3: norms after attention and MLP only, and norms over all queries and over all
keys. OLMo 3 has layers with a window, which are rotated without stretching."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.attention import SelfAttention
from dovetail.layers.decoder import mlp_targets
from dovetail.layers.mlp import GatedMLP
from dovetail_models.blocks import PostNormLayer, norm_and_attention_targets
from dovetail_models.decoder import DecoderModel, attention_sizes

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail_models.decoder import Targets
    from dovetail_models.olmo_describe import OlmoConfig


NORMS = {"post_attn_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}


class OlmoModel(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is an ``OlmoConfig``."""

    def make_layer(self, index: int, mesh: Mesh) -> PostNormLayer:
        """See ``DecoderModel``."""
        info = self.info
        config: OlmoConfig = info.config
        shape = replace(
            attention_sizes(info),
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            qk_norm_eps=config.norm_eps,
            qk_norm_across_heads=True,
        )
        attn = SelfAttention(shape, AttentionLayer(index, info.head_dim**-0.5, config.windows[index]), mesh)
        mlp = GatedMLP(info.hidden_size, config.intermediate_size, mesh)
        return PostNormLayer(attn, mlp, self.make_norm(), self.make_norm())

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, PostNormLayer)
        yield from norm_and_attention_targets(layer, NORMS, checkpoint_prefix, parameter_prefix)
        yield from mlp_targets(layer.mlp, f"{checkpoint_prefix}.mlp", f"{parameter_prefix}.mlp")
