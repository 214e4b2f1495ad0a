"""Let layers multiply with adapters (LoRA), whatever stores their weights: ``Linear.prepare`` and ``Experts.prepare`` wrap the
product of a layer that has ``adapters``, and ``Embedding`` adds them to what it looks up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.experts import ExpertsProduct
from dovetail.interfaces.quantization import LinearProduct
from dovetail.ops.activation import GATES
from dovetail.ops.adapter_weights import EmbeddingLowRank, ExpertPairLowRank, LowRankWeights, TokenSlots
from dovetail.ops.experts import ADAPTED_FORMATS, GroupedProduct, adapted_experts
from dovetail.ops.low_rank import add_embedding, add_low_rank

if TYPE_CHECKING:
    from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
    from dovetail.interfaces.quantization import Activation
    from dovetail.ops.triton.adapted_rows import AdaptedRows


@dataclass(slots=True, eq=False)
class AdaptedTokens:
    """Hold the slots of the tokens of the forward pass that runs, or None if no token has an adapter. All layers of a model
    share it. ``sampled`` are those of the tokens whose logits are computed, or None if they are all tokens. ``own`` are those of
    the tokens of ``Batch.own``, or None if none of them has an adapter, with data-parallel attention."""

    current: TokenSlots | None = None
    sampled: TokenSlots | None = None
    own: TokenSlots | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """Give the head the slots of the tokens whose logits are computed."""

    tokens: AdaptedTokens

    @property
    def current(self) -> TokenSlots | None:
        """Return the slots of the rows that the head computes, or None if none has an adapter."""
        sampled = self.tokens.sampled
        return self.tokens.current if sampled is None else sampled


@dataclass(frozen=True, slots=True, eq=False)
class OwnTokens:
    """Give the layers of attention the slots of the tokens of this rank's requests, with data-parallel attention."""

    tokens: AdaptedTokens

    @property
    def current(self) -> TokenSlots | None:
        """Return the slots of the tokens in which this rank attends, or None if none has an adapter."""
        return self.tokens.own


LayerTokens = AdaptedTokens | SampledTokens | OwnTokens
"""What gives a layer the slots of the tokens that it computes: ``current``."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearAdapters:
    """Hold the adapters of one layer, in slots, and which of them the tokens of a step have."""

    weights: LowRankWeights
    tokens: LayerTokens

    def around(self, product: LinearProduct, rows: AdaptedRows | None = None) -> LinearProduct:
        """Return ``product`` with what the adapters add to it. ``rows`` computes both for few rows."""
        return AdaptedProduct(product, self.weights, self.tokens, rows)


class AdaptedProduct(LinearProduct):
    """Multiply as ``product`` does, and add what the adapters of the tokens make of the input. If no token of the step has an
    adapter, every method is that of ``product``. The input is not quantized before it arrives, because adapters need it
    as it is: ``product`` quantizes it itself."""

    def __init__(
        self,
        product: LinearProduct,
        weights: LowRankWeights,
        tokens: LayerTokens,
        rows: AdaptedRows | None,
    ) -> None:
        self._product, self._weights, self._tokens = product, weights, tokens
        self.in_parts = product.in_parts
        self._rows = rows

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        tokens = self._tokens.current
        if tokens is None:
            return self._product.forward(x, bias)
        if self._rows is not None and tokens.tiles is not None and self._rows.can(tokens.tiles, len(x)):
            return self._rows(x, bias, tokens.tiles)
        return add_low_rank(self._product.forward(x, bias), x, self._weights, tokens)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> Any:
        """See ``LinearProduct``."""
        tokens = self._tokens.current
        if tokens is None:
            return self._product.gated(x, bias, activation)
        if self._rows is not None and tokens.tiles is not None and self._rows.can(tokens.tiles, len(x), gated=True):
            return self._rows(x, bias, tokens.tiles, activation)
        return GATES[activation](self.forward(x, bias))

    def parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """See ``LinearProduct``. What the adapters add is in the first part."""
        tokens = self._tokens.current
        if tokens is None:
            return self._product.parts(x)
        if self._rows is not None and tokens.tiles is not None and self._rows.can(tokens.tiles, len(x), parts=True):
            return self._rows(x, None, tokens.tiles, in_parts=True)
        parts = self._product.parts(x)
        if parts is not None:
            add_low_rank(parts[0], x, self._weights, tokens)
        return parts

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return self._product.describe


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingAdapters:
    """Hold the adapters of an embedding, in slots, and which of them the tokens of a step have."""

    weights: EmbeddingLowRank
    tokens: AdaptedTokens

    def add(self, found: torch.Tensor, rows: torch.Tensor) -> None:
        """Add to the embeddings ``found [tokens, hidden]`` of ``rows`` of this rank's table what the adapters add to these rows."""
        if self.tokens.current is not None:
            add_embedding(found, rows, self.weights, self.tokens.current)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsAdapters:
    """Hold the adapters of one layer of experts, in slots, and which of them the tokens of a step have."""

    low_rank: ExpertPairLowRank
    tokens: AdaptedTokens

    def around(self, product: ExpertsProduct, weights: ExpertWeights) -> ExpertsProduct:
        """Return ``product`` with what the adapters add to it. ``weights`` are those of the layer. Raises ``ConfigError`` if there
        are no products with adapters for their format."""
        if isinstance(product, GroupedProduct):
            weights = product.weights  # it may have dequantized them
        allowed = ADAPTED_FORMATS[weights.gate_up.device.type]
        if weights.format not in allowed:
            raise ConfigError(
                f"adapters.modules has experts, and the weights of experts are stored as {weights.format}; allowed with adapters on "
                f"this device: {', '.join(allowed)}. Leave experts out of adapters.modules, or load a checkpoint whose experts are stored so"
            )
        return AdaptedExperts(product, weights, self.low_rank, self.tokens)


class AdaptedExperts(ExpertsProduct):
    """Compute what ``product`` does, with what the adapters of the tokens add to both products of each expert. If no token of the
    step has an adapter, every method is that of ``product``."""

    def __init__(
        self, product: ExpertsProduct, weights: ExpertWeights, low_rank: ExpertPairLowRank, tokens: AdaptedTokens
    ) -> None:
        self._product, self._weights, self._low_rank, self._tokens = product, weights, low_rank, tokens

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        """See ``ExpertsProduct``."""
        tokens = self._tokens.current
        if tokens is None:
            return self._product.forward(x, routing, shared)
        return adapted_experts(x, routing, self._weights, shared, self._low_rank, tokens)

    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor | None:
        """See ``ExpertsProduct``."""
        return self._product.parts(x, routing) if self._tokens.current is None else None

    @property
    def describe(self) -> str:
        """See ``ExpertsProduct``."""
        return self._product.describe
