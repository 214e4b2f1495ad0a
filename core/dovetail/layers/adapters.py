"""Let linear layers multiply with adapters (LoRA), whatever stores their weights: ``Linear.prepare`` wraps the product of a
layer that has ``adapters``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dovetail.interfaces.quantization import LinearProduct
from dovetail.ops.activation import GATES
from dovetail.ops.adapter_weights import LowRankWeights, TokenSlots
from dovetail.ops.low_rank import add_low_rank

if TYPE_CHECKING:
    from dovetail.interfaces.quantization import Activation
    from dovetail.ops.triton.low_rank_few import AdaptedRows


@dataclass(slots=True, eq=False)
class AdaptedTokens:
    """Hold the slots of the tokens of the forward pass that runs, or None if no token has an adapter. All layers of a model
    share it."""

    current: TokenSlots | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LinearAdapters:
    """Hold the adapters of one layer, in slots, and which of them the tokens of a step have."""

    weights: LowRankWeights
    tokens: AdaptedTokens

    def around(self, product: LinearProduct, rows: AdaptedRows | None = None) -> LinearProduct:
        """Return ``product`` with what the adapters add to it. ``rows`` computes both for few rows."""
        return AdaptedProduct(product, self.weights, self.tokens, rows)


class AdaptedProduct(LinearProduct):
    """Multiply as ``product`` does, and add what the adapters of the tokens make of the input. If no token of the step has an
    adapter, every method is that of ``product``. The input is not quantized before it arrives, because adapters need it
    as it is: ``product`` quantizes it itself."""

    def __init__(
        self, product: LinearProduct, weights: LowRankWeights, tokens: AdaptedTokens, rows: AdaptedRows | None
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
