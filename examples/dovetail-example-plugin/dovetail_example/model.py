"""Build a decoder of Llama's shape from ``dovetail.layers``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.mesh import Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.decoder import attention_targets, mlp_targets
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rotary import Rotary, Rotation
from dovetail.types import Batch


class ExampleLayer(Layer):
    """Apply attention and a gated MLP, each after a norm, and add both to the residual stream."""

    def __init__(self, info: ModelInfo, mesh: Mesh, index: int) -> None:
        super().__init__()
        shape = AttentionShape(info.hidden_size, info.num_heads, info.num_kv_heads, info.head_dim)
        self.attn_norm = RMSNorm(info.hidden_size, info.config.norm_eps)
        self.attn = SelfAttention(shape, AttentionLayer(index, info.head_dim**-0.5), mesh)
        self.mlp_norm = RMSNorm(info.hidden_size, info.config.norm_eps)
        self.mlp = GatedMLP(info.hidden_size, info.config.intermediate_size, mesh)

    def forward(self, x: torch.Tensor, rotation: Rotation, batch: Batch) -> torch.Tensor:
        """Return hidden states, ``[tokens, hidden_size]``."""
        x = x + self.attn.forward(self.attn_norm.forward(x), rotation, batch)
        return x + self.mlp.forward(self.mlp_norm.forward(x))


class ExampleModel(Layer, ModelArchitecture):
    """Compute ``ExampleForCausalLM``. Its checkpoints name their tensors as Llama's do."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info = info
        self.embed = Embedding(info.vocab_size, info.hidden_size, mesh)
        self.layers = nn.ModuleList(ExampleLayer(info, mesh, index) for index in range(info.num_layers))
        self.norm = RMSNorm(info.hidden_size, info.config.norm_eps)
        self.head = LMHead(info.hidden_size, info.vocab_size, mesh, tied=self.embed if info.config.tied else None)
        self.rotary = Rotary(info.config.rope)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelArchitecture``."""
        x = self.embed.forward(batch.input_ids)
        rotation = self.rotary.forward(batch.positions)
        for layer in self.layers:
            x = layer.forward(x, rotation, batch)
        return self.norm.forward(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture``."""
        return self.head.forward(hidden)

    def weights_map(self) -> Mapping[str, WeightTarget]:
        """See ``ModelArchitecture``."""
        targets = {
            "model.embed_tokens.weight": self.embed.target("embed.weight"),
            "model.norm.weight": WeightTarget("norm.weight"),
        }
        if not self.head.tied:
            targets["lm_head.weight"] = self.head.target("head.weight")
        for index, layer in enumerate(self.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            targets[f"{theirs}.input_layernorm.weight"] = WeightTarget(f"{ours}.attn_norm.weight")
            targets[f"{theirs}.post_attention_layernorm.weight"] = WeightTarget(f"{ours}.mlp_norm.weight")
            assert isinstance(layer, ExampleLayer)
            targets |= attention_targets(layer.attn, f"{theirs}.self_attn", f"{ours}.attn")
            targets |= mlp_targets(layer.mlp, f"{theirs}.mlp", f"{ours}.mlp")
        return targets

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture``. A layer after the last one predicts further tokens, for drafters."""
        yield rf"model\.layers\.{self.info.num_layers}\..*"
        if self.head.tied:
            yield r"lm_head\.weight"

    def tied_weights(self) -> Mapping[str, str]:
        """See ``ModelArchitecture``."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.head.tied else {}

    def untie(self, name: str) -> None:
        """See ``ModelArchitecture``."""
        self.head.untie()
