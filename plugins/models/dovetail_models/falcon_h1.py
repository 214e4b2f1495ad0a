"""Define Falcon-H1 (arXiv 2507.22448): every layer adds up attention and a Mamba-2 mixer of the same norm, with multipliers
almost everywhere.

The multipliers of the input of attention and of its keys are part of the scale of its logits and of the multiplier of
its output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.decoder import attention_targets, mlp_targets
from dovetail.layers.mamba import Mamba2Mixer
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.ops.activation import silu_mul
from dovetail_models.decoder import DecoderModel
from dovetail_models.dense import layer_shape
from dovetail_models.hybrid import mixer_shape, state_group_of

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo
    from dovetail.layers.rotary import Rotation
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch
    from dovetail_models.decoder import Targets
    from dovetail_models.falcon_h1_describe import FalconH1Sizes


class FalconH1Layer(Layer):
    """Compute a norm, attention and a mixer of it side by side, and a norm and an MLP."""

    def __init__(self, info: ModelInfo, index: int, mesh: Mesh) -> None:
        super().__init__()
        config: FalconH1Sizes = info.config
        shape = layer_shape(info).attention
        assert isinstance(shape, AttentionShape)
        self.norm, self.mlp_norm = (RMSNorm(info.hidden_size, config.norm_eps) for _ in range(2))
        self.attn = SelfAttention(shape, AttentionLayer(index, config.attention_scale), mesh)
        self.mixer = Mamba2Mixer(mixer_shape(info, order=config.norm, multipliers=config.projections), index, mesh)
        self.mlp = GatedMLP(info.hidden_size, config.intermediate_size, mesh, bias=config.mlp_bias)
        self._config, self._group = config, state_group_of(info)

    def enter(self, x: Addend, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Block``."""
        return self.norm.add_forward(x, residual)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[Addend, torch.Tensor]:
        """See ``Block``."""
        config, rows = self._config, None if last is None else batch.logit_rows
        mixed = self.mixer.forward(x, batch, self._group, rows)
        added = self.attn.forward(x, rotation, batch, last).mul_(config.attention_out)
        if rows is not None:
            stream = stream.index_select(0, rows)
        x, stream = self.mlp_norm.add_forward(added.add_(mixed, alpha=config.mixer_out), stream)
        gate_up = self.mlp.gate_up.forward(x)
        gate_up[:, : gate_up.shape[1] // 2].mul_(config.mlp_gate)
        return self.mlp.down.forward(silu_mul(gate_up)).mul_(config.mlp_down), stream


class FalconH1Model(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``FalconH1Sizes``."""

    norm_name = "model.final_layernorm"

    def make_layer(self, index: int, mesh: Mesh) -> FalconH1Layer:
        """See ``DecoderModel``."""
        return FalconH1Layer(self.info, index, mesh)

    def embed_batch(self, batch: Batch) -> torch.Tensor:
        """See ``DecoderModel``."""
        return self.embed.forward(batch.input_ids).mul_(self.info.config.embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture.logits``."""
        return self.head.forward(hidden).mul_(self.info.config.logits)

    def place_layers(self) -> None:
        """See ``DecoderModel``. ``make_layer`` has placed the layers."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, FalconH1Layer)
        yield from layer.norm.targets(f"{checkpoint_prefix}.input_layernorm", f"{parameter_prefix}.norm")
        yield from layer.mlp_norm.targets(f"{checkpoint_prefix}.pre_ff_layernorm", f"{parameter_prefix}.mlp_norm")
        yield from attention_targets(layer.attn, f"{checkpoint_prefix}.self_attn", f"{parameter_prefix}.attn")
        yield from layer.mixer.targets(f"{checkpoint_prefix}.mamba", f"{parameter_prefix}.mixer")
        yield from mlp_targets(layer.mlp, f"{checkpoint_prefix}.feed_forward", f"{parameter_prefix}.mlp")
