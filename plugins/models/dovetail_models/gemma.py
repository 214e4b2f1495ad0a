"""Define Gemma (arXiv 2403.08295), Gemma 2 (2408.00118) and the text model of Gemma 3 (2503.19786): scaled embeddings, norms
that multiply by one plus a weight, from Gemma 2 on norms around attention and MLP, windows and soft caps. Gemma 3 rotates
layers with and without a window differently."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.layers.attention import SelfAttention
from dovetail.layers.decoder import DecoderLayer, DecoderShape, mlp_targets
from dovetail.layers.embedding import Embedding
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.ops.activation import soft_cap
from dovetail_models.blocks import SandwichLayer, SandwichNorms, norm_and_attention_targets
from dovetail_models.decoder import DecoderModel, attention_sizes

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo
    from dovetail_models.decoder import Targets
    from dovetail_models.gemma_describe import GemmaDecoderConfig

NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
"""Map the norms of a layer to their names in a checkpoint. The same name stands for another norm in Gemma 2."""


class ScaledEmbedding(Embedding):
    """Look up embeddings and multiply them by the root of their size, or of ``scaled_size``, rounded to the model's
    dtype."""

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh, scaled_size: int | None = None) -> None:
        super().__init__(vocab_size, hidden_size, mesh)
        self._scale = torch.tensor((scaled_size or hidden_size) ** 0.5, device="cpu").item()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See ``Embedding.forward``."""
        return super().forward(token_ids).mul_(self._scale)


class GemmaModel(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``GemmaDecoderConfig``."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        config: GemmaDecoderConfig = info.config
        if config.multimodal:
            self.embed_name = "language_model.model.embed_tokens"
            self.layers_name = "language_model.model.layers"
            self.norm_name = "language_model.model.norm"
            self.head_name = "language_model.lm_head"
        self._cap = config.logit_cap
        super().__init__(info, mesh)

    def make_embedding(self, mesh: Mesh) -> ScaledEmbedding:
        """See ``DecoderModel``."""
        return ScaledEmbedding(self.info.vocab_size, self.info.hidden_size, mesh)

    def make_norm(self) -> RMSNorm:
        """See ``DecoderModel``."""
        return RMSNorm(self.info.hidden_size, self.info.config.norm_eps, plus_one=True)

    def make_layer(self, index: int, mesh: Mesh) -> DecoderLayer | SandwichLayer:
        """See ``DecoderModel``."""
        info, config = self.info, self.info.config
        shape = replace(
            attention_sizes(info),
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            norm_plus_one=True,
        )
        mlp = GatedMLP(info.hidden_size, config.intermediate_size, mesh, activation="gelu_tanh")
        if not config.sandwich:
            sizes = DecoderShape(shape, config.intermediate_size, config.norm_eps, scale=config.scale)
            layer = DecoderLayer(sizes, index, mesh, mlp=mlp)
            layer.attn_norm, layer.mlp_norm = self.make_norm(), self.make_norm()
            return layer
        constants = AttentionLayer(index, config.scale, config.windows[index], config.attention_cap)
        norms = SandwichNorms(*(self.make_norm() for _ in range(4)))
        return SandwichLayer(SelfAttention(shape, constants, mesh), mlp, norms)

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer | SandwichLayer)
        assert isinstance(layer.mlp, GatedMLP)
        norms = SANDWICH_NORMS if self.info.config.sandwich else NORMS
        yield from norm_and_attention_targets(layer, norms, checkpoint_prefix, parameter_prefix)
        yield from mlp_targets(layer.mlp, f"{checkpoint_prefix}.mlp", f"{parameter_prefix}.mlp")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture.logits``."""
        logits = self.head.forward(hidden)
        return logits if self._cap is None else soft_cap(logits, self._cap)

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``. Nothing reads the tensors for images."""
        yield from super().ignored_weights()
        if self.info.config.multimodal:
            yield r"(vision_tower|multi_modal_projector)\..+"
