"""Define decoder-only models with experts: layers like those of the dense Llama family, of which some have a layer of
experts in place of the MLP.

Mixtral (arXiv 2401.04088), Qwen2-MoE (2407.10671), Qwen3-MoE (2505.09388), OLMoE (2409.02060).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.interfaces.model import WeightTarget
from dovetail.layers.decoder import DecoderLayer, DecoderShape, decoder_targets, linear_targets, mlp_targets
from dovetail.layers.expert_targets import expert_targets
from dovetail.layers.experts import Experts
from dovetail.layers.transforms import SplitHalves
from dovetail_models.decoder import DecoderModel
from dovetail_models.dense import layer_shape

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo
    from dovetail.layers.base import Layer
    from dovetail_models.decoder import Targets
    from dovetail_models.moe_describe import MoeConfig


class MoeModel(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``MoeConfig``."""

    def make_layer(self, index: int, mesh: Mesh) -> Layer:
        """See ``DecoderModel``."""
        config: MoeConfig = self.info.config
        experts = Experts(config.experts, mesh) if config.sparse[index] else None
        return DecoderLayer(moe_layer_shape(self.info), index, mesh, config.windows[index], experts)

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer)
        mlp_name = self.info.config.names.layer
        yield from decoder_targets(layer, checkpoint_prefix, parameter_prefix, mlp_name)
        if isinstance(layer.mlp, Experts):
            name = f"{checkpoint_prefix}.{mlp_name}"
            yield from self.experts_targets(layer.mlp, name, f"{parameter_prefix}.mlp")

    def experts_targets(self, layer: Experts, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """Yield the targets of the tensors of a layer of experts."""
        yield from self.router_targets(layer, checkpoint_prefix, f"{parameter_prefix}.router")
        names = self.info.config.names
        theirs = f"{checkpoint_prefix}.{names.experts}"
        yield from expert_targets(layer, theirs, parameter_prefix, names.projections)
        yield from self.shared_targets(layer, checkpoint_prefix, parameter_prefix)

    def shared_targets(self, layer: Experts, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """Yield the targets of the tensors of the shared expert of ``layer``, if it has one."""
        names = self.info.config.names
        if layer.shared is not None:
            yield from mlp_targets(layer.shared, f"{checkpoint_prefix}.{names.shared}", f"{parameter_prefix}.shared")
        if layer.shared_gate is not None:
            ours = f"{parameter_prefix}.shared_gate"
            yield from linear_targets(layer.shared_gate, f"{checkpoint_prefix}.{names.shared_gate}", ours)

    def router_targets(self, layer: Experts, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """Yield the targets of the tensors of the router of ``layer``."""
        names = self.info.config.names
        ours = f"{parameter_prefix}.gate"
        yield from linear_targets(layer.router.gate, f"{checkpoint_prefix}.{names.router}", ours)
        if layer.router.correction is not None:
            yield f"{checkpoint_prefix}.{names.correction}", WeightTarget(f"{parameter_prefix}.correction")


def moe_layer_shape(info: ModelInfo) -> DecoderShape:
    """Return the shape of each layer of a model whose ``config`` is a ``MoeConfig``."""
    config: MoeConfig = info.config
    shape, order = layer_shape(info), None
    if config.rope is not None and (config.rotates_pairs or config.rope.partial_dim):
        order = SplitHalves(info.head_dim, config.rope.rotary_dim, config.rotates_pairs)
    attention = replace(
        shape.attention, order=order, qk_norm_across_heads=config.qk_norm_across_heads, sinks=config.sinks
    )
    return replace(shape, attention=attention)
