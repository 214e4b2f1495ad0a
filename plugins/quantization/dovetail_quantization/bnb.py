"""Store weights as bitsandbytes does: codes of 4 bits (NF4, FP4) with scales of blocks, or int8 with scales of rows (LLM.int8)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.model import TensorShare, WeightTarget, WeightTransform
from dovetail.interfaces.quantization import (
    ExpertsMethod,
    ExpertWeightsShape,
    LinearMethod,
    LinearProduct,
    LinearShape,
    ParameterShape,
    Quantization,
    QuantizationContext,
)
from dovetail.ops.integers import Integers, dequantize
from dovetail_quantization.bnb_experts import DequantizedExperts
from dovetail_quantization.bnb_formats import BnbFormat, read_format
from dovetail_quantization.bnb_tensors import (
    TABLES,
    BlockScales,
    MatrixPart,
    NestedScales,
    PackedCodes,
    QuantState,
    ScaleCodes,
    Table,
    check_scales,
)
from dovetail_quantization.checkpoint import leaves_out, listed, module_index
from dovetail_quantization.dequantized import DequantizedLinear
from dovetail_quantization.integer_formats import IntegerActivations
from dovetail_quantization.integer_products import make_product
from dovetail_quantization.invariant_products import InvariantLinear
from dovetail_quantization.table_weights import TableWeight, code_bytes, padded_scales

if TYPE_CHECKING:
    from dovetail_quantization.config import BitsandbytesConfig


class Bitsandbytes(Quantization):
    """Choose the format of the checkpoint for every linear layer that it does not leave out. Version 4 of transformers has quantized routers
    and experts with the other layers, and version 5 does not; the config of both is the same. So the tensors of the checkpoint decide.
    Where there are none, experts are quantized, and routers are not."""

    def __init__(self, config: BitsandbytesConfig, context: QuantizationContext) -> None:
        self._format, self._context = read_format(context.checkpoint, config), context
        self._layer = RowInt8Linear if self._format.kind == "int8" else FourBitLinear

    @cached_property
    def _tensors(self) -> Collection[str] | None:
        return None if self._context.tensor_names is None else self._context.tensor_names()

    def method(self, shape: LinearShape) -> LinearMethod | None:
        """See ``Quantization``."""
        if leaves_out(shape.names, self._format.ignored):
            return None
        if shape.precise and not self._stores(shape.names, or_else=False):
            return None
        return self._layer(shape, self._format, self._context)

    def experts_method(self, shape: ExpertWeightsShape) -> ExpertsMethod | None:
        """See ``Quantization``."""
        if leaves_out(shape.names, self._format.ignored) or not self._stores(shape.names, or_else=True):
            return None
        return DequantizedExperts(shape, lambda own: self._layer(own, self._format, self._context))

    def _stores(self, modules: Sequence[str], *, or_else: bool) -> bool:
        """Return whether the checkpoint has scales for the weights of these modules, or ``or_else`` if its tensors are not known. Raises
        ``ConfigError`` if it has them for some only."""
        if self._tensors is None:
            return or_else
        scales = "SCB" if self._format.kind == "int8" else "weight.absmax"
        lacking = [name for name in modules if f"{name}.{scales}" not in self._tensors]
        if lacking and len(lacking) < len(modules):
            raise ConfigError(
                f"the checkpoint has scales of bitsandbytes for some modules of a layer, but not for {listed(lacking)}; all of them or none "
                "can be quantized. Download it again, or write it again with transformers"
            )
        return not lacking


class BnbLinear(LinearMethod):
    """Store one layer of a checkpoint of bitsandbytes."""

    def __init__(self, shape: LinearShape, form: BnbFormat, context: QuantizationContext) -> None:
        self.shape, self.form, self.context = shape, form, context

    def refuse_transform(self, name: str, weight: WeightTarget) -> None:
        """Raise ``ConfigError`` for a transform that changes more than the order of rows."""
        if weight.transform is not None and not weight.transform.orders_rows:
            raise ConfigError(f"{name} is read through {weight.transform}, which is not implemented for bitsandbytes")


class FourBitLinear(BnbLinear):
    """Store codes in the words of ``table_weights``: parameter ``packed``. ``scale [out, blocks]`` has the scales of the checkpoint; if these are codes of 8 bits, their numbers are in ``scale_table`` of each module, their scales in ``nested``, and
    ``offset`` is added."""

    def __init__(self, shape: LinearShape, form: BnbFormat, context: QuantizationContext) -> None:
        super().__init__(shape, form, context)
        if shape.in_features % form.block:
            raise ConfigError(
                f"{shape.names[0]} has {shape.in_features} columns on this rank, which blocks of {form.block} do not divide; implemented: blocks "
                "that end with a row. Set parallel.tp to a smaller number if ranks divide the columns"
            )

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``LinearMethod``."""
        rows, columns, modules = self.shape.out_features, self.shape.in_features, len(self.shape.names)
        scales = (rows, columns // self.form.block)
        found = {
            "packed": ParameterShape((rows, code_bytes(columns)), torch.uint8),
            "scale": ParameterShape(scales, torch.uint8 if self.form.double else torch.float32),
            "table": ParameterShape((modules, 16), torch.float32),
            "offset": ParameterShape((modules, 1), torch.float32),
        }
        if self.form.double:
            found["nested"] = ParameterShape(scales, torch.float32)
            found["scale_table"] = ParameterShape((modules, 256), torch.float32)
        return found

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``LinearMethod``."""
        self.refuse_transform(name, weight)
        form, place, own = self.form, module_index(self.shape, weight), f"{name}.weight"
        size = self.shape.rows[place]
        shares = {share.dim: share for share in weight.shares}
        rows, columns = shares.get(0), shares.get(1)
        rows = rows or TensorShare(0, 0, size, size)
        columns = columns or TensorShare(1, 0, self.shape.in_features, self.shape.in_features)
        if columns.start % form.block or columns.whole % form.block:
            raise ConfigError(
                f"{name} has {columns.whole} columns, of which this rank takes {columns.size} from column {columns.start} on, and these cut "
                f"a block of {form.block}; set parallel.tp to a smaller number"
            )

        def part(tensor: str) -> MatrixPart:
            return MatrixPart(tensor, rows, columns, weight.transform)

        def filled(parameter: str, transform: WeightTransform) -> WeightTarget:
            return WeightTarget(parameter, weight.start, weight.size, transform=transform)

        def one(parameter: str, transform: WeightTransform) -> WeightTarget:
            return WeightTarget(parameter, place, 1, transform=transform)

        scales, state = f"{own}.absmax", f"{own}.quant_state.bitsandbytes__{form.kind}"
        yield own, filled("packed", PackedCodes(part(own)))
        yield f"{own}.quant_map", one("table", Table(f"{own}.quant_map", 16, form.kind))
        yield state, one("offset", QuantState(part(state), form.kind, form.block, form.double))
        if not form.double:
            yield scales, filled("scale", BlockScales(part(scales), form.block))._replace(check=check_scales)
            return
        yield scales, filled("scale", ScaleCodes(part(scales), form.block))
        nested, numbers = f"{own}.nested_absmax", f"{own}.nested_quant_map"
        yield nested, filled("nested", NestedScales(part(nested), form.block))._replace(check=check_scales)
        yield numbers, one("scale_table", Table(numbers, 256))._replace(check=check_scales)

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``LinearMethod``."""
        parameters["packed"].random_(0, 256, generator=generator)
        parameters["scale"].fill_(0 if self.form.double else limit)
        parameters["table"].copy_(parameters["table"].new_tensor(TABLES[self.form.kind]))
        parameters["offset"].fill_(0.0)
        if self.form.double:
            parameters["nested"].fill_(limit)
            parameters["scale_table"].fill_(1.0)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        """See ``LinearMethod``."""
        weight, dtype = self._weight(parameters), self.context.dtype
        if weight.codes.is_cuda:
            from dovetail_quantization.table_product import TableProduct

            product = TableProduct(weight)
            return InvariantLinear(product.weight, dtype, weight.kind) if self.context.batch_invariant else product
        if self.context.batch_invariant:
            plain = weight.dequantized(dtype)
            return InvariantLinear(lambda _: plain, dtype, weight.kind)
        return DequantizedLinear(weight.dequantized(dtype), weight.kind)

    def dequantized(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``LinearMethod``."""
        return self._weight(parameters).dequantized(self.context.dtype)

    def _weight(self, parameters: Mapping[str, torch.Tensor]) -> TableWeight:
        """Return the weight with the scales of the checkpoint."""
        form, scales = self.form, parameters["scale"]
        if form.double:
            rows = list(self.shape.rows)
            nested, codes = parameters["nested"].split(rows), scales.split(rows)
            scales = torch.empty_like(parameters["nested"])
            for index, own in enumerate(scales.split(rows)):
                table = parameters["scale_table"][index]
                own.copy_(table[codes[index].int()] * nested[index] + parameters["offset"][index])
        held = padded_scales(scales, form.block)
        columns = self.shape.in_features
        return TableWeight(parameters["packed"], held, TABLES[form.kind], columns, form.block, form.kind.upper())


class RowInt8Linear(BnbLinear):
    """Store int8 numbers with a scale for each row (LLM.int8): 127 stands for ``SCB``. Activations are not quantized, so that there
    are no outliers to compute apart."""

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``LinearMethod``."""
        rows, columns = self.shape.out_features, self.shape.in_features
        return {
            "weight": ParameterShape((rows, columns), torch.int8),
            "scale": ParameterShape((rows,), torch.float32),
            "form": ParameterShape((len(self.shape.names),), torch.uint8),
        }

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``LinearMethod``."""
        self.refuse_transform(name, weight)
        rows = tuple(share for share in weight.shares if share.dim == 0)
        yield f"{name}.weight", weight
        yield f"{name}.SCB", weight._replace(parameter="scale", shares=rows, check=check_scales)
        form = WeightTarget(
            "form", module_index(self.shape, weight), 1, transform=RowMajor(), check=_check_form, default=0.0
        )
        yield f"{name}.weight_format", form

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``LinearMethod``."""
        parameters["weight"].random_(-127, 128, generator=generator)
        parameters["scale"].fill_(limit)
        parameters["form"].fill_(0)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        """See ``LinearMethod``."""
        weight, invariant = self._weight(parameters), self.context.batch_invariant
        return make_product(weight, None, IntegerActivations.WHOLE, None, self.context.dtype, batch_invariant=invariant)

    def dequantized(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``LinearMethod``."""
        return dequantize(self._weight(parameters), self.context.dtype)

    def _weight(self, parameters: Mapping[str, torch.Tensor]) -> Integers:
        return Integers(parameters["weight"], parameters["scale"][None, :] / 127, None)


@dataclass(frozen=True, slots=True)
class RowMajor(WeightTransform):
    """Read the number of the order in which int8 weights are stored."""

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """See ``WeightTransform``."""
        return (torch.uint8,)

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return ()

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        return tensor.view(shape)


def _check_form(form: torch.Tensor) -> str | None:
    return "is the number of another order than that of rows (0)" if form.any() else None
