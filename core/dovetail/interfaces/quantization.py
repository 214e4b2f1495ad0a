"""Define how linear layers store their weights and multiply with them.

Without a component of this kind, a layer holds its weight ``[out, in]`` in the model's dtype. A component chooses a
``LinearMethod`` for each layer whose weight is stored in another form: it declares the parameters that take the place of the
weight, where the tensors of the checkpoint go, and what computes the product. Models do not know about it: their layers
and their ``weights_map`` are those of the unquantized model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.model import WeightTarget

Activation = Literal["silu", "gelu_tanh"]
"""Name the function of the gate in a gated feed-forward layer."""


@dataclass(frozen=True, slots=True)
class QuantizationContext:
    """Describe the model that is built. ``checkpoint`` is the ``quantization_config`` of config.json, or None if the
    checkpoint is not quantized. ``dtype`` is the dtype of activations and of the layers that are not quantized."""

    checkpoint: Mapping[str, Any] | None
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Describe this rank's share of one linear layer, ``[out_features, in_features]``.

    ``names`` are the modules of the checkpoint whose weights it holds, such as ``model.layers.0.self_attn.q_proj``, in
    the order of their rows. ``rows`` are their numbers of rows. Layers that are ``precise`` are not quantized while an
    unquantized checkpoint is loaded, because small errors in them matter: the head, and routers.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    in_features: int
    precise: bool = False

    @property
    def out_features(self) -> int:
        """Return the number of rows of all modules."""
        return sum(self.rows)


class ParameterShape(NamedTuple):
    """Describe a parameter that is allocated for a layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class LinearProduct(ABC):
    """Multiply with the weight of one layer. It is made when the parameters are filled, and used until they change."""

    in_parts: bool = False
    """Hold True if ``parts`` may return parts."""

    @abstractmethod
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Map contiguous ``x [tokens, in]`` to ``[tokens, out]``, with ``bias [out]`` added. Mutates nothing. On CUDA it
        can be captured, and does not wait for the device."""

    @abstractmethod
    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """Compute ``activation(gate) * up``, where ``forward(x, bias)`` is ``[gate, up]`` side by side: map contiguous
        ``x [tokens, in]`` to ``[tokens, out / 2]``. ``ops.activation.GATES`` has the functions."""

    def parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the product without a bias in parts that are still to be added up, float32 ``[parts, tokens, out]``,
        or None if it is not computed in parts. The norm that follows then adds them up (``ops.parts.Parts``)."""
        return None

    @property
    @abstractmethod
    def describe(self) -> str:
        """Return a text for people that names what computes the product."""


class LinearMethod(ABC):
    """Store the weight of one linear layer, and multiply with it. A method is made for each layer, before its parameters are
    allocated."""

    @abstractmethod
    def parameters(self) -> Mapping[str, ParameterShape]:
        """Return the parameters that take the place of ``weight``, by name. ``bias`` stays a parameter of the layer in
        the model's dtype, if there is one."""

    @abstractmethod
    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the tensors of the checkpoint that belong to module ``name`` (without its bias) and their targets.

        ``weight`` is the target that the module's weight would have in an unquantized model: the rows of parameter
        ``weight`` that it fills, this rank's shares of the tensor ``[out, in]``, and a transform. The ``parameter`` of
        each target is one of the names that ``parameters`` returns. Every row of every parameter must be filled once. A
        tensor may occur several times, with different targets. Raises ``ConfigError`` if the weight cannot be divided
        or transformed in that way.
        """

    @abstractmethod
    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """Fill ``parameters`` so that the weight is uniform between ``-limit`` and ``limit``, for measurements without a
        checkpoint."""

    @abstractmethod
    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        """Return the product with the weight in ``parameters``. The tensors stay as they are as long as the product is
        used; it may hold copies of them."""


class Quantization(ABC):
    """Choose the method of each linear layer. A component's ``describe`` ("module:function") is called before the
    component is chosen: ``describe(checkpoint, config)``, with the checkpoint's ``quantization_config`` or None, returns
    None if the component can load this checkpoint, or the reason why it cannot. It must not import torch."""

    @abstractmethod
    def __init__(self, config: Any, context: QuantizationContext) -> None:
        """Read the checkpoint's ``quantization_config``. Raises ``ConfigError`` for what is not implemented."""

    @abstractmethod
    def method(self, shape: LinearShape) -> LinearMethod | None:
        """Return the method of a layer, or None for a layer that is not quantized. Raises ``ConfigError`` if only some
        of the modules of a layer are quantized, or if its sizes are not possible."""
