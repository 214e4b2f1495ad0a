"""Compute products with weights that are integers of 4 or 8 bits with scales (``dovetail.ops.integers``).

Few rows take about the time to read the codes: tensor cores multiply the integers, which are exact in 16 bits, as the left
operand of a product (see ``dovetail.ops.triton.matmul``, whose structure this kernel has), and the sums of a block of columns
that has one scale are multiplied by it. Codes of 4 bits in planes have a kernel of their own, which reads scales ahead too. Of
other codes of 4 bits, two products take the low and the high bits of the same bytes, with the columns of ``x`` that
belong to each. Up to 32 rows and a large weight in planes have the kernel of ``integer_columns``, or those of ``integer_bytes`` or ``integer_slices``; more rows
of 16 bits and a weight in planes have that of ``integer_many``. For yet more rows, ``plain_weight`` writes the weight in 16 bits. One row
has a kernel in ``integer_one_row``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.activation import Activation
from dovetail.ops.integers import PLANES, Integers
from dovetail.ops.triton.integers import (
    HALF,
    PLANE,
    from_eight_bits,
    from_four_bits,
    integer_sums,
    of_groups,
    plane_sums,
    planes_with_groups,
)
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.matmul import GATE_KINDS, finish_rows, rows_of, workspace
from dovetail.ops.triton.sizes import cdiv
from dovetail.ops.triton.tuning import MAX_PARTS, MAX_ROWS, MAX_TILES
from dovetail_quantization.integer_tensors import narrowed
from dovetail_quantization.triton.integer_bytes import BytesTile, bytes_tile, multiply_bytes
from dovetail_quantization.triton.integer_columns import plane_columns
from dovetail_quantization.triton.integer_many import (
    FEWEST_MANY,
    MOST_MANY,
    MOST_MANY_GROUPS,
    ManyTile,
    many_tile,
    multiply_many,
)
from dovetail_quantization.triton.integer_one_row import multiply_one, one_row_tile, with_scales_in_tiles
from dovetail_quantization.triton.integer_slices import MOST_SLICED, SliceTile, fits_slices, multiply_slices, slice_tile

MOST_ROWS = 64
"""Up to this number of rows the kernel for few rows is used, where none of ``integer_many`` takes them."""


class IntegerTile(NamedTuple):
    """Describe how a product is divided into tiles, see ``ops.triton.tuning.ProductTile``. With ``columns``, the rows of the weight are
    columns of the right operand (``integer_columns``), and ``ahead`` lines of each are fetched early."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split: int
    columns: bool = False
    ahead: int = 0


