"""Define the dense Llama family: pre-norm decoder layers of self-attention and a gated MLP, with rotary positions.

Llama 2 (arXiv 2307.09288), Llama 3 (2407.21783), Mistral (2310.06825), Qwen2 (2407.10671), MiMo (2505.07608), Qwen3
(2505.09388).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.attention import AttentionShape
from dovetail.layers.base import Layer
from dovetail.layers.decoder import DecoderLayer, DecoderShape, decoder_targets
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rotary import Rotary

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch
    from dovetail_models.describe import DenseConfig


class DenseModel(Layer, ModelArchitecture):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``DenseConfig``."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        config: DenseConfig = info.config
        self.info = info
        self.embed = Embedding(info.vocab_size, info.hidden_size, mesh)
        shape = _layer_shape(info)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, index, mesh, window) for index, window in enumerate(config.windows)
        )
        self.norm = RMSNorm(info.hidden_size, config.norm_eps)
        self.head = LMHead(info.hidden_size, info.vocab_size, mesh, tied=self.embed if config.tied else None)
        self.rotary = Rotary(config.rope)
        self._layers: tuple[DecoderLayer, ...] = tuple(self.layers)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelArchitecture.forward``."""
        x: Addend = self.embed.forward(batch.input_ids)
        residual = None
        rotation = self.rotary.forward(batch.positions)
        watched: dict[int, torch.Tensor] = {}
        final = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            normed, stream = layer.enter(x, residual)
            if index in batch.watch:
                watched[index] = stream
            x, residual = layer.forward(normed, stream, rotation, batch, batch.last if index == final else None)
        assert residual is not None
        hidden, stream = self.norm.add_forward(x, residual)
        if batch.watch:
            watched[final + 1], watched[final + 2] = hidden, stream
            batch.hidden = torch.cat([watched[index] for index in batch.watch], dim=-1)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture.logits``."""
        return self.head.forward(hidden)

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture.embed_tokens``."""
        return self.embed.forward(input_ids)

    def weights_map(self) -> Mapping[str, WeightTarget]:
        """See ``ModelArchitecture.weights_map``."""
        targets = {
            "model.embed_tokens.weight": self.embed.target("embed.weight"),
            "model.norm.weight": WeightTarget("norm.weight"),
        }
        if not self.info.config.tied:
            targets["lm_head.weight"] = self.head.target("head.weight")
        for index, layer in enumerate(self._layers):
            targets.update(decoder_targets(layer, f"model.layers.{index}", f"layers.{index}"))
        return targets

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``."""
        yield r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
        if self.info.config.tied:
            yield r"lm_head\.weight"
        yield from _further_layers(self.info)


def _layer_shape(info: ModelInfo) -> DecoderShape:
    config: DenseConfig = info.config
    attention = AttentionShape(
        hidden_size=info.hidden_size,
        num_heads=info.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
    )
    return DecoderShape(attention, config.intermediate_size, config.norm_eps, config.mlp_bias)


def _further_layers(info: ModelInfo) -> Iterator[str]:
    """Yield regular expressions of the names of layers that predict further tokens, in each of the published
    layouts."""
    count = info.config.predict_layers
    if count:
        behind = "|".join(str(info.num_layers + index) for index in range(count))
        yield rf"model\.layers\.({behind})\..+"
        yield r"model\.mtp_layers\.\d+\..+"
        yield r"mtp\..+"
