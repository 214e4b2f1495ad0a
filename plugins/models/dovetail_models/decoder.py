"""Define what decoder-only models share: embedding, layers, final norm and head, the last layer's rows and the hidden
states that drafters watch.

An architecture is a subclass of ``DecoderModel`` and its layers. Everything that differs is chosen when the model is
built; ``forward`` is the same for all.
"""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.layer_norm import LayerNorm
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rotary import LayerRotary, LayerRotation, Rotary
from dovetail_models.describe import group_layers

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.layers.rotary import Rotation
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch
    from dovetail_models.describe import DecoderConfig

Targets = Iterable[tuple[str, WeightTarget | list[WeightTarget]]]
"""Yield names in a checkpoint and the targets of their tensors."""


class Block(Protocol):
    """Compute one layer. What a layer adds to the residual stream is added by ``enter`` of the next one, so that norms
    and sums over ranks are one kernel. ``dovetail.layers.decoder.DecoderLayer`` is the usual one."""

    attn: SelfAttention

    def enter(self, x: Addend, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of ``forward``, usually the norm of ``x + residual``, and that sum, the residual stream,
        which later layers do not change. Both are ``[tokens, hidden_size]``. Without ``residual``, ``x`` is the sum."""
        ...

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[Addend, torch.Tensor]:
        """Compute the layer from what ``enter`` returns. Return what remains to be added, and the residual stream
        without it; with ``last``, of the rows ``batch.logit_rows`` only."""
        ...


class DecoderModel(Layer, ModelArchitecture):
    """Compute a decoder-only model of a ``ModelInfo`` whose ``config`` is a ``DecoderConfig``.

    A subclass implements ``make_layer`` and ``layer_targets``, and overrides the other ``make_`` methods, the names and
    ``logits`` where the architecture differs. Parameters are ``embed``, ``layers``, ``norm`` and ``head``. With another
    ``embed_batch``, further tables are added in the constructor.
    """

    embed_name = "model.embed_tokens"
    layers_name = "model.layers"
    norm_name = "model.norm"
    head_name = "lm_head"

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info = info
        self.embed = self.make_embedding(mesh)
        self.layers = nn.ModuleList(self.make_layer(index, mesh) for index in range(info.num_layers))
        self.norm = self.make_norm()
        self.head = self.make_head(mesh)
        self.rotary = self.make_rotary()
        self._layers: tuple[Block, ...] = tuple(self.layers)  # pyright: ignore[reportAttributeAccessIssue]
        if len(info.cache_groups) > 1:
            self.place_layers()

    @abstractmethod
    def make_layer(self, index: int, mesh: Mesh) -> nn.Module:
        """Return layer ``index``, which is also a ``Block``. With several cache groups, the constructor sets that of its
        attention."""

    @abstractmethod
    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """Yield the targets of the tensors of layer ``index``. Names in the checkpoint begin with
        ``checkpoint_prefix``, parameters of the model with ``parameter_prefix``."""

    def place_layers(self) -> None:
        """Set the cache group of each layer. Called by the constructor if there are several groups."""
        for layer, place in zip(self._layers, group_layers(self.info.config.windows), strict=True):
            layer.attn.set_place(*place)

    def make_embedding(self, mesh: Mesh) -> Embedding:
        """Return the embedding of tokens."""
        return Embedding(self.info.vocab_size, self.info.hidden_size, mesh)

    def make_norm(self) -> RMSNorm | LayerNorm:
        """Return the final norm."""
        return RMSNorm(self.info.hidden_size, self.info.config.norm_eps)

    def make_head(self, mesh: Mesh) -> LMHead:
        """Return the layer that computes logits."""
        info, config = self.info, self.info.config
        tied = self.embed if config.tied else None
        return LMHead(info.hidden_size, info.vocab_size, mesh, tied=tied, bias=config.head_bias)

    def make_rotary(self) -> Rotary | LayerRotary:
        """Return what makes the rotation of a step of its positions."""
        config: DecoderConfig = self.info.config
        served = self.info.context_len
        if config.rope is not None and not config.layer_ropes:
            return Rotary(config.rope.served(served))
        ropes = config.layer_ropes or (None,) * self.info.num_layers
        return LayerRotary([None if rope is None else rope.served(served) for rope in ropes])

    def embed_batch(self, batch: Batch) -> torch.Tensor:
        """Return the input of the first layer, ``[tokens, hidden_size]``, a new tensor."""
        return self.embed.forward(batch.input_ids)

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelArchitecture.forward``."""
        x: Addend = self.embed_batch(batch)
        residual = None
        rotation = self.rotary.forward(batch.own_positions)
        watched: dict[int, torch.Tensor] = {}
        final = len(self._layers) - 1
        rotations = rotation.layers if isinstance(rotation, LayerRotation) else itertools.repeat(rotation)
        for index, (layer, rotation) in enumerate(zip(self._layers, rotations)):  # noqa: B905 (repeat has no end)
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

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """See ``ModelArchitecture.weights_map``."""
        targets: dict[str, WeightTarget | list[WeightTarget]] = {
            f"{self.embed_name}.weight": self.embed.target("embed.weight"),
            **dict(self.norm_targets()),
        }
        if not self.head.tied:
            targets[f"{self.head_name}.weight"] = self.head.target("head.weight")
        if self.head.bias is not None:
            targets[f"{self.head_name}.bias"] = self.head.target("head.bias")
        for index in range(len(self._layers)):
            targets.update(self.layer_targets(index, f"{self.layers_name}.{index}", f"layers.{index}"))
        return targets

    def norm_targets(self) -> Targets:
        """Return the targets of the final norm."""
        return self.norm.targets(self.norm_name, "norm")

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``."""
        yield r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
        if self.head.tied:
            yield rf"{re.escape(self.head_name)}\.weight"
        yield from _further_layers(self.info)

    def tied_weights(self) -> Mapping[str, str]:
        """See ``ModelArchitecture.tied_weights``."""
        return {f"{self.head_name}.weight": f"{self.embed_name}.weight"} if self.head.tied else {}

    def untie(self, name: str) -> None:
        """See ``ModelArchitecture.untie``."""
        self.head.untie()


def attention_sizes(info: ModelInfo) -> AttentionShape:
    """Return the shape of attention with the sizes of a model, without biases and norms."""
    return AttentionShape(info.hidden_size, info.num_heads, info.num_kv_heads, info.head_dim)


def _further_layers(info: ModelInfo) -> Iterator[str]:
    """Yield regular expressions of the names of layers that predict further tokens, in each of the published
    layouts."""
    count = info.config.predict_layers
    if count:
        behind = "|".join(str(info.num_layers + index) for index in range(count))
        yield rf"model\.layers\.({behind})\..+"
        yield r"model\.mtp_layers\.\d+\..+"
        yield r"mtp\..+"
