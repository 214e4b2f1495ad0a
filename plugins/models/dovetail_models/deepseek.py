"""Define models with latent attention and experts: DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (2412.19437), Kimi K2
(2507.20534) and GLM-4.7-Flash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.layers.decoder import DecoderLayer, DecoderShape
from dovetail.layers.experts import Experts
from dovetail.layers.latent import LatentShape
from dovetail_models.moe import MoeModel

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo
    from dovetail_models.deepseek_describe import LatentMoeConfig

_LATENT_EPS = 1e-6
"""The epsilon of the norms over latents, whatever ``rms_norm_eps`` is, as in DeepSeek's code and in transformers."""


class LatentMoeModel(MoeModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``LatentMoeConfig``."""

    def make_layer(self, index: int, mesh: Mesh) -> DecoderLayer:
        """See ``DecoderModel``."""
        config: LatentMoeConfig = self.info.config
        experts = Experts(config.experts, mesh) if config.sparse[index] else None
        return DecoderLayer(latent_layer_shape(self.info), index, mesh, mlp=experts)


def latent_layer_shape(info: ModelInfo) -> DecoderShape:
    """Return the shape of each layer of a model whose ``config`` is a ``LatentMoeConfig``."""
    config: LatentMoeConfig = info.config
    own = config.latent
    shape = LatentShape(
        hidden_size=info.hidden_size,
        num_heads=info.num_heads,
        q_lora_rank=own.q_lora_rank,
        kv_lora_rank=own.kv_lora_rank,
        qk_nope_head_dim=own.qk_nope_head_dim,
        qk_rope_head_dim=own.qk_rope_head_dim,
        v_head_dim=own.v_head_dim,
        norm_eps=_LATENT_EPS,
        interleaved=own.interleaved,
        bias=own.bias,
    )
    return DecoderShape(shape, config.intermediate_size, config.norm_eps, scale=own.scale)
