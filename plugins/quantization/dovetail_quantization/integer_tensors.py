"""Read the integers of checkpoints: how formats pack them, and which part of a stored tensor is a rank's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.model import TensorShare, WeightTransform
from dovetail.ops.integers import BLOCK, held, quantize

_INTERLEAVED = {4: (0, 4, 1, 5, 2, 6, 3, 7)}
"""AWQ stores the eight numbers of an int32 as 0, 2, 4, 6, 1, 3, 5, 7: the place of each of them."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Describe how an int32 tensor holds unsigned numbers, the first in the lowest bits: along dimension ``dim``, as
    ``[in, out]`` if it is ``transposed``, otherwise as ``[out, in]``. ``interleaved`` is the order of AWQ. ``added``, modulo the
    numbers of ``bits``, is what the numbers lack (GPTQ)."""

    bits: int
    dim: int
    transposed: bool = False
    interleaved: bool = False
    added: int = 0

    @property
    def each(self) -> int:
        """Return how many numbers an int32 holds."""
        return 32 // self.bits

    def unpacked(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the numbers, uint8 ``[out, in]``; as many as are stored."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32, device=stored.device)
        if self.interleaved:
            shifts = shifts[list(_INTERLEAVED[self.bits])]
        most = (1 << self.bits) - 1
        wide = stored.unsqueeze(self.dim + 1) >> (shifts if self.dim else shifts[:, None])
        numbers = ((wide & most) + self.added & most).to(torch.uint8).flatten(self.dim, self.dim + 1)
        return numbers.T if self.transposed else numbers


@dataclass(frozen=True, slots=True)
class Unpacked(WeightTransform):
    """Read numbers that are packed, in the order of rows of ``inner``: the codes of a weight, or zero points."""

    packing: Packing
    what: Literal["codes", "zeros"]
    inner: WeightTransform | None = None

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """See ``WeightTransform``."""
        return (torch.int32,)

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        whole = [*self._numbers(shape)]
        if self.packing.transposed:
            whole.reverse()
        whole[self.packing.dim] = -(-whole[self.packing.dim] // self.packing.each)
        return tuple(whole)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        rows, columns = self._numbers(shape)
        numbers = self.packing.unpacked(tensor)[:rows, :columns]
        numbers = ordered(self.inner, numbers.contiguous())
        return held(numbers, self.packing.bits) if self.what == "codes" else numbers

    def _numbers(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many rows and columns of numbers fill a parameter of ``shape``."""
        rows, columns = shape
        return rows, columns * 2 if self.what == "codes" and self.packing.bits == 4 else columns


@dataclass(frozen=True, slots=True)
class Whole(WeightTransform):
    """Read int8 numbers of tensor ``name``, one in a byte: the codes of a weight of ``bits``, or zero points, in the order of
    rows of ``inner``."""

    name: str
    bits: int
    what: Literal["codes", "zeros"]
    inner: WeightTransform | None = None

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """See ``WeightTransform``."""
        return (torch.int8,)

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return (shape[0], shape[1] * 2) if self.what == "codes" and self.bits == 4 else shape

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``. Raises ``WeightsError`` for numbers that ``bits`` do not have."""
        if self.bits == 4 and tensor.numel() and (tensor.min() < -8 or tensor.max() > 7):
            raise WeightsError(f"tensor {self.name} has 4-bit integers outside -8 to 7; convert the checkpoint again")
        middle = 1 << self.bits - 1
        numbers = ordered(self.inner, (tensor.to(torch.int16) + middle).to(torch.uint8))
        return held(numbers, self.bits) if self.what == "codes" else numbers


@dataclass(frozen=True, slots=True)
class ScaleRows(WeightTransform):
    """Read scales in the order of rows of ``inner``: stored as ``[groups, out]`` if ``transposed``, or one for the whole tensor
    if ``single``."""

    inner: WeightTransform | None = None
    transposed: bool = False
    single: bool = False

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        if self.single:
            return (1,)
        return (shape[1], shape[0]) if self.transposed else shape

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        if self.single:
            return tensor.reshape(1, 1).expand(shape)
        return ordered(self.inner, tensor.T.contiguous() if self.transposed else tensor)


@dataclass(frozen=True, slots=True)
class Index(WeightTransform):
    """Read the group of each column, int32 ``[in]``, counted from group ``first``. With ``sorts``, return the order of columns
    in which groups are sorted."""

    first: int = 0
    sorts: bool = False

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """See ``WeightTransform``."""
        return (torch.int32, torch.int64)

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return shape[1:]

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        return (tensor.argsort(stable=True) if self.sorts else tensor - self.first).view(shape)


@dataclass(frozen=True, slots=True)
class InOrder(WeightTransform):
    """Read the groups of ``columns`` columns of tensor ``name``, and refuse them unless each ``group`` of columns is one, from
    group ``first`` on."""

    name: str
    columns: int
    group: int
    first: int

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """See ``WeightTransform``."""
        return (torch.int32, torch.int64)

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return (self.columns,)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``. Raises ``WeightsError``."""
        expected = torch.arange(self.columns, dtype=tensor.dtype, device=tensor.device) // self.group + self.first
        if not tensor.equal(expected):
            raise WeightsError(
                f"tensor {self.name} lists groups of columns in another order (act-order); not implemented for experts"
            )
        return tensor.new_zeros(shape)


