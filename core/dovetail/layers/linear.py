"""Define linear layers. ``ColumnLinear`` and ``RowLinear`` are divided among the ranks of a mesh: the first by its
outputs, the second by its inputs. Every rank of a ``Linear`` holds the whole weight."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.interfaces.model import TensorShare, WeightTarget, WeightTransform
from dovetail.interfaces.quantization import ActivationQuantizer, LinearInput, LinearMethod, LinearProduct
from dovetail.layers.base import Layer, deferrable_parameter, parameter
from dovetail.ops.activation import GATES, Activation, gate_rows
from dovetail.ops.cpu.kernels import kernels
from dovetail.ops.linear import (
    compiled_rows,
    describe,
    few_rows,
    invariant_rows,
    linear,
    linear_float32,
    packed,
    packed_linear,
    wide_product,
)
from dovetail.ops.parts import Parts, RankAddend

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.layers.adapters import LinearAdapters
    from dovetail.ops.adapter_weights import LowRankWeights
    from dovetail.ops.parts import Addend
    from dovetail.ops.triton.adapted_rows import AdaptedRows
    from dovetail.ops.triton.invariant import InvariantRows
    from dovetail.ops.triton.matmul import FewRows

NO_TRANSFORMS: Mapping[str, WeightTransform] = MappingProxyType({})


class DenseProduct(LinearProduct):
    """Multiply with a ``weight [out, in]`` in the dtype of activations. On the CPU it keeps a second copy of the weight,
    in the order that oneDNN's kernels read; on CUDA it chooses the kernels for few rows. With ``batch_invariant``, the
    bits of a row do not depend on the number of rows; raises ``ConfigError`` if there are no such products for the
    weight."""

    def __init__(self, weight: torch.Tensor, *, batch_invariant: bool = False) -> None:
        self._weight = weight
        self._packed = packed(weight)
        self._compiled_rows = compiled_rows(weight)
        self._compiled = kernels(weight.dtype) if self._compiled_rows else None
        self._few_rows: FewRows | InvariantRows | None
        self._few_rows = invariant_rows(weight) if batch_invariant else few_rows(weight)
        self._batch_invariant = batch_invariant
        self.in_parts = self._few_rows is not None

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        if self._compiled is not None and x.shape[0] <= self._compiled_rows:
            return self._compiled.product(x, self._weight, bias)
        if self._few_rows is not None and x.shape[0] <= self._few_rows.most_rows:
            return self._few_rows(x, bias)
        return linear(x, self._weight, bias) if self._packed is None else packed_linear(x, self._packed, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """See ``LinearProduct``."""
        if self._few_rows is not None and x.shape[0] <= self._few_rows.most_rows:
            return self._few_rows.gated(x, bias, activation)
        return GATES[activation](self.forward(x, bias))

    def parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """See ``LinearProduct``."""
        if self._few_rows is not None and x.shape[0] <= self._few_rows.most_rows:
            parts = self._few_rows.parts(x)
            return None if parts is None else parts.addends
        return None

    def gate_rows(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """See ``LinearProduct``."""
        return gate_rows(x, self._weight, y) if x.is_cuda and len(self._weight) == 1 else None

    def adapted_rows(self, weights: LowRankWeights) -> AdaptedRows | None:
        """Return kernels that compute this product of few rows and add what adapters make of them, or None if this product
        has none."""
        if self._few_rows is None or self._batch_invariant:
            return None
        from dovetail.ops.triton.adapted_rows import AdaptedRows

        return AdaptedRows(self._weight, weights)

    @property
    def fast_row(self) -> bool:
        """Return whether a product of one row is computed by a kernel for one row, whose bits may depend on the number of rows."""
        return self._few_rows is not None and not self._batch_invariant

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return describe(self._weight, batch_invariant=self._batch_invariant)


class QuantizedGate(LinearProduct):
    """Multiply as ``product`` does, and quantize the result of ``gated`` for the layer that reads it."""

    def __init__(self, product: LinearProduct, quantizer: ActivationQuantizer) -> None:
        self._product, self._quantizer = product, quantizer
        self.in_parts, self.quantizer = product.in_parts, product.quantizer

    def forward(self, x: LinearInput, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        return self._product.forward(x, bias)

    def gated(self, x: LinearInput, bias: torch.Tensor | None, activation: Activation) -> Any:
        """See ``LinearProduct``, but return ``QuantizedActivations`` of more rows than ``few_rows``."""
        if x.shape[0] <= self._quantizer.few_rows:
            return self._product.gated(x, bias, activation)
        return self._quantizer.gate(self._product.forward(x, bias), activation)

    def parts(self, x: LinearInput) -> torch.Tensor | None:
        """See ``LinearProduct``."""
        return self._product.parts(x)

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return self._product.describe


class Linear(Layer):
    """Compute ``x [tokens, in] @ weight [out, in].T + bias [out]``. With ``batch_invariant``, the bits of a row do not
    depend on the number of rows. ``activation`` is the function of ``gated_forward``.

    If a quantization gives the layer a ``method``, the method's parameters take the place of ``weight``. Layers that
    are ``precise`` keep their weight when an unquantized checkpoint is quantized. ``adapters`` are added to the product of
    a layer that has them; layers whose weight is used in other ways than by the product have ``adaptable`` False. With
    ``reads_selected``, the input consists of rows that were selected of what the layer before it returns.
    """

    batch_invariant = False
    activation: Activation = "silu"
    precise = False
    adaptable = True
    reads_selected = False
    adapters: LinearAdapters | None = None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = deferrable_parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self.method: LinearMethod | None = None
        self._product: LinearProduct
        self._added: torch.Tensor | None = None
        self._in_parts = False

    def allocate(self, method: LinearMethod | None, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate the parameters that were deferred: those of ``method``, or the weight in ``dtype``."""
        self.method = method
        if method is None:
            if self.weight.is_meta:
                self.weight = nn.Parameter(torch.empty(self.weight.shape, dtype=dtype, device=device), False)
            return
        del self.weight
        for name, (shape, own_dtype) in method.parameters().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=own_dtype, device=device), False))

    def prepare(self) -> None:
        """See ``Layer.prepare``. Raises ``ConfigError`` if ``batch_invariant`` is set and there are no such products for
        the weight."""
        if self.method is None:
            self._product = DenseProduct(self.weight, batch_invariant=self.batch_invariant)
        else:
            names = self.method.parameters()
            self._product = self.method.prepare({name: getattr(self, name).detach() for name in names})
        if self.adapters is not None:
            own = self._product
            rows = own.adapted_rows(self.adapters.weights) if isinstance(own, DenseProduct) else None
            self._product = self.adapters.around(own, rows)
        self._added = self.bias
        self._in_parts = self._product.in_parts and self.bias is None
        super().prepare()

    def quantize_gate(self, quantizer: ActivationQuantizer) -> None:
        """Let ``gated_forward`` return ``QuantizedActivations`` for the layer that reads it, until this layer is prepared
        again."""
        self._product = QuantizedGate(self.product, quantizer)

    @property
    def product(self) -> LinearProduct:
        """Return what multiplies with the weight."""
        if not self.prepared:
            self.prepare()
        return self._product

    def forward(self, x: LinearInput) -> torch.Tensor:
        """Map contiguous ``x [tokens, in]`` to ``[tokens, out]``. Mutates nothing."""
        if not self.prepared:
            self.prepare()
        return self._product.forward(x, self._added)

    def parts_forward(self, x: LinearInput) -> Addend:
        """Compute ``forward``, but leave it to ``RMSNorm.add_forward`` to add up the parts that the kernel computes, or
        the addends of the ranks."""
        if self.prepared and not self._in_parts:
            return self.forward(x)
        parts = self._parts(x)
        return self.forward(x) if parts is None else Parts(parts)

    def addend_forward(self, x: LinearInput) -> torch.Tensor:
        """Return what this rank adds to ``forward``: all of it, unless the inputs are divided among ranks."""
        return self.forward(x)

    def _parts(self, x: LinearInput) -> torch.Tensor | None:
        """Return the parts of the product, or None if it is not computed in parts."""
        if not self.prepared:
            self.prepare()
        return self._product.parts(x) if self._in_parts else None

    def gated_forward(self, x: LinearInput) -> torch.Tensor:
        """Compute the gate of ``forward(x)``, whose first half opens it: map contiguous ``x [tokens, in]`` to ``[tokens,
        out / 2]``. Mutates nothing."""
        if not self.prepared:
            self.prepare()
        return self._product.gated(x, self._added, self.activation)

    def gate_rows_forward(self, x: LinearInput, y: torch.Tensor) -> torch.Tensor:
        """Return ``sigmoid(forward(x)) * y`` for a layer of one output: each row of ``y [tokens, width]`` has its own gate.
        Mutates nothing."""
        gated = self.product.gate_rows(x, y) if self._added is None else None
        return torch.sigmoid(self.forward(x)) * y if gated is None else gated

    def dense_weight(self) -> torch.Tensor:
        """Return the weight ``[out, in]`` in a floating-point dtype of at least 16 bits: the parameter itself, or, if a
        quantization stores it in another form, a new tensor. Raises ``ConfigError`` if its method cannot convert it."""
        if self.method is None:
            return self.weight.detach()
        return self.method.dequantized({name: getattr(self, name).detach() for name in self.method.parameters()})

    def target(self, parameter: str, part: str | None = None) -> WeightTarget:
        """Return where a tensor of the checkpoint goes that is this layer's weight or bias, or those of projection
        ``part``. ``parameter`` is the full name of the weight or bias in the model."""
        return WeightTarget(parameter)


