"""Define GPT-NeoX (Black et al. 2022, arXiv 2204.06745; Pythia, arXiv 2304.01373): attention and MLP of one residual
stream, a rotation of a part of each head, and q, k and v of each head side by side in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dovetail_models.grouped_heads import grouped_targets
from dovetail_models.layer_norm_model import LayerNormModel

if TYPE_CHECKING:
    from dovetail_models.decoder import Targets


class GPTNeoXModel(LayerNormModel):
    """Compute ``GPTNeoXForCausalLM``."""

    body = "gpt_neox."
    embed_name = "gpt_neox.embed_in"
    layers_name = "gpt_neox.layers"
    norm_name = "gpt_neox.final_layer_norm"
    head_name = "embed_out"

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        theirs, ours = checkpoint_prefix, parameter_prefix
        attn, head_dim = self.layer(index).attn, self.info.head_dim
        yield from self.norms(index, ("input_layernorm", "post_attention_layernorm"), theirs, ours)
        yield from grouped_targets(attn, head_dim, f"{theirs}.attention.query_key_value", f"{ours}.attn.qkv")
        yield from self.products(index, ("attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), theirs, ours)

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``. These are buffers of the first versions."""
        yield r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
        yield from super().ignored_weights()
