"""Define Phi-3.5-MoE (arXiv 2404.14219, 2409.12136): LayerNorm in place of RMSNorm, a head with a bias, and routers
that choose by sparsemixer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.layers.decoder import DecoderLayer
from dovetail.layers.experts import Experts
from dovetail.layers.layer_norm import LayerNorm
from dovetail_models.moe import MoeModel, moe_layer_shape

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh


class PhiMoeModel(MoeModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``MoeConfig``."""

    def make_layer(self, index: int, mesh: Mesh) -> DecoderLayer:
        """See ``DecoderModel``."""
        config = self.info.config
        experts = Experts(config.experts, mesh)
        layer = DecoderLayer(moe_layer_shape(self.info), index, mesh, config.windows[index], experts)
        layer.attn_norm = LayerNorm(self.info.hidden_size, config.norm_eps)
        layer.mlp_norm = LayerNorm(self.info.hidden_size, config.norm_eps)
        return layer

    def make_norm(self) -> LayerNorm:
        """See ``DecoderModel``."""
        return LayerNorm(self.info.hidden_size, self.info.config.norm_eps)