class Float32Product(LinearProduct):
    """Multiply with a 16-bit ``weight [out, in]`` on CUDA, and return float32 (see ``linear_float32``)."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``. ``x`` has the weight's dtype."""
        return linear_float32(x, self._weight, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """See ``LinearProduct``."""
        return GATES[activation](self.forward(x, bias))

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        return "cuBLAS, float32 results"


class Float32Linear(Linear):
    """Compute a ``Linear`` in float32, whatever the model's dtype: its outputs are float32."""

    adaptable = False

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        if self.method is not None:
            super().prepare()
            return
        self._wide = wide_product(self.weight)
        self._product = Float32Product(self.weight) if self._wide else DenseProduct(self.weight.float())
        self._added = None if self.bias is None else self.bias.float()
        self._in_parts = False
        Layer.prepare(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Map contiguous ``x [tokens, in]`` to ``[tokens, out]``. Mutates nothing."""
        if self.method is not None:
            return super().forward(x).float()
        if not self.prepared:
            self.prepare()
        return super().forward(x if self._wide else x.float())


class ColumnLinear(Linear):
    """Compute several projections of one input with one parameter, which holds this rank's share of the outputs of
    each.

    ``parts`` names the projections and their numbers of outputs, in order. Outputs are divided in units of ``unit``,
    which is ``head_dim`` for the projections of attention, or the unit of each projection. If a projection has fewer units
    than there are ranks, several ranks hold the same unit (see ``Collectives.share``). Projections in ``whole`` are not
    divided. ``transforms`` change the tensors of some projections; they must leave the units whole.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        mesh: Mesh,
        *,
        bias: bool = False,
        unit: int | Mapping[str, int] = 1,
        transforms: Mapping[str, WeightTransform] = NO_TRANSFORMS,
        whole: Collection[str] = (),
    ) -> None:
        units = dict.fromkeys(parts, unit) if isinstance(unit, int) else unit
        own = {
            name: (0, width) if name in whole else tuple(units[name] * n for n in mesh.tp.share(width // units[name]))
            for name, width in parts.items()
        }
        super().__init__(in_features, sum(size for _, size in own.values()), bias=bias)
        self._places: dict[str, tuple[int, int, tuple[TensorShare, ...], WeightTransform | None]] = {}
        self._fused: dict[str, TensorShare] = {}
        end, before, total = 0, 0, sum(parts.values())
        for name, (start, size) in own.items():
            shares = (TensorShare(0, start, size, parts[name]),) if mesh.tp.size > 1 and name not in whole else ()
            self._places[name] = (end, size, shares, transforms.get(name))
            self._fused[name] = TensorShare(0, before + start, size, total)
            end += size
            before += parts[name]

    def target(self, parameter: str, part: str | None = None) -> WeightTarget:
        """See ``Linear.target``. ``part`` is the name of one of the projections, and may be left out if there is only one."""
        if part is None and len(self._places) == 1:
            (part,) = self._places
        if part not in self._places:
            raise ValueError(
                f"the target of {parameter!r} is one of several projections; part is {part!r}; allowed: {', '.join(self._places)}"
            )
        return WeightTarget(parameter, *self._places[part])

    def fused_targets(self, parameter: str) -> list[WeightTarget]:
        """Return where a tensor of the checkpoint goes that contains all projections side by side, in their order."""
        return [self.target(parameter, name)._replace(shares=(share,)) for name, share in self._fused.items()]


def row_linear(in_features: int, out_features: int, mesh: Mesh, *, bias: bool = False) -> Linear:
    """Return a ``RowLinear``, or, on the only rank, a ``Linear``, which has less to do in each call."""
    if mesh.tp.size == 1:
        return Linear(in_features, out_features, bias=bias)
    return RowLinear(in_features, out_features, mesh, bias=bias)


class RowLinear(Linear):
    """Compute a product whose inputs are divided among several ranks: this rank's inputs and columns of the weight give
    an addend of every output, and the ranks add these up. One rank adds the bias. See ``row_linear``."""

    def __init__(self, in_features: int, out_features: int, mesh: Mesh, *, bias: bool = False) -> None:
        start, size = mesh.tp.share(in_features)
        super().__init__(size, out_features, bias=bias)
        self._tp = mesh.tp
        self._share = TensorShare(1, start, size, in_features)

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        super().prepare()
        if self._tp.rank:
            self._added = None

    def forward(self, x: LinearInput) -> torch.Tensor:
        """Map contiguous ``x [tokens, in]``, this rank's inputs, to ``[tokens, out]``. Mutates nothing."""
        return self._tp.all_reduce(super().forward(x))

    def addend_forward(self, x: LinearInput) -> torch.Tensor:
        """See ``Linear.addend_forward``."""
        return super().forward(x)

    def parts_forward(self, x: LinearInput) -> Addend:
        """See ``Linear.parts_forward``."""
        parts = self._parts(x) if self._tp.adds_parts else None
        return RankAddend(super().forward(x) if parts is None else parts, self._tp)

    def target(self, parameter: str, part: str | None = None) -> WeightTarget:
        """See ``Linear.target``."""
        return WeightTarget(parameter, shares=(self._share,) if parameter.endswith("weight") else ())


def make_batch_invariant(model: nn.Module) -> None:
    """Make all linear layers of ``model`` compute each row to the same bits regardless of the other rows, from their
    next ``prepare`` on. Raises ``ConfigError`` if there are no such products for a weight, for a ``Float32Linear``, and if a module outside of
    ``dovetail.layers`` has parameters: in its products, rows may depend on each other.
    """
    for name, module in model.named_modules():
        if not isinstance(module, Layer) and any(True for _ in module.parameters(recurse=False)):
            raise ConfigError(
                f"batch_invariant is true, and {name or 'the model'} is a {type(module).__name__} with its own "
                "parameters; allowed: layers of dovetail.layers. Set batch_invariant: false"
            )
        if isinstance(module, Float32Linear):
            raise ConfigError(
                f"batch_invariant is true, and {name} computes in float32; allowed: layers that compute in bfloat16 or float16. "
                "Set batch_invariant: false"
            )
        if isinstance(module, Linear) and module.method is None:
            invariant_rows(module.weight)
        if isinstance(module, Linear):
            module.batch_invariant = True
            module.prepared = False
