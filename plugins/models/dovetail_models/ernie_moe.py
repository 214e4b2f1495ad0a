"""Define ERNIE 4.5 with experts (ERNIE 4.5 Technical Report, Baidu 2025)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dovetail.interfaces.model import WeightTarget
from dovetail.layers.transforms import Reshape
from dovetail_models.moe import MoeModel

if TYPE_CHECKING:
    from dovetail.layers.experts import Experts
    from dovetail_models.decoder import Targets


class ErnieMoeModel(MoeModel):
    """Compute a ``MoeModel`` whose checkpoints have the correction bias as a matrix of one row."""

    def router_targets(self, layer: Experts, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``MoeModel``."""
        for name, target in super().router_targets(layer, checkpoint_prefix, parameter_prefix):
            if name.endswith("correction_bias") and isinstance(target, WeightTarget):
                target = target._replace(transform=Reshape((1, layer.shape.routing.num_experts)))
            yield name, target

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``."""
        yield from super().ignored_weights()
        yield r"model\.mtp_.+"
