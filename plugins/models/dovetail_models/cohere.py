"""Define Cohere's Command R and Command R7B (arXiv 2504.00698): attention and MLP of the same LayerNorm, rotated pairs,
scaled logits. In Command R7B, layers without a window have no positions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.attention import SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.decoder import attention_targets, mlp_targets
from dovetail.layers.layer_norm import LayerNorm
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.transforms import SplitHalves
from dovetail.ops.parts import sum_addends
from dovetail_models.blocks import last_rows
from dovetail_models.decoder import DecoderModel, attention_sizes

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo
    from dovetail.layers.rotary import Rotation
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch
    from dovetail_models.cohere_describe import CohereDecoderConfig
    from dovetail_models.decoder import Targets


class CohereLayer(Layer):
    """Compute attention and a gated MLP of the same normalised input. See ``decoder.Block``."""

    def __init__(self, info: ModelInfo, index: int, mesh: Mesh) -> None:
        super().__init__()
        config: CohereDecoderConfig = info.config
        shape = replace(
            attention_sizes(info),
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            order=SplitHalves(info.head_dim, info.head_dim, pairs=True),
        )
        self.norm = LayerNorm(info.hidden_size, config.norm_eps, bias=False)
        constants = AttentionLayer(index, info.head_dim**-0.5, config.windows[index])
        self.attn = SelfAttention(shape, constants, mesh)
        self.mlp = GatedMLP(info.hidden_size, config.intermediate_size, mesh)

    def enter(self, x: Addend, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``decoder.Block``."""
        return self.norm.add_forward(x, residual)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[Addend, torch.Tensor]:
        """See ``decoder.Block``."""
        added = self.attn.parts_forward(x, rotation, batch, last)
        x, stream = last_rows(x, batch, last), last_rows(stream, batch, last)
        return sum_addends(added, self.mlp.parts_forward(x)), stream


class CohereModel(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``CohereDecoderConfig``."""

    def make_layer(self, index: int, mesh: Mesh) -> CohereLayer:
        """See ``DecoderModel``."""
        return CohereLayer(self.info, index, mesh)

    def make_norm(self) -> LayerNorm:
        """See ``DecoderModel``."""
        return LayerNorm(self.info.hidden_size, self.info.config.norm_eps, bias=False)

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, CohereLayer)
        yield from layer.norm.targets(f"{checkpoint_prefix}.input_layernorm", f"{parameter_prefix}.norm")
        yield from attention_targets(layer.attn, f"{checkpoint_prefix}.self_attn", f"{parameter_prefix}.attn")
        yield from mlp_targets(layer.mlp, f"{checkpoint_prefix}.mlp", f"{parameter_prefix}.mlp")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture.logits``."""
        return self.head.forward(hidden).mul_(self.info.config.logit_scale)
