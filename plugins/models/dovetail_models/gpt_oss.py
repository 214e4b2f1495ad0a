"""Define gpt-oss (arXiv 2508.10925): attention sinks, alternating sliding windows, and experts with biases and a clamped
activation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.layers.expert_targets import FusedLayout, fused_expert_targets
from dovetail_models.moe import MoeModel

if TYPE_CHECKING:
    from dovetail.layers.experts import Experts
    from dovetail_models.decoder import Targets


class GptOssModel(MoeModel):
    """Compute a ``MoeModel`` whose checkpoints have the weights of all experts in one tensor, in which the columns of
    gate and up alternate."""

    def experts_targets(self, layer: Experts, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``MoeModel``."""
        yield from self.router_targets(layer, checkpoint_prefix, f"{parameter_prefix}.router")
        layout = FusedLayout(transposed=True, interleaved=True)
        yield from fused_expert_targets(layer, f"{checkpoint_prefix}.experts", parameter_prefix, layout)
