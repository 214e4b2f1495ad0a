"""Store the blocks of GGUF as packed rows on CUDA, and multiply with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from dovetail.errors import ConfigError
from dovetail.gguf.block_types import TYPES, BlockType
from dovetail.interfaces.model import WeightTarget, WeightTransform
from dovetail.interfaces.quantization import (
    LinearMethod,
    LinearProduct,
    LinearShape,
    ParameterShape,
    QuantizationContext,
)
from dovetail.ops.activation import Activation
from dovetail.ops.packed_blocks import PACKED, PackedWeight, pack, row_bytes
from dovetail_quantization.coded_product import CodedProduct
from dovetail_quantization.gguf_blocks import check_columns, fill_random, in_bytes
from dovetail_quantization.integer_tensors import ordered
from dovetail_quantization.invariant_products import InvariantLinear


class PackedLinear(LinearMethod):
    """Store one layer as packed rows. Parameter ``packed_i``, uint8 ``[rows, bytes]``, is that of the i-th run of modules that
    have the same type."""

    def __init__(self, shape: LinearShape, types: Sequence[BlockType], context: QuantizationContext) -> None:
        self.shape, self.types, self.context = shape, types, context
        for name, kind in zip(shape.names, types, strict=True):
            check_columns(name, shape.in_features, kind)
        pairs = zip(types, shape.rows, strict=True)
        self._runs = [(kind, [rows for _, rows in run]) for kind, run in groupby(pairs, key=lambda pair: pair[0])]

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``LinearMethod``."""
        columns = self.shape.in_features
        return {
            f"packed_{index}": ParameterShape((sum(rows), row_bytes(kind, columns)), torch.uint8)
            for index, (kind, rows) in enumerate(self._runs)
        }

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``LinearMethod``."""
        if weight.transform is not None and not weight.transform.orders_rows:
            raise ConfigError(f"{name} is read through {weight.transform}, which is not implemented for blocks of GGUF")
        index, start, size = self._place(weight)
        kind = self._runs[index][0]
        for share in weight.shares:
            if share.dim == 1:
                check_columns(name, share.start, kind)
        shares = tuple(in_bytes(share, kind) if share.dim == 1 else share for share in weight.shares)
        transform = Packed(kind.name, self.shape.in_features, weight.transform)
        yield f"{name}.weight", WeightTarget(f"packed_{index}", start, size, shares, transform)

    def _place(self, weight: WeightTarget) -> tuple[int, int, int]:
        """Return the run of the module that ``weight`` is of, and the first row and the number of rows there."""
        wanted, before = weight.start or 0, 0
        for index, (_, sizes) in enumerate(self._runs):
            begin = before
            for size in sizes:
                if before == wanted:
                    return index, before - begin, size
                before += size
        raise AssertionError(f"no module of {self.shape.names} begins at row {wanted}")

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``LinearMethod``."""
        for index, (kind, _) in enumerate(self._runs):
            for rows in parameters[f"packed_{index}"].split(16384):
                width = kind.row_bytes(self.shape.in_features)
                blocks = torch.empty(len(rows), width, dtype=torch.uint8, device=rows.device)
                fill_random(blocks.view(-1, kind.nbytes), kind, limit, generator)
                rows.copy_(pack(blocks, kind))

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        """See ``LinearMethod``."""
        return packed_product(self._weights(parameters), self.context)

    def dequantized(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``LinearMethod``."""
        return torch.cat([weight.dequantized(self.context.dtype) for weight in self._weights(parameters)])

    def _weights(self, parameters: Mapping[str, torch.Tensor]) -> list[PackedWeight]:
        return [
            PackedWeight(parameters[f"packed_{index}"], PACKED[kind.name], self.shape.in_features)
            for index, (kind, _) in enumerate(self._runs)
        ]


@dataclass(frozen=True, slots=True)
class Packed(WeightTransform):
    """Pack rows of blocks of type ``kind`` for ``columns`` columns, in the order of rows of ``inner``."""

    kind: str
    columns: int
    inner: WeightTransform | None = None

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """See ``WeightTransform``."""
        return (torch.uint8,)

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return (shape[0], TYPES[self.kind].row_bytes(self.columns))

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        return pack(ordered(self.inner, tensor), TYPES[self.kind])


def packed_product(weights: Sequence[PackedWeight], context: QuantizationContext) -> LinearProduct:
    """Return the product with weights in packed rows on CUDA, one after another."""
    product = PackedProduct(weights)
    if not context.batch_invariant:
        return product
    return InvariantLinear(product.weight, context.dtype, ", ".join(dict.fromkeys(one.packing.name for one in weights)))


class PackedProduct(CodedProduct):
    """Multiply on CUDA with weights in packed rows, one after another (``triton.packed_rows``)."""

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        from dovetail_quantization.triton.packed_product import MOST_ROWS, PackedRows

        kinds = ", ".join(dict.fromkeys(weight.packing.name for weight in weights))
        self._rows = [PackedRows(weight) for weight in weights]
        self._widths = [len(weight.rows) for weight in weights]
        self._device = weights[0].rows.device
        shape = sum(self._widths), weights[0].columns
        super().__init__(shape, MOST_ROWS, f"{kinds} in packed blocks", in_parts=len(weights) == 1)

    def few_rows(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None
    ) -> torch.Tensor:
        """See ``CodedProduct``."""
        n = self._shape[0]
        if len(self._rows) == 1:
            y = x.new_empty(len(x), n if activation is None else n // 2)
            self._rows[0].multiply(x, bias, y, activation)
            return y
        y, biases = x.new_empty(len(x), n), [None] * len(self._rows) if bias is None else bias.split(self._widths)
        for rows, part, own in zip(self._rows, y.split(self._widths, 1), biases, strict=True):
            rows.multiply(x, own, part)
        return y

    def few_rows_in_parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """See ``CodedProduct``."""
        return self._rows[0].parts(x)

    def dequantized(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """See ``CodedProduct``."""
        out, begin = torch.empty(rows.stop - rows.start, self._shape[1], dtype=dtype, device=self._device), 0
        for own, width in zip(self._rows, self._widths, strict=True):
            first, last = max(rows.start, begin), min(rows.stop, begin + width)
            if first < last:
                own.write(out[first - rows.start : last - rows.start], first - begin)
            begin += width
        return out
