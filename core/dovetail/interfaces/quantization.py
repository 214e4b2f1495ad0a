"""Define how linear layers and layers of experts store their weights, and how linear layers multiply with them.

Without a component of this kind, a layer holds its weight ``[out, in]`` in the model's dtype. A component chooses a
``LinearMethod`` for each layer whose weight is stored in another form: it declares the parameters that take the place of the
weight, where the tensors of the checkpoint go, and what computes the product. For a layer of experts it chooses an
``ExpertsMethod``, which does the same without computing the product. Models do not know about it: their layers
and their ``weights_map`` are those of the unquantized model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.expert_shapes import ExpertWeights
    from dovetail.interfaces.model import WeightTarget

Activation = Literal["silu", "gelu_tanh"]
"""Name the function of the gate in a gated feed-forward layer."""


@dataclass(frozen=True, slots=True)
class QuantizationContext:
    """Describe the model that is built. ``checkpoint`` is the ``quantization_config`` of config.json, or None if the
    checkpoint is not quantized. ``dtype`` is the dtype of activations and of the layers that are not quantized. If
    ``batch_invariant`` is set, which only components that offer ``quantization.batch_invariant`` see, the bits of a row of a product
    must not depend on the other rows, nor on how many there are. ``tensor_names`` reads the names of the tensors of the
    checkpoint, for formats in which ``checkpoint`` does not say which layers are quantized; it is None if weights are not read from
    safetensors files."""

    checkpoint: Mapping[str, Any] | None
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False
    tensor_names: Callable[[], Collection[str]] | None = None


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Describe this rank's share of one linear layer, ``[out_features, in_features]``.

    ``names`` are the modules of the checkpoint whose weights it holds, such as ``model.layers.0.self_attn.q_proj``, in
    the order of their rows. ``rows`` are their numbers of rows. Layers that are ``precise`` are not quantized while an
    unquantized checkpoint is loaded, because small errors in them matter: the head, and routers. ``whole_inputs`` is the
    number of inputs that all ranks together have, if they divide them.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    in_features: int
    precise: bool = False
    whole_inputs: int | None = None

    @property
    def out_features(self) -> int:
        """Return the number of rows of all modules."""
        return sum(self.rows)


@dataclass(frozen=True, slots=True)
class ExpertWeightsShape:
    """Describe what this rank holds of the weights of one layer of experts: those of ``count`` experts, which map
    ``hidden_size`` inputs to ``size`` intermediate values (or this rank's share of them) and back.

    ``names`` are the tensors of the checkpoint that an unquantized model reads the weights from, without their suffix
    ``.weight`` if they have it: for each expert ``model.layers.0.mlp.experts.7.gate_proj`` and so on, or
    ``model.layers.0.mlp.experts.gate_up_proj`` and ``....down_proj`` for all experts.
    """

    names: tuple[str, ...]
    count: int
    hidden_size: int
    size: int

    @property
    def gate_up(self) -> tuple[int, int]:
        """Return the shape of the unquantized parameter ``gate_up``: of each expert the rows of gate, then those of
        up."""
        return self.count * 2 * self.size, self.hidden_size

    @property
    def down(self) -> tuple[int, int]:
        """Return the shape of the unquantized parameter ``down``."""
        return self.count * self.hidden_size, self.size


class ParameterShape(NamedTuple):
    """Describe a parameter that is allocated for a layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class QuantizedActivations(NamedTuple):
    """Hold the input of a linear layer in the form that its product multiplies: ``codes [tokens, in]`` and ``scales``,
    whose shape the quantizer defines. ``dtype`` is that of the activations for which they stand, and of the result."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Return ``[tokens, in]``."""
        return self.codes.shape


LinearInput: TypeAlias = "torch.Tensor | QuantizedActivations"
"""What a linear layer receives: activations, or what the ``quantizer`` of its product made of them."""


class ActivationQuantizer(ABC):
    """Quantize the input of linear layers, alone or in the kernel that computes it.

    A product that multiplies quantized activations quantizes its input itself. The norm or the gate before it may do so
    instead, which saves a kernel that reads these activations again:

    - ``LinearProduct.quantizer`` is what quantizes the product's input, or None. Quantizers that are equal do the same.
    - A layer that contains a norm and all the linear layers that read it, such as ``DecoderLayer``, calls
      ``layers.quantized.quantize_output`` in ``Layer.connect``. If these layers have the same quantizer, the norm calls
      ``rms_norm``, ``add_rms_norm`` and ``add_parts_rms_norm`` of it in place of the functions of ``ops.norm``.
      ``GatedMLP`` lets its first product call ``gate`` in the same way, for the second product.
    - What they return takes the place of the tensor. It goes to ``LinearProduct.forward``, ``gated`` and ``parts`` only, which
      therefore accept both; layers and models pass it on. Where ranks add up the input of a norm in a kernel of their own,
      ``quantize`` follows.
    - Up to ``few_rows`` rows stay tensors, because the product multiplies them as they are: norms and gates are then
      those of the unquantized model.
    - A model whose layers do not connect norms and products computes the same, with one more kernel for each product.

    Every method gives the bits of ``quantize`` of the unquantized result, and can be captured on CUDA. The layers call them
    with more rows than ``few_rows``.
    """

    few_rows: int = 0
    """Hold the number of rows up to which the input stays a tensor."""

    @abstractmethod
    def quantize(self, x: torch.Tensor) -> QuantizedActivations:
        """Quantize contiguous ``x [tokens, in]``. Mutates nothing."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedActivations:
        """Quantize ``ops.norm.rms_norm(x, weight, eps)`` of ``x [tokens, in]``. Mutates nothing."""

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> QuantizedActivations:
        """Quantize ``ops.norm.add_rms_norm(x, residual, weight, eps)``. Overwrites ``x`` with the sum."""

    @abstractmethod
    def add_parts_rms_norm(
        self, parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        """Quantize the first result of ``ops.norm.add_parts_rms_norm(Parts(parts), residual, weight, eps)``, and return
        the second too. ``parts`` are float32 ``[parts, tokens, in]``. Mutates nothing."""

    @abstractmethod
    def gate(self, gate_up: torch.Tensor, activation: Activation) -> QuantizedActivations:
        """Quantize ``ops.activation.GATES[activation](gate_up)``, of contiguous ``[tokens, 2 * in]``. Mutates nothing."""


class LinearProduct(ABC):
    """Multiply with the weight of one layer. It is made when the parameters are filled, and used until they change."""

    in_parts: bool = False
    """Hold True if ``parts`` may return parts."""
    quantizer: ActivationQuantizer | None = None
    """Hold what may quantize the input in the kernel that computes it, or None if the product accepts tensors only."""

    @abstractmethod
    def forward(self, x: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """Map contiguous ``x [tokens, in]`` to ``[tokens, out]``, with ``bias [out]`` added. Mutates nothing. On CUDA it
        can be captured, and does not wait for the device. ``x`` is a ``LinearInput``; without a ``quantizer`` it is always a
        tensor, and a product may say so in its signature, here, in ``gated`` and in ``parts``."""

    @abstractmethod
    def gated(self, x: Any, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """Compute ``activation(gate) * up``, where ``forward(x, bias)`` is ``[gate, up]`` side by side: map contiguous
        ``x [tokens, in]`` to ``[tokens, out / 2]``. ``ops.activation.GATES`` has the functions."""

    def parts(self, x: Any) -> torch.Tensor | None:
        """Return the product without a bias in parts that are still to be added up, float32 ``[parts, tokens, out]``,
        or None if it is not computed in parts. The norm that follows then adds them up (``ops.parts.Parts``)."""
        return None

    def gate_rows(self, x: Any, y: torch.Tensor) -> torch.Tensor | None:
        """Return ``sigmoid(forward(x, None)) * y`` with ``y [tokens, width]``, for a weight ``[1, in]``, or None if it is not
        computed together. Mutates nothing."""
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

    def dequantized(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight ``[out, in]`` in ``parameters`` as a new tensor in the dtype of activations. Latent attention
        needs it: it multiplies with parts of the weight in another way. Raises ``ConfigError`` if the method does not
        implement it."""
        raise ConfigError(
            f"{type(self).__name__} cannot convert a weight back, which latent attention needs for kv_b_proj; exclude the module "
            "from the quantization, or use a checkpoint in FP8 or without quantization"
        )


class ExpertsMethod(ABC):
    """Store the weights of one layer of experts in a format that the kernels of experts multiply with. A method is made
    for each layer, before its parameters are allocated."""

    @abstractmethod
    def parameters(self) -> Mapping[str, ParameterShape]:
        """Return the parameters that take the place of ``gate_up`` and ``down``, by name. Biases stay parameters of the
        layer in the model's dtype."""

    @abstractmethod
    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the tensors of the checkpoint that store tensor ``name`` of an unquantized checkpoint, and their targets.

        ``name`` is the whole name, such as ``model.layers.0.mlp.experts.7.gate_proj.weight`` or
        ``model.layers.0.mlp.experts.gate_up_proj``. ``weight`` is one of its targets in the unquantized model: rows of
        parameter ``gate_up`` or ``down`` (see ``ExpertWeightsShape``), this rank's shares of the tensor, and a transform:
        None for a matrix of one expert, or ``Reshape`` or ``OneExpert`` for a tensor that holds several experts
        (``layers.expert_targets``). The ``parameter`` of each target is one of the names that ``parameters`` returns. Every
        row of every parameter must be filled once. Raises ``ConfigError`` if the weight cannot be divided or
        transformed in that way.
        """

    @abstractmethod
    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """Fill ``parameters`` so that the weights are uniform between ``-limit`` and ``limit``, for measurements without
        a checkpoint."""

    @abstractmethod
    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        """Return the weights in ``parameters``: their format, codes and scales. The layer adds the other fields. The
        tensors stay as they are as long as the result is used."""


class Quantization(ABC):
    """Choose the method of each linear layer and of each layer of experts. A component's ``describe`` ("module:function") is called before the
    component is chosen: ``describe(checkpoint, config)``, with the checkpoint's ``quantization_config`` or None, returns
    None if the component can load this checkpoint, or the reason why it cannot. It must not import torch. Neither does
    ``expert_format`` of a component that offers ``quantization.experts``: with the same arguments, it returns the
    ``ExpertFormat`` of experts that are quantized, by which a backend of experts is chosen."""

    @abstractmethod
    def __init__(self, config: Any, context: QuantizationContext) -> None:
        """Read the checkpoint's ``quantization_config``. Raises ``ConfigError`` for what is not implemented."""

    def check_modules(self, names: Collection[str]) -> None:
        """Raise ``ConfigError`` if a setting of the component's config names modules, and none of ``names`` is one of
        them. ``names`` are the modules of the checkpoint from which the model reads, on all ranks. Called before the first ``method``."""

    @abstractmethod
    def method(self, shape: LinearShape) -> LinearMethod | None:
        """Return the method of a layer, or None for a layer that is not quantized. Raises ``ConfigError`` if only some
        of the modules of a layer are quantized, or if its sizes are not possible."""

    def check_layers(self) -> None:
        """Raise ``ConfigError`` if the component's config has a setting that applies to no layer. Called once, after the last ``method``
        and ``experts_method`` of the served model; not for models of drafters."""

    def stores_tied(self, module: str) -> bool:
        """Return True if module ``module``, whose weight the model ties to that of another one, is to be read from the
        checkpoint and stored by its own method. The default returns False."""
        return False

    def experts_method(self, shape: ExpertWeightsShape) -> ExpertsMethod | None:
        """Return the method of a layer of experts, or None for a layer that is not quantized. A component that offers
        ``quantization.experts`` overrides it. Raises like ``method``."""
        return None
