"""Define what computes the products of experts: feed-forward layers of which each token uses a few.

A backend makes one product for each layer, from the weights that the layer holds. How these weights are stored (their
format) is decided by the checkpoint and by components of kind ``quantization``; a backend declares the formats that it
multiplies. The router of a layer, its shared expert, and the ranks that divide its experts are not its concern.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.expert_shapes import ExpertWeights, Routing


@dataclass(frozen=True, slots=True)
class ExpertsContext:
    """Describe what a backend is built for: the layers of experts of one model on one device. ``dtype`` is that of
    activations and results.

    With ``batch_invariant``, the bits of a token's result depend only on the token, its experts and their weights, and
    on the layer. They do not depend on the other tokens of a step, on their number, or on whether the step is replayed
    from a graph. The engine sets it only for backends that offer ``experts.batch_invariant``.
    """

    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool = False


class ExpertsProduct(ABC):
    """Compute the experts of one layer that this rank has."""

    @abstractmethod
    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted sum of the results of each token's experts, in the shape and dtype of contiguous
        ``x [tokens, hidden]``, plus ``shared`` (of the same shape) if it is given. Mutates nothing.

        The result of an expert is ``down(activation(gate(x), up(x)))``, see ``ExpertWeights``. The sums are computed in float32.
        Experts that other ranks have add nothing. ``tokens`` may be 0, and all tokens may have the same experts. On CUDA
        the call does not wait for the device, which only backends without ``experts.graph`` may do.
        """

    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor | None:
        """Return addends whose sum over the first dimension is ``forward(x, routing, None)``, float32
        ``[parts, tokens, hidden]``, or None if the product for this number of tokens is not computed in parts. The norm
        that follows then adds them up (``ops.parts.Parts``), in one kernel with the residual. With ``batch_invariant``,
        whether there are parts must not depend on the number of tokens."""
        return None

    @property
    @abstractmethod
    def describe(self) -> str:
        """Return a text for people that names what computes the product."""


class ExpertsBackend(ABC):
    """Make the products of layers of experts. There is one instance per model and process."""

    @abstractmethod
    def __init__(self, config: Any, context: ExpertsContext) -> None:
        """Build the backend. ``config`` is its own config section. Raises ``ConfigError`` if the backend cannot serve
        ``context``."""

    @abstractmethod
    def product(self, weights: ExpertWeights) -> ExpertsProduct:
        """Return the product with the weights of one layer. Raises ``ConfigError`` if the backend cannot multiply them.

        ``weights.format`` is one of those that the component declares as features (``experts.plain`` and others). A backend
        that does not multiply codes may dequantize them (``ops.expert_formats``). The tensors stay as they are as long as the
        product is used; it may hold copies of them. The engine calls this before the weights are loaded, in order to note
        kernels that are compiled ahead, and again once they are.
        """
