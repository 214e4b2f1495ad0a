"""Define Granite 3, dense and with experts: Llama's layers with four multipliers.

What layers add is multiplied by r. The residual stream s is kept divided by r instead, which costs nothing: with s = r t,
the norm of s is ``s / sqrt(mean(s^2) + eps)``, which is ``t / sqrt(mean(t^2) + eps / r^2)``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.layers.base import Layer
from dovetail.layers.decoder import DecoderLayer, DecoderShape, linear_targets
from dovetail.layers.expert_targets import fused_expert_targets
from dovetail.layers.experts import Experts
from dovetail.layers.linear import ColumnLinear
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail_models.decoder import DecoderModel
from dovetail_models.dense import DenseModel, layer_shape
from dovetail_models.moe import MoeModel, moe_layer_shape

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.types import Batch
    from dovetail_models.decoder import Targets
    from dovetail_models.granite_describe import GraniteSizes
    from dovetail_models.granite_moe_describe import GraniteMoeSizes


class MultipliedModel(DecoderModel):
    """Compute a ``DecoderModel`` with the multipliers of a ``GraniteSizes`` or ``GraniteMoeSizes``."""

    def multiplied(self, shape: DecoderShape) -> DecoderShape:
        """Return the shape of a layer with its multipliers."""
        return replace(shape, scale=self.sizes.attention_multiplier, norm_eps=self._eps())

    def make_norm(self) -> RMSNorm:
        """See ``DecoderModel``."""
        return RMSNorm(self.info.hidden_size, self._eps())

    @property
    def sizes(self) -> GraniteSizes | GraniteMoeSizes:
        """Return the config of the model."""
        return self.info.config

    def embed_batch(self, batch: Batch) -> torch.Tensor:
        """See ``DecoderModel``."""
        return self.embed.forward(batch.input_ids).mul_(
            self.sizes.embedding_multiplier / self.sizes.residual_multiplier
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelArchitecture.forward``."""
        hidden = super().forward(batch)
        if batch.watch:
            assert batch.hidden is not None
            for layer, part in zip(batch.watch, batch.hidden.split(self.info.hidden_size, dim=1), strict=True):
                if layer != self.info.num_layers:  # the others are residual streams
                    part.mul_(self.sizes.residual_multiplier)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture.logits``."""
        return self.head.forward(hidden).div_(self.sizes.logits_scaling)

    def _eps(self) -> float:
        return self.sizes.norm_eps / self.sizes.residual_multiplier**2


class GraniteModel(MultipliedModel, DenseModel):
    """Compute ``GraniteForCausalLM``."""

    def make_layer(self, index: int, mesh: Mesh) -> DecoderLayer:
        """See ``DecoderModel``."""
        return DecoderLayer(self.multiplied(layer_shape(self.info)), index, mesh)


class GraniteMoeModel(MultipliedModel, MoeModel):
    """Compute ``GraniteMoeForCausalLM`` and ``GraniteMoeSharedForCausalLM``. Checkpoints have the weights of all experts
    in one tensor, and gate and up of the shared expert too."""

    def make_layer(self, index: int, mesh: Mesh) -> Layer:
        """See ``DecoderModel``."""
        experts = Experts(self.info.config.experts, mesh)
        return DecoderLayer(self.multiplied(moe_layer_shape(self.info)), index, mesh, mlp=experts)

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        yield from super().layer_targets(index, checkpoint_prefix, parameter_prefix)
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.mlp, Experts)
        if layer.mlp.shared is not None:
            yield from shared_mlp_targets(layer.mlp.shared, checkpoint_prefix, f"{parameter_prefix}.mlp.shared")

    def experts_targets(self, layer: Experts, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``MoeModel``."""
        yield from self.router_targets(layer, checkpoint_prefix, f"{parameter_prefix}.router")
        names = ("input_linear.weight", "output_linear.weight")
        yield from fused_expert_targets(layer, checkpoint_prefix, parameter_prefix, names=names)


def shared_mlp_targets(shared: GatedMLP, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
    """Yield the targets of the tensors of a shared expert, or of the MLP of a layer without experts."""
    theirs = f"{checkpoint_prefix}.shared_mlp"
    assert isinstance(shared.gate_up, ColumnLinear)
    yield f"{theirs}.input_linear.weight", shared.gate_up.fused_targets(f"{parameter_prefix}.gate_up.weight")
    yield from linear_targets(shared.down, f"{theirs}.output_linear", f"{parameter_prefix}.down")
