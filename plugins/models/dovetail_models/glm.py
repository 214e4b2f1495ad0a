"""Define GLM-4: GLM-4-9B (arXiv 2406.12793) has Llama's layers, GLM-4-0414 norms around attention and MLP. Both rotate
pairs in the first half of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.attention import SelfAttention
from dovetail.layers.decoder import DecoderLayer, DecoderShape, linear_targets
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.transforms import SplitHalves
from dovetail_models.blocks import SandwichLayer, SandwichNorms, norm_and_attention_targets
from dovetail_models.decoder import DecoderModel, attention_sizes

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail_models.decoder import Targets
    from dovetail_models.glm_describe import GlmDecoderConfig

NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {**NORMS, "post_attn_norm": "post_self_attn_layernorm", "post_mlp_norm": "post_mlp_layernorm"}


class GlmModel(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``GlmDecoderConfig``."""

    def make_layer(self, index: int, mesh: Mesh) -> DecoderLayer | SandwichLayer:
        """See ``DecoderModel``."""
        info = self.info
        config: GlmDecoderConfig = info.config
        assert config.rope is not None
        shape = replace(
            attention_sizes(info),
            qkv_bias=config.attention_bias,
            order=SplitHalves(info.head_dim, config.rope.rotary_dim, pairs=True),
        )
        if not config.sandwich:
            return DecoderLayer(DecoderShape(shape, config.intermediate_size, config.norm_eps), index, mesh)
        attn = SelfAttention(shape, AttentionLayer(index, info.head_dim**-0.5), mesh)
        mlp = GatedMLP(info.hidden_size, config.intermediate_size, mesh)
        return SandwichLayer(attn, mlp, SandwichNorms(*(self.make_norm() for _ in range(4))))

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer | SandwichLayer)
        norms = SANDWICH_NORMS if self.info.config.sandwich else NORMS
        yield from norm_and_attention_targets(layer, norms, checkpoint_prefix, parameter_prefix)
        assert isinstance(layer.mlp, GatedMLP)
        fused = layer.mlp.gate_up.fused_targets(f"{parameter_prefix}.mlp.gate_up.weight")
        yield f"{checkpoint_prefix}.mlp.gate_up_proj.weight", fused
        yield from linear_targets(layer.mlp.down, f"{checkpoint_prefix}.mlp.down_proj", f"{parameter_prefix}.mlp.down")
