"""Read the tensors of checkpoints of bitsandbytes: each is stored flat, and a rank takes its part of the matrix that it stands for."""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from dovetail.errors import WeightsError
from dovetail.interfaces.model import TensorShare, WeightTransform
from dovetail_quantization.integer_tensors import ordered
from dovetail_quantization.table_weights import packed_codes

NESTED_BLOCK = 256
"""The number of scales of 8 bits that have one scale themselves."""
MOST_STATE_BYTES = 1 << 16
"""The largest size of the text that describes a weight, of which bitsandbytes writes some hundred bytes."""
TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
}  # fmt: skip
"""The numbers that codes of 4 bits stand for, times the scale of their block (NF4: arXiv 2305.14314, appendix E)."""


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Describe the part of a matrix of the checkpoint that a rank holds, in the order of rows of ``inner``."""

    name: str
    rows: TensorShare
    columns: TensorShare
    inner: WeightTransform | None = None

    def of(self, numbers: torch.Tensor, each: int) -> torch.Tensor:
        """Return the part of what is stored for each ``each`` columns, as a matrix. Raises ``WeightsError`` if it is not what the
        whole matrix has."""
        (_, begin, size, rows), (_, start, width, columns) = self.rows, self.columns
        if numbers.numel() != rows * columns // each:
            raise WeightsError(
                f"tensor {self.name} has {numbers.numel()} numbers; a weight of {rows} x {columns} has {rows * columns // each}, one for "
                f"each {each} of its own. Check that config.json belongs to this checkpoint, and quantization.block_size"
            )
        matrix = numbers.reshape(rows, columns // each)
        return ordered(self.inner, matrix[begin : begin + size, start // each : (start + width) // each])


@dataclass(frozen=True, slots=True)
class FlatTransform(WeightTransform):
    """Read a tensor whose shape ``apply`` checks, because what is stored is flat, or a text."""

    part: MatrixPart
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    @property
    def any_shape(self) -> bool:
        """See ``WeightTransform``."""
        return True

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """See ``WeightTransform``."""
        return self.dtypes

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return shape

    @abstractmethod
    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""


@dataclass(frozen=True, slots=True)
class PackedCodes(FlatTransform):
    """Read codes of 4 bits, two in a byte, of which the high bits are the first, into the words of ``table_weights``. The bytes may be
    stored as numbers of another dtype (``bnb_4bit_quant_storage``)."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.uint8,
        torch.int8,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
    )

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        stored = self.part.of(tensor.flatten().view(torch.uint8), 2)
        packed = torch.empty(shape, dtype=torch.uint8, device=tensor.device)
        for some, place in zip(stored.split(4096), packed.split(4096), strict=True):
            place.copy_(packed_codes(torch.stack((some >> 4, some & 15), -1).flatten(1)))
        return packed


@dataclass(frozen=True, slots=True)
class BlockScales(FlatTransform):
    """Read the scales of blocks of ``block`` numbers: in float32."""

    block: int

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        return self.part.of(tensor, self.block)


@dataclass(frozen=True, slots=True)
class ScaleCodes(BlockScales):
    """Read the scales of blocks as codes of 8 bits."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8,)


@dataclass(frozen=True, slots=True)
class NestedScales(FlatTransform):
    """Read the scales of scales, which have one for each ``NESTED_BLOCK`` of them, and return one for each of them."""

    block: int

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        count = self.part.rows.whole * self.part.columns.whole // self.block
        if tensor.numel() != -(-count // NESTED_BLOCK):
            raise WeightsError(
                f"tensor {self.part.name} has {tensor.numel()} numbers; {count} scales have {-(-count // NESTED_BLOCK)}. Check "
                "that config.json belongs to this checkpoint, and quantization.block_size"
            )
        return self.part.of(tensor.flatten().repeat_interleave(NESTED_BLOCK)[:count], self.block)


@dataclass(frozen=True, slots=True)
class QuantState(FlatTransform):
    """Read the JSON text that describes a weight, check it, and return what is added to its scales, ``[1, 1]``."""

    kind: str
    block: int
    double: bool
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8,)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        if tensor.numel() > MOST_STATE_BYTES:
            raise WeightsError(
                f"tensor {self.part.name} has {tensor.numel()} bytes; a text that describes a weight has at most {MOST_STATE_BYTES}"
            )
        try:
            state = json.loads(bytes(tensor.flatten().tolist()))
            found = {name: state.get(name) for name in ("quant_type", "blocksize", "shape")}
            nested = (state.get("nested_blocksize"), state.get("nested_dtype", "float32"))
            offset = float(state["nested_offset"]) if self.double else 0.0
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise WeightsError(f"tensor {self.part.name} is no text that describes a weight: {error!r:.200}") from error
        sizes = [self.part.rows.whole, self.part.columns.whole]
        wanted = {"quant_type": self.kind, "blocksize": self.block, "shape": sizes}
        if found != wanted:
            raise WeightsError(
                f"tensor {self.part.name} describes {found!r:.300}; expected {wanted}. Set quantization.block_size to the block size "
                "of the checkpoint, or check that config.json belongs to it"
            )
        if self.double and (nested != (NESTED_BLOCK, "float32") or not abs(offset) <= torch.finfo(torch.float32).max):
            raise WeightsError(
                f"tensor {self.part.name} has nested_blocksize {nested[0]}, nested_dtype {nested[1]} and nested_offset {offset}; "
                f"implemented: {NESTED_BLOCK}, float32 and a finite number of float32"
            )
        return torch.tensor([[offset]], dtype=torch.float32, device=tensor.device)


@dataclass(frozen=True, slots=True)
class Table(WeightTransform):
    """Read the ``size`` numbers of codes. With a ``kind``, refuse others than those of this type."""

    name: str
    size: int
    kind: str | None = None

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """See ``WeightTransform``."""
        return (torch.float32,)

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return (self.size,)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        if self.kind is not None and not torch.allclose(
            tensor, tensor.new_tensor(TABLES[self.kind]), rtol=0, atol=1e-6
        ):
            raise WeightsError(f"tensor {self.name} has other numbers than those of {self.kind}: {tensor.tolist()}")
        return tensor.view(shape)


def check_scales(scales: torch.Tensor) -> str | None:
    """Return what is wrong with scales, or None (see ``WeightTarget.check``)."""
    return None if scales.isfinite().all() else "has scales that are infinite or NaN"
