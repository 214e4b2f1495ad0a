"""Define the models of EAGLE drafters: one decoder layer over the target's hidden states and the embeddings of the next
tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.decoder import Targets, attention_targets, linear_targets, mlp_targets
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.linear import Linear
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rotary import Rotary, Rotation
from dovetail_speculative.speculators import NO_PARAMETERS

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.types import Batch
    from dovetail_speculative.eagle_checkpoint import HeadShape


class EagleLayer(Layer):
    """Run self-attention over inputs of ``input_size``, and a gated MLP. The head applies the norm before the layer.

    ``prefix`` is the name of the layer in the checkpoint.
    """

    def __init__(self, info: ModelInfo, mesh: Mesh, prefix: str, input_size: int) -> None:
        super().__init__()
        config: HeadShape = info.config
        self.prefix = prefix
        shape = AttentionShape(
            hidden_size=info.hidden_size,
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            qkv_bias=f"{prefix}.self_attn.q_proj.bias" in config.names,
            out_bias=f"{prefix}.self_attn.o_proj.bias" in config.names,
            qk_norm_eps=config.norm_eps if f"{prefix}.self_attn.q_norm.weight" in config.names else None,
            input_size=input_size,
        )
        self.attn = SelfAttention(shape, AttentionLayer(0, info.head_dim**-0.5), mesh)
        self.mlp_norm = RMSNorm(info.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(info.hidden_size, config.intermediate_size, mesh)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, rotation: Rotation, batch: Batch) -> torch.Tensor:
        """Return the residual stream after the layer, from ``x [tokens, input_size]`` and
        ``residual [tokens, hidden_size]``."""
        added = self.attn.parts_forward(x, rotation, batch)
        x, residual = self.mlp_norm.add_forward(added, residual)
        return self.mlp.forward(x) + residual

    def targets(self, ours: str) -> Targets:
        """Yield the names in the checkpoint and their targets in a model in which the layer is named ``ours``."""
        yield f"{self.prefix}.post_attention_layernorm.weight", WeightTarget(f"{ours}.mlp_norm.weight")
        yield from attention_targets(self.attn, f"{self.prefix}.self_attn", f"{ours}.attn")
        yield from mlp_targets(self.mlp, f"{self.prefix}.mlp", f"{ours}.mlp")


class EagleModel(Layer, ModelArchitecture):
    """Define what EAGLE heads have in common.

    ``forward`` reads ``batch.hidden``: for each token, what ``enter`` returned for the target's hidden state, or the
    head's output for the token before it. It returns the residual stream after the layer.
    """

    def __init__(self, info: ModelInfo, mesh: Mesh, target: ModelArchitecture) -> None:
        super().__init__()
        config: HeadShape = info.config
        self.info = info
        own = "embed_tokens.weight" in config.names or info.hidden_size != config.target_size
        self.embed = Embedding(info.vocab_size, info.hidden_size, mesh) if own else None
        self._embed: Callable[[torch.Tensor], torch.Tensor] = self.embed.forward if self.embed else target.embed_tokens
        self.rotary = Rotary(config.rope)
        self.layer: EagleLayer

    @abstractmethod
    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Convert the target's hidden states of the watched layers, which are side by side, to the form that
        ``forward`` reads."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``forward``'s output, over the tokens that the head can draft."""
        raise NotImplementedError

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """See ``ModelArchitecture.weights_map``."""
        targets = dict(self.layer.targets("layer"))
        if self.embed is not None:
            targets["embed_tokens.weight"] = self.embed.target("embed.weight")
        return targets

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``."""
        return (r".*rotary_emb\.inv_freq",)


class EagleHead(EagleModel):
    """Run a head of EAGLE-1 or EAGLE-2 (arXiv 2401.15077, 2406.16858).

    It predicts the target's next final hidden state, from which the target's head computes logits.
    """

    def __init__(self, info: ModelInfo, mesh: Mesh, target: ModelArchitecture) -> None:
        super().__init__(info, mesh, target)
        bias = "fc.bias" in info.config.names
        self.fc = Linear(2 * info.hidden_size, info.hidden_size, bias=bias)
        self.layer = EagleLayer(info, mesh, "layers.0", info.hidden_size)
        self._logits = target.logits

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``hidden`` unchanged."""
        return hidden

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run the head. See ``EagleModel``."""
        assert batch.hidden is not None
        x = self.fc.forward(torch.cat((self._embed(batch.input_ids), batch.hidden), 1))
        return self.layer.forward(x, x, self.rotary.forward(batch.own_positions), batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of every token. See ``EagleModel.logits``."""
        return self._logits(hidden)

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """See ``ModelArchitecture.weights_map``."""
        return {**super().weights_map(), **dict(linear_targets(self.fc, "fc", "fc"))}


class Eagle3Head(EagleModel):
    """Run a head of EAGLE-3 (arXiv 2503.01840).

    It reads three layers of the target, and has its own head over ``draft_vocab`` tokens. It was trained to continue
    from its own outputs, which need not resemble the target's hidden states.
    """

    def __init__(self, info: ModelInfo, mesh: Mesh, target: ModelArchitecture, draft_vocab: int) -> None:
        super().__init__(info, mesh, target)
        config, hidden = info.config, info.hidden_size
        prefix = "layers.0" if any(name.startswith("layers.0.") for name in config.names) else "midlayer"
        self.input_norm = RMSNorm(3 * config.target_size, config.norm_eps) if config.norm_before_fc else None
        self.fc = Linear(3 * config.target_size, hidden, bias="fc.bias" in config.names)
        self.embed_norm = RMSNorm(hidden, config.norm_eps)
        self.hidden_norm = RMSNorm(hidden, config.norm_eps)
        self.layer = EagleLayer(info, mesh, prefix, 2 * hidden)
        self.norm = RMSNorm(hidden, config.norm_eps)
        self.head = LMHead(hidden, draft_vocab, mesh)
        self._norm_before_residual: bool = config.norm_before_residual

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the three layers' hidden states projected to one state of the head's size."""
        return self.fc.forward(hidden if self.input_norm is None else self.input_norm.forward(hidden))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run the head. See ``EagleModel``."""
        hidden = batch.hidden
        assert hidden is not None
        normed = self.hidden_norm.forward(hidden)
        x = torch.cat((self.embed_norm.forward(self._embed(batch.input_ids)), normed), 1)
        residual = normed if self._norm_before_residual else hidden
        return self.layer.forward(x, residual, self.rotary.forward(batch.own_positions), batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of the draft vocabulary. See ``EagleModel.logits``."""
        return self.head.forward(self.norm.forward(hidden))

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """See ``ModelArchitecture.weights_map``."""
        normed = {} if self.input_norm is None else {"input_norm.weight": WeightTarget("input_norm.weight")}
        return {
            **super().weights_map(),
            **normed,
            **dict(linear_targets(self.fc, "fc", "fc")),
            f"{self.layer.prefix}.input_layernorm.weight": WeightTarget("embed_norm.weight"),
            f"{self.layer.prefix}.hidden_norm.weight": WeightTarget("hidden_norm.weight"),
            "norm.weight": WeightTarget("norm.weight"),
            "lm_head.weight": self.head.target("head.weight"),
        }

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``."""
        return (*super().ignored_weights(), *NO_PARAMETERS)