def integer_tile(rows: int, n: int, k: int, group: int) -> IntegerTile | None:
    """Return the tile for ``rows`` rows and a weight ``[n, k]`` with groups of ``group`` columns, or None if there is none.
    Those of the kernel for FP8, with as many bytes in flight."""
    block_k = min(group & -group, 128)
    if block_k < 32 or not n:
        return None
    block_m = next(size for size in (16, 32, 64) if rows <= size)
    tiles, split = -(-n // 64), 1
    while split < 8 and k % (2 * split * block_k) == 0 and tiles * split < 264:
        split *= 2
    if split > 1 and (tiles * split * 64 * block_m > MAX_PARTS or tiles > MAX_TILES):
        split = 1
    return IntegerTile(block_m, 64, block_k, 4, 5, split)


@triton.jit(do_not_specialize=["m"])
def _few_integer_rows(
    x, w, scales, zeros, bias, y, parts, arrived, m, n, k, span, group,
    FOUR: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, IN_PARTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    packed: tl.constexpr = 2 if FOUR else 1
    at = tl.arange(0, BLOCK_K // packed)
    column = at + at // HALF * HALF if FOUR else at
    begin = part * span
    source = w + rows.to(tl.int64)[:, None] * (k // packed) + begin // packed + at[None, :]
    tokens = x + token[:, None] * k + begin + column[None, :]
    present = token[:, None] < m
    dtype: tl.constexpr = x.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, span, BLOCK_K):
        own = (begin + start) // group * n
        codes = tl.load(source + start // packed, eviction_policy="evict_first")
        middle = tl.load(zeros + own + rows)[:, None] if ZEROS else tl.full([BLOCK_N, 1], 8 if FOUR else 128, tl.uint8)
        scale = tl.load(scales + own + rows).to(tl.float32)
        total += integer_sums(codes, middle, tokens + start, present, FOUR, dtype) * scale[:, None]
    finish_rows(total, y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS)


def column_tile(rows: int, n: int, k: int, groups: int) -> IntegerTile | None:
    """Return the tile of the kernel for which the rows of the weight are the columns of the product, or None where the other kernel is
    the faster one: for fewer rows of the weight, and more than 32 rows. Groups of 128 columns were measured, and those of 32 use the
    other kernel."""
    if rows > 32 or n < 6144 or groups == 4:
        return None
    if n < 16384:
        size = (32, 128, PLANES, 4, 3, 4) if rows > 16 else (16, 128, PLANES, 4, 6, 8)
    else:
        size = (32, 64, PLANES, 2, 3, 1) if rows > 16 else (16, 128, 2 * PLANES, 4, 3, 2)
    tile = IntegerTile(*size, columns=True, ahead=4)
    tiles = -(-n // tile.block_n)
    small = tiles <= MAX_TILES and tiles * tile.split * tile.block_n * tile.block_m <= MAX_PARTS
    return tile if small and k % (tile.split * tile.block_k) == 0 else None


def plane_tile(rows: int, n: int, k: int, groups: int = 1) -> IntegerTile:
    """Return the tile for ``rows`` rows and a weight ``[n, k]`` of 4 bits in planes with ``groups`` (``planes_with_groups``): the fastest for the sizes of an 8B model in groups of 128
    columns on an H200, of those that ``benchmarks/integer_gpu.py`` tries."""
    if (tile := column_tile(rows, n, k, groups)) is not None:
        return tile
    block_m = next(size for size in (8, 16, 32, 64) if rows <= size)
    small = block_m == 16 or groups == 4 or k % (2 * PLANES) > 0
    block_k, programs = PLANES if small else 2 * PLANES, {8: 448, 16: 384, 32: 192, 64: 192}[block_m]
    tiles, split = -(-n // 64), 1
    while split < 8 and k % (2 * split * block_k) == 0 and tiles * split < programs:
        split *= 2
    if split > 1 and (tiles * split * 64 * block_m > MAX_PARTS or tiles > MAX_TILES):
        split = 1
    if block_m == 16 and groups < 4:
        return IntegerTile(block_m, 64, block_k, *((4, 4) if split == 1 else (2, 6)), split)
    warps = 2 if block_m == 8 and groups < 4 else 4
    return IntegerTile(block_m, 64, block_k, warps, 4 if block_m <= 16 else 3, split)


@triton.jit(do_not_specialize=["m"])
def _few_plane_rows(
    x, w, scales, zeros, bias, y, parts, arrived, m, n, k, span, group,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, IN_PARTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply with codes ``w`` (int16 ``[n, k / 4]``) in planes. ``scales`` and ``zeros`` are float32, so that each is a word that can be
    read ahead like codes; a loop without a number of stages of its own would read ahead what is multiplied only."""
    tile, part = tl.program_id(0), tl.program_id(1)
    rows = rows_of(tile, n, GATED, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    at = tl.arange(0, PLANE)
    begin = part * span
    words = tl.multiple_of(k // 4, PLANE)
    source = w + rows.to(tl.int64)[:, None] * words + tl.multiple_of(begin // 4, PLANE) + at[None, :]
    tokens = x + token[None, :] * k + begin + at[:, None]
    present = token[None, :] < m
    dtype: tl.constexpr = x.dtype.element_ty
    apart: tl.constexpr = BLOCK_M == 8 and dtype.is_bf16()
    m0 = tl.full([BLOCK_N], 8.0, tl.float32)
    m1, m2, m3 = m0, m0, m0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, span, BLOCK_K, num_stages=STAGES):
        for block in tl.static_range(BLOCK_K // (4 * PLANE)):
            here = start + block * (4 * PLANE)
            s0, s1, s2, s3 = of_groups(scales + rows, begin + here, group, n, GROUPS)
            if ZEROS:
                m0, m1, m2, m3 = of_groups(zeros + rows, begin + here, group, n, GROUPS)
            codes = tl.load(source + here // 4, eviction_policy="evict_first")
            total = plane_sums(
                codes, s0, s1, s2, s3, m0, m1, m2, m3, tokens + here, present, total, GROUPS, apart, dtype
            )
    finish_rows(total, y, bias, parts, arrived, rows, tile, part, m, n, GATED, BIAS, BLOCK_M, BLOCK_N, SPLIT, IN_PARTS)


@triton.jit
def _plain_planes(
    w, scales, zeros, out, n, k, group,
    ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * (4 * PLANE)
    at = tl.arange(0, PLANE)
    inside = row < n
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = row.to(tl.int64)[:, None]
    codes = tl.load(w + place * (k // 4) + begin // 4 + at[None, :], inside[:, None], 0)
    for plane in tl.static_range(4):
        column = begin + plane * PLANE
        own = column // group * n + row
        scale = tl.load(scales + own, inside, 0.0).to(tl.float32)[:, None]
        middle = tl.full([BLOCK_N, 1], 8.0, tl.float32)
        if ZEROS:
            middle = tl.load(zeros + own, inside, 0).to(tl.float32)[:, None]
        number = ((codes >> 4 * plane & 15).to(tl.float32) - middle) * scale
        tl.store(out + place * k + column + at[None, :], number.to(out.dtype.element_ty), inside[:, None])


@triton.jit
def _plain_weight(
    w, scales, zeros, out, n, k, group,
    FOUR: tl.constexpr, ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    packed: tl.constexpr = 2 if FOUR else 1
    begin = tl.program_id(1) * BLOCK_K
    at = tl.arange(0, BLOCK_K // packed)
    column = at + at // HALF * HALF if FOUR else at
    inside = row < n
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own = begin // group * n
    scale = tl.load(scales + own + row, inside, 0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)[:, None]
    codes = tl.load(w + place * (k // packed) + begin // packed + at[None, :], inside[:, None], 0)
    if ZEROS:
        middle = tl.load(zeros + own + row, inside, 0)[:, None]
    else:
        middle = tl.full([BLOCK_N, 1], 8 if FOUR else 128, tl.uint8)
    to = out + place * k + begin + column[None, :]
    if FOUR:
        tl.store(
            to, (from_four_bits(codes, middle, False, tl.float32) * scale).to(out.dtype.element_ty), inside[:, None]
        )
        high = (from_four_bits(codes, middle, True, tl.float32) * scale).to(out.dtype.element_ty)
        tl.store(to + HALF, high, inside[:, None])
    else:
        number = from_eight_bits(codes, middle, tl.float32) * scale
        tl.store(to, number.to(out.dtype.element_ty), inside[:, None])


def plain_weight(weight: Integers, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``ops.integers.dequantize``. Groups are multiples of 32."""
    (codes, scales, zeros), (n, k) = weight, (len(weight.codes), weight.columns)
    out = torch.empty(n, k, dtype=dtype, device=codes.device)
    if weight.bits == 4 and not k % PLANES:
        launch(
            _plain_planes, (cdiv(n, 64), k // PLANES),
            codes.view(torch.int16), scales, zeros, out, n, k, weight.group, ZEROS=zeros is not None, BLOCK_N=64,
        )  # fmt: skip
        return out
    block_k = min(weight.group & -weight.group, 128)
    launch(
        _plain_weight, (cdiv(n, 32), k // block_k),
        codes, scales, zeros, out, n, k, weight.group,
        FOUR=weight.bits == 4, ZEROS=zeros is not None, BLOCK_N=32, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return out


class IntegerRows:
    """Multiply rows with one weight ``[n, k]``: up to ``MOST_ROWS``, or more rows of 16 bits with a weight in planes (``most_rows``). ``one_row`` is the
    tile of one row of 16 bits, if that has a kernel of its own, ``one_row_in_parts`` that with which its product stays in parts, ``tiles``
    those of all numbers of rows up to ``MOST_ROWS``, ``byte_tiles`` those of rows of 16 bits that are multiplied in bytes,
    ``slices`` those of rows of 16 bits whose columns are divided among warps, ``slices_in_parts`` those with which such products stay in parts, and
    ``many_tiles`` those of many rows of 16 bits, which are chosen when they are first used."""

    def __init__(self, weight: Integers) -> None:
        self._weight, self._shape = weight, (len(weight.codes), weight.columns)
        self._space = workspace(weight.codes.device)
        self._groups = groups_of(weight)
        self._one_scale = self._groups == 1 and weight.zeros is None
        self.one_row = one_row_tile(*self._shape, weight.group) if self._groups else None
        self._one_weight = weight if self.one_row is None else with_scales_in_tiles(weight)
        self.one_row_in_parts = self.one_row and one_row_tile(*self._shape, weight.group, in_parts=True)
        self.tiles = [None, *(tile_of(rows, weight) for rows in range(1, MOST_ROWS + 1))]
        self.byte_tiles = [bytes_tile(rows, weight) for rows in range(MOST_ROWS + 1)]
        self.many_tiles: dict[int, ManyTile] = {}
        sliced = range(MOST_SLICED + 1 if fits_slices(weight) else 0)
        self.slices = {rows: slice_tile(rows, *self._shape, in_parts=False) for rows in sliced}
        self.slices_in_parts = {rows: slice_tile(rows, *self._shape, in_parts=True) for rows in sliced}

    @property
    def most_rows(self) -> int:
        """Return the greatest number of rows of 16 bits that a kernel here multiplies."""
        if not self._groups:
            return MOST_ROWS
        return MOST_MANY if self._one_scale else MOST_MANY_GROUPS

    def is_few(self, x: torch.Tensor) -> bool:
        """Return True if a kernel here multiplies the rows of ``x``."""
        return 0 < len(x) <= (MOST_ROWS if x.dtype is torch.float32 else self.most_rows)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute ``LinearProduct.forward``."""
        return self._compute(x, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """Compute ``LinearProduct.gated``."""
        return self._compute(x, bias, GATE_KINDS[activation])

    def parts(self, x: torch.Tensor) -> torch.Tensor | None:
        """Compute ``LinearProduct.parts``."""
        if self.one_row is not None and self._is_one(x):
            if (one := self.one_row_in_parts) is None:
                return None
            y = torch.empty(one.split, 1, self._shape[0], dtype=torch.float32, device=x.device)
            multiply_one(x, self._one_weight, None, y, 0, one)
            return y
        tile = self.tile(x, in_parts=True)
        if not isinstance(tile, SliceTile) and (tile is None or tile.split == 1 or len(x) > MAX_ROWS):
            return None
        return self._compute(x, None, in_parts=True)

    def tile(self, x: torch.Tensor, *, in_parts: bool = False) -> IntegerTile | BytesTile | ManyTile | SliceTile | None:
        """Return the tile for several rows, or that with which their product stays in parts. The kernel for slices of columns takes rows of 16
        bits, and those for bytes and for many rows round more than float32 does."""
        rows = len(x)
        if x.dtype is torch.float32:
            return self.tiles[rows]
        if (sliced := (self.slices_in_parts if in_parts else self.slices).get(rows)) is not None:
            return sliced
        if self._groups and rows >= FEWEST_MANY:
            if rows not in self.many_tiles:
                self.many_tiles[rows] = many_tile(rows, *self._shape, one_scale=self._one_scale)
            return self.many_tiles[rows]
        in_bytes = self.byte_tiles[rows]
        return self.tiles[rows] if in_bytes is None else in_bytes

    def _is_one(self, x: torch.Tensor) -> bool:
        """Return True if ``x`` is one row of 16 bits. The kernel for it rounds more than float32 does."""
        return len(x) == 1 and x.dtype is not torch.float32

    def _compute(
        self, x: torch.Tensor, bias: torch.Tensor | None, gated: int = False, *, in_parts: bool = False
    ) -> torch.Tensor:
        assert x.is_contiguous()
        m, (n, k), weight = x.shape[0], self._shape, self._weight
        tile = self.tile(x, in_parts=in_parts)
        assert tile is not None
        if in_parts:
            y = torch.empty(tile.split, m, n, dtype=torch.float32, device=x.device)
        else:
            y = torch.empty(m, n // 2 if gated else n, dtype=x.dtype, device=x.device)
        if self.one_row is not None and self._is_one(x):
            multiply_one(x, self._one_weight, bias, y, gated, self.one_row)
            return y
        if isinstance(tile, SliceTile):
            multiply_slices(x, weight, bias, y, gated, tile, self._space, in_parts=in_parts)
            return y
        if isinstance(tile, BytesTile):
            multiply_bytes(x, weight, bias, y, gated, tile, self._space, in_parts=in_parts)
            return y
        if isinstance(tile, ManyTile):
            multiply_many(x, weight, bias, y, gated, tile, self._space, in_parts=in_parts)
            return y
        own: dict[str, int]
        if self._groups:
            own = {"GROUPS": self._groups, "STAGES": tile.stages}
            kernel, codes = _few_plane_rows, weight.codes.view(torch.int16)
            if tile.columns:
                kernel, own = plane_columns, {**own, "AHEAD": tile.ahead}
        else:
            kernel, codes, own = _few_integer_rows, weight.codes, {"FOUR": weight.bits == 4}
        launch(
            kernel, (cdiv(n, tile.block_n), tile.split),
            x, codes, weight.scales, weight.zeros, bias, y, self._space.parts, self._space.arrived,
            m, n, k, k // tile.split, weight.group,
            **own, ZEROS=weight.zeros is not None, GATED=gated, BIAS=bias is not None,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            SPLIT=tile.split, IN_PARTS=in_parts, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return y


def integer_rows(weight: Integers) -> IntegerRows | None:
    """Return the products of ``weight`` with few rows, or None if its sizes have none."""
    return IntegerRows(weight) if weight.codes.is_contiguous() and tile_of(1, weight) is not None else None


def groups_of(weight: Integers) -> int:
    """Return ``planes_with_groups`` of a weight, 0 unless it is of 4 bits in planes."""
    return planes_with_groups(weight.columns, weight.group) if weight.bits == 4 else 0


def with_words(weight: Integers) -> Integers:
    """Return a weight whose scales and zero points have the dtypes that the kernels read: float32 for planes, otherwise scales of 16 bits
    if these hold all of them."""
    if not groups_of(weight):
        return weight._replace(scales=narrowed(weight.scales))
    return weight._replace(scales=weight.scales.float(), zeros=None if weight.zeros is None else weight.zeros.float())


def tile_of(rows: int, weight: Integers) -> IntegerTile | None:
    """Return the tile for ``rows`` rows, or None if there is none."""
    n, k = len(weight.codes), weight.columns
    if n and (groups := groups_of(weight)):
        return plane_tile(rows, n, k, groups)
    return integer_tile(rows, n, k, weight.group)
