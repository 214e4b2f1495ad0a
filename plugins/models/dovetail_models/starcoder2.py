"""Define StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): LayerNorm, an MLP without a gate, and one sliding window
for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail_models.layer_norm_model import LayerNormModel

if TYPE_CHECKING:
    from dovetail_models.decoder import Targets


class Starcoder2Model(LayerNormModel):
    """Compute ``Starcoder2ForCausalLM``."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        theirs, ours = checkpoint_prefix, parameter_prefix
        yield from self.norms(index, ("input_layernorm", "post_attention_layernorm"), theirs, ours)
        yield from self.projections(index, f"{theirs}.self_attn", ours)
        yield from self.products(index, ("self_attn.o_proj", "mlp.c_fc", "mlp.c_proj"), theirs, ours)
