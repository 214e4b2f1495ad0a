"""Define GPT-2 (Radford et al. 2019): learned positions, and weights of which a checkpoint has the transpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.model import ModelInfo, WeightTarget
from dovetail.layers.base import parameter
from dovetail.layers.mlp import MLP
from dovetail.layers.transforms import transposed
from dovetail_models.layer_norm_model import LayerNormModel

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.layers.linear import Linear
    from dovetail.types import Batch
    from dovetail_models.decoder import Targets


class GPT2Model(LayerNormModel):
    """Compute ``GPT2LMHeadModel``."""

    body = "transformer."
    embed_name = "transformer.wte"
    layers_name = "transformer.h"
    norm_name = "transformer.ln_f"

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__(info, mesh)
        self.positions = parameter(info.config.positions, info.hidden_size)

    def embed_batch(self, batch: Batch) -> torch.Tensor:
        """See ``DecoderModel``."""
        return self.embed.forward(batch.input_ids).add_(self.positions.index_select(0, batch.positions))

    def weights_map(self) -> dict[str, WeightTarget | list[WeightTarget]]:
        """See ``ModelArchitecture.weights_map``."""
        return {**super().weights_map(), "transformer.wpe.weight": WeightTarget("positions")}

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layer(index)
        theirs, ours = checkpoint_prefix, parameter_prefix
        assert isinstance(layer.mlp, MLP)
        yield from self.norms(index, ("ln_1", "ln_2"), theirs, ours)
        for field in ("weight", "bias"):
            fused = layer.attn.qkv.fused_targets(f"{ours}.attn.qkv.{field}")
            yield f"{theirs}.attn.c_attn.{field}", [transposed(target) for target in fused]
        yield from _conv_targets(layer.attn.out, f"{theirs}.attn.c_proj", f"{ours}.attn.out")
        yield from _conv_targets(layer.mlp.up, f"{theirs}.mlp.c_fc", f"{ours}.mlp.up", "up")
        yield from _conv_targets(layer.mlp.down, f"{theirs}.mlp.c_proj", f"{ours}.mlp.down")

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``. The masks are buffers of the first versions."""
        yield r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"
        yield from super().ignored_weights()


def _conv_targets(layer: Linear, theirs: str, ours: str, part: str | None = None) -> Targets:
    for field in ("weight", "bias"):
        yield f"{theirs}.{field}", transposed(layer.target(f"{ours}.{field}", part))
