"""The dense Llama family: pre-norm decoder layers of self-attention and a gated MLP, with rotary positions.

Llama 2 (arXiv 2307.09288), Llama 3 (2407.21783), Mistral (2310.06825), Qwen2 (2407.10671), Qwen3 (2505.09388).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.linear import FusedLinear, Linear
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rotary import Rotary, Rotation

if TYPE_CHECKING:
    from dovetail.types import Batch
    from dovetail_models.describe import DenseConfig


class DenseLayer(Layer):
    """One decoder layer. ``index`` is its place in the model and in the KV pool."""

    def __init__(self, info: ModelInfo, index: int) -> None:
        super().__init__()
        config: DenseConfig = info.config
        shape = AttentionShape(
            hidden_size=info.hidden_size,
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
        )
        constants = AttentionLayer(index, info.head_dim**-0.5, config.windows[index])
        self.attn_norm = RMSNorm(info.hidden_size, config.norm_eps)
        self.attn = SelfAttention(shape, constants)
        self.mlp_norm = RMSNorm(info.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(info.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        batch: Batch,
        last: Batch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What this layer adds, and the residual stream before it is added, both ``[tokens, hidden_size]``; with ``last`` of
        its rows alone, see ``SelfAttention``. Overwrites ``x``."""
        if residual is None:
            x, residual = self.attn_norm.forward(x), x
        else:
            x, residual = self.attn_norm.add_forward(x, residual)
        x = self.attn.forward(x, rotation, batch, last)
        if last is not None:
            assert batch.logit_rows is not None
            residual = residual.index_select(0, batch.logit_rows)
            if not len(residual):
                return x, residual
        x, residual = self.mlp_norm.add_forward(x, residual)
        return self.mlp.forward(x), residual


class DenseModel(Layer, ModelArchitecture):
    """The model of a ``ModelInfo`` whose ``config`` is a ``DenseConfig``."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__()
        config: DenseConfig = info.config
        self.info = info
        self.embed = Embedding(info.vocab_size, info.hidden_size)
        self.layers = nn.ModuleList(DenseLayer(info, index) for index in range(info.num_layers))
        self.norm = RMSNorm(info.hidden_size, config.norm_eps)
        self.head = LMHead(info.hidden_size, info.vocab_size, tied=self.embed if config.tied else None)
        self.rotary = Rotary(config.rope)
        self._layers: tuple[DenseLayer, ...] = tuple(self.layers)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelArchitecture.forward``."""
        x, residual = self.embed.forward(batch.input_ids), None
        rotation = self.rotary.forward(batch.positions)
        watched: dict[int, torch.Tensor] = {}
        final = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if index in batch.watch:
                watched[index] = x.clone() if residual is None else x + residual
            x, residual = layer.forward(x, residual, rotation, batch, batch.last if index == final else None)
        assert residual is not None
        hidden = self.norm.add_forward(x, residual)[0]
        if batch.watch:
            watched[final + 1] = hidden
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
            "model.embed_tokens.weight": WeightTarget("embed.weight"),
            "model.norm.weight": WeightTarget("norm.weight"),
        }
        if not self.info.config.tied:
            targets["lm_head.weight"] = WeightTarget("head.weight")
        for index, layer in enumerate(self._layers):
            targets.update(
                (f"model.layers.{index}.{name}", target._replace(parameter=f"layers.{index}.{target.parameter}"))
                for name, target in _layer_targets(layer)
            )
        return targets

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``."""
        yield r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
        if self.info.config.tied:
            yield r"lm_head\.weight"
        yield from _further_layers(self.info)


def _further_layers(info: ModelInfo) -> Iterator[str]:
    """Names of layers that predict further tokens, in each of the published layouts."""
    count = info.config.predict_layers
    if count:
        behind = "|".join(str(info.num_layers + index) for index in range(count))
        yield rf"model\.layers\.({behind})\..+"
        yield r"model\.mtp_layers\.\d+\..+"
        yield r"mtp\..+"


def _layer_targets(layer: DenseLayer) -> Iterator[tuple[str, WeightTarget]]:
    yield "input_layernorm.weight", WeightTarget("attn_norm.weight")
    yield "post_attention_layernorm.weight", WeightTarget("mlp_norm.weight")
    if layer.attn.qk_norm is not None:
        yield "self_attn.q_norm.weight", WeightTarget("attn.qk_norm.q_weight")
        yield "self_attn.k_norm.weight", WeightTarget("attn.qk_norm.k_weight")
    yield from _projection(layer.attn.out, "attn.out", "self_attn.o_proj")
    yield from _projection(layer.mlp.down, "mlp.down", "mlp.down_proj")
    for part in ("q", "k", "v"):
        yield from _projection(layer.attn.qkv, "attn.qkv", f"self_attn.{part}_proj", part)
    for part in ("gate", "up"):
        yield from _projection(layer.mlp.gate_up, "mlp.gate_up", f"mlp.{part}_proj", part)


def _projection(layer: Linear, ours: str, theirs: str, part: str | None = None) -> Iterator[tuple[str, WeightTarget]]:
    rows = layer.rows(part) if isinstance(layer, FusedLinear) and part is not None else (None, None)
    for field in ("weight", "bias"):
        if getattr(layer, field) is not None:
            yield f"{theirs}.{field}", WeightTarget(f"{ours}.{field}", *rows)
