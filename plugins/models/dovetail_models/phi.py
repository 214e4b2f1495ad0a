"""Define Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, arXiv 2306.11644): attention and MLP of one norm, a rotation of
a part of each head, and a head with a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail_models.layer_norm_model import LayerNormModel

if TYPE_CHECKING:
    from dovetail_models.decoder import Targets


class PhiModel(LayerNormModel):
    """Compute ``PhiForCausalLM``."""

    norm_name = "model.final_layernorm"

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        theirs, ours = checkpoint_prefix, parameter_prefix
        yield from self.norms(index, ("input_layernorm", ""), theirs, ours)
        yield from self.projections(index, f"{theirs}.self_attn", ours)
        yield from self.products(index, ("self_attn.dense", "mlp.fc1", "mlp.fc2"), theirs, ours)
