"""Define StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): LayerNorm, an MLP without a gate, and one sliding window
for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.layers.decoder import attention_targets, linear_targets
from dovetail_models.plain_layers import PlainModel

if TYPE_CHECKING:
    from dovetail_models.decoder import Targets


class Starcoder2Model(PlainModel):
    """Compute ``Starcoder2ForCausalLM``."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layer(index)
        theirs, ours = checkpoint_prefix, parameter_prefix
        assert layer.mlp_norm is not None
        yield from layer.attn_norm.targets(f"{theirs}.input_layernorm", f"{ours}.attn_norm")
        yield from layer.mlp_norm.targets(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm")
        yield from attention_targets(layer.attn, f"{theirs}.self_attn", f"{ours}.attn")
        yield from linear_targets(layer.mlp.up, f"{theirs}.mlp.c_fc", f"{ours}.mlp.up", "up")
        yield from linear_targets(layer.mlp.down, f"{theirs}.mlp.c_proj", f"{ours}.mlp.down")
