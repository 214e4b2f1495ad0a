"""Define GPT-J (Wang and Komatsuzaki 2021): attention and MLP of one norm, pairs of a part of each head rotated, and a
head with a bias."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dovetail_models.layer_norm_model import LayerNormModel

if TYPE_CHECKING:
    from dovetail_models.decoder import Targets


class GPTJModel(LayerNormModel):
    """Compute ``GPTJForCausalLM``."""

    body = "transformer."
    embed_name = "transformer.wte"
    layers_name = "transformer.h"
    norm_name = "transformer.ln_f"

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        theirs, ours = checkpoint_prefix, parameter_prefix
        yield from self.norms(index, ("ln_1", ""), theirs, ours)
        yield from self.projections(index, f"{theirs}.attn", ours)
        yield from self.products(index, ("attn.out_proj", "mlp.fc_in", "mlp.fc_out"), theirs, ours)

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``. The masks are buffers of the first versions."""
        yield r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
        yield from super().ignored_weights()