@dataclass(frozen=True, slots=True)
class Sizes(WeightTransform):
    """Read the sizes of a packed weight, int64 ``[2]``."""

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """See ``WeightTransform``."""
        return (torch.int64, torch.int32)

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return (2,)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        return tensor.view(shape)


@dataclass(frozen=True, slots=True)
class Rounded(WeightTransform):
    """Quantize a weight with ``columns`` columns while it is read, after ``inner``: return its codes or its scales."""

    bits: int
    group: int
    columns: int
    what: Literal["codes", "scales"]
    inner: WeightTransform | None = None

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        whole = (shape[0], self.columns)
        return whole if self.inner is None else self.inner.source_shape(whole)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        weight = tensor if self.inner is None else self.inner.apply(tensor, (shape[0], self.columns))
        made = [quantize(rows, self.bits, self.group) for rows in weight.split(4096)]
        return torch.cat([one.codes if self.what == "codes" else one.scales.mT for one in made])


def ordered(inner: WeightTransform | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with its rows in the order of ``inner``."""
    return tensor if inner is None else inner.apply(tensor, tuple(tensor.shape))


def share_of(name: str, share: TensorShare, each: int, dim: int) -> TensorShare:
    """Return the share of dimension ``dim`` of the stored tensor ``name`` that holds ``each`` entries of ``share`` in one.
    Raises ``ConfigError`` if the share cuts one."""
    _, start, size, whole = share
    if start % each or (size % each and start + size < whole):
        raise ConfigError(
            f"{name} holds {each} rows or columns of the weight together, and is divided into parts of {size} of {whole}, for projections "
            "that share the tensor or for ranks; if parallel.tp is above 1, set it to a smaller number"
        )
    return TensorShare(dim, start // each, -(-size // each), -(-whole // each))


def check_scales(scales: torch.Tensor) -> str | None:
    """Check scales of weights."""
    if scales.isfinite().all():
        return None
    return "has scales that are not finite numbers; convert the checkpoint again"


def check_rounded(scales: torch.Tensor) -> str | None:
    """Check the scales that ``Rounded`` computed."""
    return None if scales.isfinite().all() else "has numbers that are infinite or NaN, and these cannot be quantized"


def check_input_scales(scales: torch.Tensor) -> str | None:
    """Check scales of activations, by which these are divided."""
    if (scales.isfinite() & (scales > 0)).all():
        return None
    return "has scales of activations that are not finite numbers above 0; convert the checkpoint again"


def fits_blocks(columns: int, bits: int) -> bool:
    """Return whether rows of ``columns`` numbers can be held."""
    return bits == 8 or columns % BLOCK == 0


def narrowed(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in a dtype of 16 bits if it has all of them, otherwise as they are."""
    for dtype in (torch.float16, torch.bfloat16):
        if scales.equal(scales.to(dtype).to(scales.dtype)):
            return scales.to(dtype)
    return scales
