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

    def around(self, product: LinearProduct) -> LinearProduct:
        """Return ``product`` with what the adapters add to it."""
        return AdaptedProduct(product, self.weights, self.tokens)


class AdaptedProduct(LinearProduct):
    """Multiply as ``product`` does, and add what the adapters of the tokens make of the input. If no token of the step has an
    adapter, every method is that of ``product``. The input is not quantized before it arrives, because adapters need it
    as it is: ``product`` quantizes it itself."""

    def __init__(self, product: LinearProduct, weights: LowRankWeights, tokens: AdaptedTokens) -> None:
        self._product, self._weights, self._tokens = product, weights, tokens
        self.in_parts = product.in_parts

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        out, tokens = self._product.forward(x, bias), self._tokens.current
        return out if tokens is None else add_low_rank(out, x, self._weights, tokens)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> Any:
        """See ``LinearProduct``."""
        if self._tokens.current is None:
            return self._product.gated(x, bias, activation)
        return GATES[activation](self.forward(x, bias))

    def parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """See ``LinearProduct``. With adapters there are no parts."""
        return self._product.parts(x) if self._tokens.current is None else None

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return self._product.describe
