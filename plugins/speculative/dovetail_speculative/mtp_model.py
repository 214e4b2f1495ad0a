"""Define the model of layers that predict further tokens, over the target's embedding and head or their own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.base import Layer
from dovetail.layers.decoder import DecoderLayer, decoder_targets, linear_targets, mlp_targets
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.expert_targets import ExpertTargets, expert_targets
from dovetail.layers.experts import Experts
from dovetail.layers.linear import Linear
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rotary import Rotary

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.types import Batch
    from dovetail_speculative.mtp_checkpoint import MtpShape


class MtpInput(Layer):
    """Compute the input of a decoder layer from an embedding and a hidden state, and hold the norm of the layer's
    output, if it has one."""

    def __init__(self, hidden_size: int, shape: MtpShape) -> None:
        super().__init__()
        layout, eps, plus_one = shape.layout, shape.decoder.norm_eps, shape.plus_one
        self.embed_norm = RMSNorm(hidden_size, eps, plus_one=plus_one)
        self.hidden_norm = RMSNorm(hidden_size, eps, plus_one=plus_one)
        self.projection = Linear(2 * hidden_size, hidden_size)
        self.projection.precise = shape.plain_projection
        self.final_norm = None if layout.final_norm is None else RMSNorm(hidden_size, eps, plus_one=plus_one)
        self._hidden_first = layout.hidden_first

    def forward(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input ``[tokens, hidden_size]`` of the decoder layer. Both arguments have the same shape; mutates
        nothing."""
        halves = [self.embed_norm.forward(embedding), self.hidden_norm.forward(hidden)]
        return self.projection.forward(torch.cat(halves[::-1] if self._hidden_first else halves, -1))


