"""Multiply with weights in the block formats of GGUF on the CPU, by compiled kernels.

Inputs are quantized to 8-bit codes with one scale for each 32 columns, as llama.cpp does, so that the sums of a group are those
of integers. A result differs from that of the exact inputs by about 0.5 % of its typical size. On processors with products
of bfloat16 (AMX or AVX-512), products of many rows round inputs and weights to bfloat16 instead, and differ by about 0.3 %.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from dovetail.ops.cpu.library import BLOCKS, library

FORMATS = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
)
"""Name the formats in the order of their numbers in ``blocks.cpp``."""

_GROUP = 32
_TOGETHER = 8
_P, _I = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "quantize": (_P, _P, _P, _P, _I, _I, _I),
    "product": (_P, _P, _P, _P, _I, _I, _I, _I),
    "tiles": (_P, _P, _P, _P, _I, _I, _I, _I),
    "weight": (_P, _P, _I, _I, _I),
}
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class TileKind(IntEnum):
    """How a processor multiplies decoded weights in bfloat16."""

    NONE = 0
    AMX = 1
    AVX512 = 2


class BlockInputs(NamedTuple):
    """Hold quantized inputs. Each row has ``columns`` codes and zeros after them, in groups of 32."""

    codes: torch.Tensor  # int8 [rows, groups, 32]
    scales: torch.Tensor  # float32 [rows, groups]
    sums: torch.Tensor  # float32 [rows, groups, 2] scale * the sum of the codes of half a group
    columns: int


class _Segment(ctypes.Structure):
    _fields_ = (("weights", _P), ("format", _I), ("rows", _I))


class BlockRows:
    """Hold rows of weights whose blocks have different formats, one part after another, for ``BlockKernels.product``."""

    def __init__(self, parts: Sequence[tuple[torch.Tensor, str]], columns: int) -> None:
        """``parts`` are contiguous weights, uint8 ``[out, bytes]``, and their formats, for which see ``FORMATS``. They must stay as
        they are."""
        assert all(part.dtype is torch.uint8 and part.is_contiguous() for part, _ in parts)
        self.columns, self.rows = columns, sum(len(part) for part, _ in parts)
        segments = [_Segment(part.data_ptr(), FORMATS.index(block), len(part)) for part, block in parts]
        self._parts, self.segments = parts, (_Segment * len(parts))(*segments)


class BlockKernels:
    """Call the kernels of one dtype. All tensors are contiguous and on the CPU; rows of weights are uint8 ``[out, bytes]``."""

    def __init__(self, handle: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._quantize, self._product, self._tiles, self._weight = (
            _function(handle, name, _DTYPES[dtype]) for name in _SIGNATURES
        )
        self.tile_kind = TileKind(handle.tile_kind_of_processor())

    def quantize(self, x: torch.Tensor) -> BlockInputs:
        """Quantize ``x [rows, columns]``, of a multiple of 32 columns. A group with a value that is infinite or NaN has
        scale NaN."""
        rows, columns = x.shape
        assert x.dtype is self.dtype
        assert x.is_contiguous()
        assert columns % _GROUP == 0
        groups = -(-columns // (_GROUP * _TOGETHER)) * _TOGETHER
        codes = torch.empty(rows, groups, _GROUP, dtype=torch.int8)
        scales, sums = torch.empty(rows, groups), torch.empty(rows, groups, 2)
        pointers = x.data_ptr(), codes.data_ptr(), scales.data_ptr(), sums.data_ptr()
        self._quantize(*pointers, rows, columns, groups)
        return BlockInputs(codes, scales, sums, columns)

    def product(self, x: torch.Tensor, weight: BlockRows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` of ``x [rows, columns]``, which is quantized first. The result of a row does not depend
        on the other rows."""
        return self._call(self._product, x, weight, bias)

    def tiles(self, x: torch.Tensor, weight: BlockRows, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` of ``x [rows, columns]``. Inputs and weights are rounded to bfloat16, and sums are computed in
        float32. The result of a row does not depend on the other rows. Must not be called if ``tile_kind`` is
        ``TileKind.NONE``."""
        assert self.tile_kind
        return self._call(self._tiles, x, weight, bias)

    def _call(
        self, function: Callable[..., None], x: torch.Tensor, weight: BlockRows, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows, columns = x.shape
        assert x.dtype is self.dtype
        assert x.is_contiguous()
        assert columns == weight.columns
        out = torch.empty(rows, weight.rows, dtype=self.dtype)
        added = None if bias is None else bias.data_ptr()
        sizes = len(weight.segments), rows, weight.rows, columns
        function(weight.segments, x.data_ptr(), added, out.data_ptr(), *sizes)
        return out

    def weight(self, weight: torch.Tensor, block: str, out: torch.Tensor) -> None:
        """Write the numbers for which ``weight`` stands to ``out [out, columns]``."""
        assert weight.dtype is torch.uint8
        assert weight.is_contiguous()
        assert out.dtype is self.dtype
        assert out.is_contiguous()
        rows, columns = out.shape
        assert len(weight) == rows
        self._weight(weight.data_ptr(), out.data_ptr(), FORMATS.index(block), rows, columns)


def _function(handle: ctypes.CDLL, name: str, dtype: str) -> Callable[..., None]:
    function = handle[f"{name}_{dtype}"]
    function.argtypes, function.restype = _SIGNATURES[name], None
    return function


@functools.cache
def block_kernels(dtype: torch.dtype) -> BlockKernels | None:
    """Return the kernels for ``dtype``, or None for other dtypes and if the library cannot be built
    (``library(BLOCKS).text`` says why)."""
    handle = library(BLOCKS).handle if dtype in _DTYPES else None
    return None if handle is None else BlockKernels(handle, dtype)
