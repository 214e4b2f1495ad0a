"""Define StableLM 2 (Bellagente et al. 2024, arXiv 2402.17834): Llama's layers with LayerNorm, and a rotation of a part of
each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.layers.decoder import linear_targets, mlp_targets
from dovetail.layers.mlp import GatedMLP
from dovetail_models.layer_norm_model import LayerNormModel

if TYPE_CHECKING:
    from dovetail_models.decoder import Targets


class StableLmModel(LayerNormModel):
    """Compute ``StableLmForCausalLM``."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        theirs, ours = checkpoint_prefix, parameter_prefix
        layer = self.layer(index)
        assert isinstance(layer.mlp, GatedMLP)
        yield from self.norms(index, ("input_layernorm", "post_attention_layernorm"), theirs, ours)
        yield from self.projections(index, f"{theirs}.self_attn", ours)
        yield from linear_targets(layer.attn.out, f"{theirs}.self_attn.o_proj", f"{ours}.attn.out")
        yield from mlp_targets(layer.mlp, f"{theirs}.mlp", f"{ours}.mlp")