class MtpModel(Layer, ModelArchitecture):
    """Run the layers of a ``ModelInfo`` whose ``config`` is an ``MtpShape``, for a ``target``."""

    def __init__(self, info: ModelInfo, mesh: Mesh, target: ModelArchitecture) -> None:
        super().__init__()
        shape: MtpShape = info.config
        count = 1 if shape.layout.shares_entry else info.num_layers
        self.info = info
        self.entries = nn.ModuleList(MtpInput(info.hidden_size, shape) for _ in range(count))
        self.layers = nn.ModuleList(_decoder_layer(shape, index, mesh) for index in range(info.num_layers))
        self.rotary = Rotary(shape.rope)
        self._entries: tuple[MtpInput, ...] = tuple(self.entries)  # pyright: ignore[reportAttributeAccessIssue]
        self._layers: tuple[DecoderLayer, ...] = tuple(self.layers)  # pyright: ignore[reportAttributeAccessIssue]
        self.embed = Embedding(info.vocab_size, info.hidden_size, mesh) if shape.own_embedding else None
        self.head = LMHead(info.hidden_size, info.vocab_size, mesh) if shape.own_head else None
        self._embed = target.embed_tokens if self.embed is None else self.embed.forward
        self._logits = target.logits if self.head is None else self.head.forward

    def advance(self, index: int, batch: Batch, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Run layer ``index`` over a batch of the tokens ``ids`` (int64 ``[tokens]``), and return its normalised
        output.

        ``hidden [tokens, hidden_size]`` are the hidden states for these tokens; the output has the same shape. Mutates
        the draft cache only.
        """
        shape: MtpShape = self.info.config
        entry = self._entries[index % len(self._entries)]
        embedding = self._embed(ids)
        if shape.layout.zero_first_embedding:
            embedding *= (batch.positions != 0)[:, None]
        layer, rotation = self._layers[index], self.rotary.forward(batch.own_positions)
        added, residual = layer.forward(*layer.enter(entry.forward(embedding, hidden)), rotation, batch)
        if entry.final_norm is None:  # the sum alone, of whatever form ``added`` has
            return layer.mlp_norm.add_forward(added, residual)[1]
        return entry.final_norm.add_forward(added, residual)[0]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run the first layer over ``batch.input_ids``; ``batch.hidden`` are the hidden states of the tokens before
        them."""
        assert batch.hidden is not None, "the drafter sets the hidden states that the layers continue from"
        return self.advance(0, batch, batch.input_ids, batch.hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture.logits``."""
        return self._logits(hidden)

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """See ``ModelArchitecture.weights_map``."""
        shape: MtpShape = self.info.config
        layout = shape.layout
        targets: dict[str, WeightTarget | list[WeightTarget]] = {}
        for index, entry in enumerate(self._entries):
            theirs, ours = shape.entry(index), f"entries.{index}"
            targets.update(linear_targets(entry.projection, f"{theirs}.{layout.projection}", f"{ours}.projection"))
            targets.update(entry.embed_norm.targets(f"{theirs}.{layout.embed_norm}", f"{ours}.embed_norm"))
            targets.update(entry.hidden_norm.targets(f"{theirs}.{layout.hidden_norm}", f"{ours}.hidden_norm"))
            if entry.final_norm is not None:
                targets.update(entry.final_norm.targets(f"{theirs}.{layout.final_norm}", f"{ours}.final_norm"))
        for index, layer in enumerate(self._layers):
            targets.update(decoder_targets(layer, shape.layer(index), f"layers.{index}"))
            if isinstance(layer.mlp, Experts):
                targets.update(_experts_targets(layer.mlp, f"{shape.layer(index)}.mlp", f"layers.{index}.mlp"))
        if self.embed is not None:
            targets[f"{shape.entry(0)}.{layout.embedding}.weight"] = self.embed.target("embed.weight")
        if self.head is not None:
            targets[f"{shape.entry(0)}.{layout.head}.weight"] = self.head.target("head.weight")
        return targets

    def ignored_weights(self) -> Iterable[str]:
        """Ignore the target's own tensors, and copies of them. See ``ModelArchitecture.ignored_weights``."""
        shape: MtpShape = self.info.config
        own = "|".join(re.escape(f"{shape.entry(index)}.") for index in range(self.info.num_layers))
        own = own if shape.layout.prefix is None else re.escape(shape.layout.prefix)
        copies = [f"{name}.weight" for name in (shape.layout.embedding, shape.layout.head) if name is not None]
        left = "|".join(map(re.escape, (*copies, "self_attn.rotary_emb.inv_freq")))
        yield rf"(?!({own})).+"
        yield rf"({own})({left})"


def _decoder_layer(shape: MtpShape, index: int, mesh: Mesh) -> DecoderLayer:
    experts = None if shape.experts is None else Experts(shape.experts, mesh)
    layer = DecoderLayer(shape.decoder, index, mesh, mlp=experts)
    if shape.plus_one:
        hidden, eps = shape.decoder.attention.hidden_size, shape.decoder.norm_eps
        layer.attn_norm, layer.mlp_norm = (RMSNorm(hidden, eps, plus_one=True) for _ in range(2))
    return layer


def _experts_targets(layer: Experts, theirs: str, ours: str) -> ExpertTargets:
    """Yield the targets of a layer of experts, with the names of DeepSeek-V3 and GLM-4.5, or, if its shared expert has a gate,
    those of Qwen."""
    yield from expert_targets(layer, f"{theirs}.experts", ours)
    yield from linear_targets(layer.router.gate, f"{theirs}.gate", f"{ours}.router.gate")
    if layer.router.correction is not None:
        yield f"{theirs}.gate.e_score_correction_bias", WeightTarget(f"{ours}.router.correction")
    if layer.shared is not None:
        shared = "shared_experts" if layer.shared_gate is None else "shared_expert"
        yield from mlp_targets(layer.shared, f"{theirs}.{shared}", f"{ours}.shared")
    if layer.shared_gate is not None:
        yield from linear_targets(layer.shared_gate, f"{theirs}.shared_expert_gate", f"{ours}.shared_gate")
