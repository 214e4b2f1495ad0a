"""Define Falcon (Almazrouei et al. 2023, arXiv 2311.16867): attention and MLP in parallel, after one norm or two, and
fused projections in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dovetail_models.grouped_heads import grouped_targets
from dovetail_models.layer_norm_model import LayerNormModel

if TYPE_CHECKING:
    from dovetail_models.decoder import Targets


class FalconModel(LayerNormModel):
    """Compute ``FalconForCausalLM`` with rotary positions."""

    body = "transformer."
    embed_name = "transformer.word_embeddings"
    layers_name = "transformer.h"
    norm_name = "transformer.ln_f"

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        theirs, ours = checkpoint_prefix, parameter_prefix
        config, attn = self.info.config, self.layer(index).attn
        both = config.parallel and config.mlp_norm
        names = ("ln_attn", "ln_mlp") if both else ("input_layernorm", "post_attention_layernorm")
        yield from self.norms(index, names, theirs, ours)
        fused = f"{theirs}.self_attention.query_key_value"
        yield from grouped_targets(attn, self.info.head_dim, fused, f"{ours}.attn.qkv")
        products = ("self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        yield from self.products(index, products, theirs, ours)

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``. These are buffers of the first versions."""
        yield r"(transformer\.)?h\.\d+\.self_attention\.rotary_emb\.inv_freq"
        yield from super().ignored_weights()
