"""Define OPT (Zhang et al. 2022, arXiv 2205.01068): learned positions, of which the first two are not used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.model import ModelInfo, WeightTarget
from dovetail.layers.base import parameter
from dovetail_models.layer_norm_model import LayerNormModel

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.types import Batch
    from dovetail_models.decoder import Targets

UNUSED = 2
"""The table of positions begins with this many rows that no token has."""


class OPTModel(LayerNormModel):
    """Compute ``OPTForCausalLM``."""

    embed_name = "model.decoder.embed_tokens"
    layers_name = "model.decoder.layers"
    norm_name = "model.decoder.final_layer_norm"

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__(info, mesh)
        self.positions = parameter(UNUSED + info.config.positions, info.hidden_size)

    def embed_batch(self, batch: Batch) -> torch.Tensor:
        """See ``DecoderModel``."""
        return self.embed.forward(batch.input_ids).add_(self.positions[UNUSED:].index_select(0, batch.positions))

    def weights_map(self) -> dict[str, WeightTarget | list[WeightTarget]]:
        """See ``ModelArchitecture.weights_map``."""
        return {**super().weights_map(), "model.decoder.embed_positions.weight": WeightTarget("positions")}

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        theirs, ours = checkpoint_prefix, parameter_prefix
        yield from self.norms(index, ("self_attn_layer_norm", "final_layer_norm"), theirs, ours)
        yield from self.projections(index, f"{theirs}.self_attn", ours)
        yield from self.products(index, ("self_attn.out_proj", "fc1", "fc2"), theirs, ours)
