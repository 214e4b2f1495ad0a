"""Compute products of 2 to 16 rows and a large weight of 4-bit integers in planes (``dovetail.ops.integers``), on Hopper.

Each warp of a program multiplies a slice of the columns, whose numbers of ``x`` stay in its registers. All warps compute the same 16 rows of
the weight, one tile after another, so that no number of ``x`` is read twice. The tiles that follow are copied to shared memory meanwhile, and the
first of them before the program waits for the previous kernel. The sums of the warps are added up in shared memory, always in the same order, while the
next tile is multiplied, so that the warps wait for each other once for each tile: every tile that is copied ahead has shared memory of its own name, by which the
compiler knows that reading one and writing another need no barrier. As many programs as a multiprocessor holds run from the beginning to the end.

If there are several parts, a norm adds them up, or the last program of the same tiles to finish does, once for all of its tiles.

Tensor cores multiply codes plus 128 (bfloat16) or 1024 (float16), which two instructions make of two codes. What that adds to the sum of 128 columns is the
same for all rows of the weight: sums begin with its negative.

The kernel is written in Gluon, which states the layouts of registers and shared memory. Triton's interpreter does not run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.integers import PLANES, Integers
from dovetail.ops.triton.integers import PLANES_BFLOAT16, PLANES_FLOAT16
from dovetail.ops.triton.launch import INTERPRETED, launch
from dovetail.ops.triton.matmul import Workspace
from dovetail.ops.triton.sizes import cdiv, next_power_of_2
from dovetail.ops.triton.tuning import MAX_PARTS

FEWEST_SLICED = 2
MOST_SLICED = 16
"""The kernel is used for these numbers of rows."""
_WIDE = 16384
"""From this number of rows of the weight on there are enough tiles for programs of 16 warps, which have no parts to add up."""
_MOST_PARTS, _MOST_JOINED = 16, 4
"""The greatest number of parts that are left to a norm, and that the kernel adds up."""
_MULTIPROCESSORS = 132
"""Those of an H200, whose compute capability the kernel needs."""
_TILE = gl.constexpr(16)
"""The rows of the weight in a tile: 8 of its first half, and 8 of its second half, so that a tile of gates and values has pairs."""
_PLANE = gl.constexpr(PLANES // 4)

# Triton 3.6 has other names for these two than 3.9
_copy: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier


class SliceTile(NamedTuple):
    """Describe how a product is divided. A program of ``warps`` warps computes ``blocks`` blocks of 128 columns, as many as there are warps or up to four times as
    many; ``split`` parts share the columns. Each part has ``programs`` programs, whose shared memory has ``stages`` tiles. A multiprocessor has registers for
    ``on_each`` programs."""

    warps: int
    blocks: int
    programs: int
    stages: int
    split: int
    on_each: int = 1

    @property
    def registers(self) -> int:
        """Return the greatest number of registers of a thread."""
        return min(255, 2048 // (self.warps * self.on_each) // 8 * 8)


@gluon.constexpr_function
def _copying(warps, blocks):
    """Return the layout in which codes ``[blocks, _TILE, _PLANE]`` are copied: eight lanes copy 128 bytes of a row, those of two blocks."""
    rest = [[1 << bit, 0, 0] for bit in range(1, blocks.bit_length() - 1)] + [[0, 8, 0], [0, 4, 0]]
    bits = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], *rest[bits:]],
        lane_bases=[[0, 0, 8], [0, 0, 16], [1, 0, 0], [0, 1, 0], [0, 2, 0]],
        warp_bases=rest[:bits],
        block_bases=[],
        shape=[blocks, 16, 32],
    )


@gluon.constexpr_function
def _copying_scales(warps, blocks):
    """Return the layout in which scales ``[blocks, _TILE]`` are copied."""
    across = min(warps, max(1, blocks // 8))
    return gl.BlockedLayout([1, 4], [8, 4], [across, warps // across], [1, 0])


@gluon.constexpr_function
def _between(warps, rows):
    """Return where the sums of warps, ``[warps, _TILE, rows]``, are in shared memory. The lanes that write them, and those that read them, use different
    banks: the fifth bit of a place tells rows apart for the former, and the halves of the tile for the latter."""
    last = [[0, 0, 8]] if rows == 16 else []
    return gl.SharedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 0, 2], [0, 0, 4], [0, 8, 4], [0, 0, 1], *last]
        + [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    )


@gluon.constexpr_function
def _reading(depth, warps, rows):
    """Return the layout in which sums ``[depth, _TILE, rows]`` are added up: a thread has all of the first dimension, and rows of the weight that are 8
    apart are in lanes 8 apart."""
    rest = [[0, 0, 1], [0, 0, 4]] + ([[0, 0, 8]] if rows == 16 else [])
    bits = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << bit, 0, 0] for bit in range(depth.bit_length() - 1)] + rest[bits:],
        lane_bases=[[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 2]],
        warp_bases=(rest + [[0, 0, 0]] * bits)[:bits],
        block_bases=[],
        shape=[depth, 16, rows],
    )


@gluon.jit
def _planes(words, BFLOAT16: gl.constexpr):
    """Return the numbers in the four planes of ``words`` (int16) plus 128 (bfloat16) or 1024 (float16)."""
    if BFLOAT16:
        return gl.inline_asm_elementwise(
            PLANES_BFLOAT16, "=r,=r,=r,=r,r", [words], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            PLANES_FLOAT16, "=r,=r,=r,=r,r", [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2
        )  # fmt: skip


@gluon.jit
def _columns_of_x(x, m, k, block, end, WARPS: gl.constexpr, ROWS: gl.constexpr, mma: gl.constexpr):
    """Return the numbers of ``x [m, k]`` in a block for each warp, from ``block`` on and before ``end``, in four planes; and what the sums of the block
    begin with."""
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, right)))
    at = gl.arange(0, _PLANE, gl.SliceLayout(0, gl.SliceLayout(2, right)))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, right)))
    own = (block + warp)[:, None, None]
    place = x + (row * k)[None, None, :] + (own * (4 * _PLANE) + at[None, :, None])
    inside = (row[None, None, :] < m) & (own < end) & (at[None, :, None] < _PLANE)
    x0 = gl.load(place, inside, 0.0)
    x1 = gl.load(place + _PLANE, inside, 0.0)
    x2 = gl.load(place + 2 * _PLANE, inside, 0.0)
    x3 = gl.load(place + 3 * _PLANE, inside, 0.0)
    dtype: gl.constexpr = x.dtype.element_ty
    added: gl.constexpr = -136.0 if dtype == gl.bfloat16 else -1032.0  # 8 stands for 0
    less = gl.full([WARPS, _TILE, _PLANE], added, dtype, gl.DotOperandLayout(0, mma, 8))
    sums = gl.zeros([WARPS, _TILE, ROWS], gl.float32, mma)
    sums = mma_v2(less, x0, sums)
    sums = mma_v2(less, x1, sums)
    sums = mma_v2(less, x2, sums)
    sums = mma_v2(less, x3, sums)
    return x0, x1, x2, x3, gl.max(sums, 1)  # all rows are equal


@gluon.jit
def _add_block(
    total, code, scale, x0, x1, x2, x3, begins, block, end, WARPS: gl.constexpr, WHOLE: gl.constexpr, mma: gl.constexpr
):
    """Return ``total`` plus the products of a block for each warp. Unless WHOLE, blocks from ``end`` on do not count."""
    p0, p1, p2, p3 = _planes(code, x0.dtype == gl.bfloat16)
    sums = gl.expand_dims(begins, 1) + gl.zeros(total.shape, gl.float32, mma)
    sums = mma_v2(p0, x0, sums)
    sums = mma_v2(p1, x1, sums)
    sums = mma_v2(p2, x2, sums)
    sums = mma_v2(p3, x3, sums)
    if not WHOLE:
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, mma)))
        scale = gl.where((block + warp < end)[:, None], scale, 0.0)
    return total + sums * gl.expand_dims(scale, 2)


@gluon.jit
def _copy_tile(words, numbers, codes, place, scales, scale_place, block, scale_block, end, WHOLE: gl.constexpr):
    """Begin to copy the codes and the scales of a tile. Unless WHOLE, those of blocks from ``end`` on are not copied."""
    if WHOLE:
        _copy(words, codes + place, eviction_policy="evict_first")
        _copy(numbers, scales + scale_place)
    else:
        _copy(words, codes + place, block + place * 0 < end, eviction_policy="evict_first")
        _copy(numbers, scales + scale_place, scale_block + scale_place * 0 < end)


@gluon.jit
def _gate(sums, GATED: gl.constexpr):
    """Return the gates of ``sums`` in the layouts of ``_reading``, right for the first half of a tile: the values are in lanes 8 apart."""
    up = gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 8, 31, -1;", "=r,r", [sums], dtype=gl.float32, is_pure=True, pack=1
    )
    opens = sums
    if GATED == 2:
        opens = 1.5957691216057308 * (sums + 0.044715 * sums * sums * sums)
    return sums / (1.0 + gl.exp(-opens)) * up


@gluon.jit
def _finish(sums, y, bias, part, m, n, tile, GATED: gl.constexpr, BIAS: gl.constexpr):
    """Write the sums ``[_TILE, ROWS]`` of a tile, or their gate, to a part of ``y``."""
    out: gl.constexpr = sums.type.layout
    at = gl.arange(0, _TILE, gl.SliceLayout(1, out))
    row = gl.arange(0, sums.shape[1], gl.SliceLayout(0, out))
    column = tile * 8 + at % 8 + at // 8 * (n // 2)
    if BIAS:
        sums += gl.load(bias + column).to(gl.float32)[:, None]
    if GATED:
        place = y + (row * (n // 2))[None, :] + column[:, None]
        gl.store(place, _gate(sums, GATED).to(y.dtype.element_ty), (row < m)[None, :] & (at < 8)[:, None])
    else:
        place = y + ((part * m + row) * n)[None, :] + column[:, None]
        gl.store(place, sums.to(y.dtype.element_ty), (row < m)[None, :] & (at < _TILE)[:, None])


@gluon.jit
def _join(
    parts, y, bias, m, n, first, programs, count,
    WARPS: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, SPLIT: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Add up the parts of all tiles of a program, in their order, and write the sums or their gate."""
    reading: gl.constexpr = _reading(TILES, WARPS, ROWS)
    index = gl.arange(0, TILES, gl.SliceLayout(1, gl.SliceLayout(2, reading)))
    at = gl.arange(0, _TILE, gl.SliceLayout(0, gl.SliceLayout(2, reading)))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, reading)))
    column = ((first + index * programs) * 8)[:, None, None] + (at % 8 + at // 8 * (n // 2))[None, :, None]
    present = (index < count)[:, None, None] & (at < _TILE)[None, :, None] & (row < m)[None, None, :]
    place = (row * n)[None, None, :] + column
    total = gl.zeros([TILES, _TILE, ROWS], gl.float32, reading)
    for part in gl.static_range(SPLIT):
        total += gl.load(parts + part * (m * n) + place, present, 0.0, cache_modifier=".cg")
    if BIAS:
        total += gl.load(bias + column).to(gl.float32)
    if GATED:
        place = (row * (n // 2))[None, None, :] + column
        gl.store(y + place, _gate(total, GATED).to(y.dtype.element_ty), present & (at < 8)[None, :, None])
    else:
        gl.store(y + place, total.to(y.dtype.element_ty), present)


@gluon.jit(do_not_specialize=["m", "tiles"])
def slice_rows(
    x, w, scales, bias, y, parts, arrived, m, n, k, tiles,
    WARPS: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, TILES: gl.constexpr,
    GATED: gl.constexpr, BIAS: gl.constexpr, IN_PARTS: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``x [m, k]`` with codes ``w`` (int16 ``[n, k / 4]``) in planes, with ``scales`` (float32 ``[k / 128, n]``). ROWS is 8 or 16, and WARPS 4, 8 or
    16. A program has at least one tile and at most TILES. Unless IN_PARTS, the last program of the same tiles to finish adds up their parts."""
    first, programs, part = gl.program_id(0), gl.num_programs(0), gl.program_id(1)
    UNITS: gl.constexpr = 1 if BLOCKS <= WARPS else 2 if BLOCKS <= 2 * WARPS else 4
    HELD: gl.constexpr = UNITS * WARPS
    WHOLE: gl.constexpr = BLOCKS == HELD
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    begin = part * BLOCKS
    end = begin + BLOCKS
    half = gl.multiple_of(n // 2, 8)
    stride = gl.multiple_of(k // 4, _PLANE)
    count = (tiles - first + programs - 1) // programs
    across: gl.constexpr = _copying(WARPS, HELD)
    block = (begin + gl.arange(0, HELD, gl.SliceLayout(1, gl.SliceLayout(2, across))))[:, None, None]
    held = gl.arange(0, _TILE, gl.SliceLayout(0, gl.SliceLayout(2, across)))
    at = gl.arange(0, _PLANE, gl.SliceLayout(0, gl.SliceLayout(1, across)))
    place = ((held % 8 + held // 8 * half) * stride)[None, :, None] + (block * _PLANE + at[None, None, :])
    over: gl.constexpr = _copying_scales(WARPS, HELD)
    scale_block = (begin + gl.arange(0, HELD, gl.SliceLayout(1, over)))[:, None]
    scale_held = gl.arange(0, _TILE, gl.SliceLayout(0, over))
    scale_place = scale_block * gl.multiple_of(n, 16) + (scale_held % 8 + scale_held // 8 * half)[None, :]
    in_words: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0])
    in_numbers: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    words, numbers, partial = (), (), ()
    for _ in gl.static_range(STAGES):
        words += (gl.allocate_shared_memory(gl.int16, [HELD, _TILE, _PLANE], in_words),)
        numbers += (gl.allocate_shared_memory(gl.float32, [HELD, _TILE], in_numbers),)
        partial += (gl.allocate_shared_memory(gl.float32, [WARPS, _TILE, ROWS], _between(WARPS, ROWS)),)
    codes, own_scales = w + first * 8 * stride, scales + first * 8
    step, scale_step = programs * 8 * stride, programs * 8
    if PDL:
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES - 1):
        if stage < count:
            _copy_tile(
                words[stage], numbers[stage], codes, place, own_scales, scale_place, block, scale_block, end, WHOLE
            )
        async_copy.commit_group()
        codes += step
        own_scales += scale_step
    if PDL:
        gdc_wait()
    held_x = _columns_of_x(x, m, k, begin, end, WARPS, ROWS, mma)
    for unit in gl.static_range(1, UNITS):
        held_x = held_x + _columns_of_x(x, m, k, begin + unit * WARPS, end, WARPS, ROWS, mma)
    GATE: gl.constexpr = GATED if SPLIT == 1 else 0
    ADDS: gl.constexpr = BIAS and SPLIT == 1
    reading: gl.constexpr = _reading(WARPS, WARPS, ROWS)
    out = y if SPLIT == 1 or IN_PARTS else parts
    for start in range(0, count, STAGES):
        for slot in gl.static_range(STAGES):
            index = start + slot
            if index < count:
                async_copy.wait_group(STAGES - 2)
                total = gl.zeros([WARPS, _TILE, ROWS], gl.float32, mma)
                for unit in gl.static_range(UNITS):
                    code = words[slot].slice(unit * WARPS, WARPS).load(gl.DotOperandLayout(0, mma, 8))
                    scale = numbers[slot].slice(unit * WARPS, WARPS).load(gl.SliceLayout(2, mma))
                    if unit == UNITS - 1:  # while tensor cores work: copies before codes are read would delay these
                        if index + STAGES - 1 < count:
                            _copy_tile(
                                words[(slot + STAGES - 1) % STAGES], numbers[(slot + STAGES - 1) % STAGES], codes, place,
                                own_scales, scale_place, block, scale_block, end, WHOLE,
                            )  # fmt: skip
                        async_copy.commit_group()
                        codes += step
                        own_scales += scale_step
                    total = _add_block(
                        total, code, scale,
                        held_x[5 * unit], held_x[5 * unit + 1], held_x[5 * unit + 2], held_x[5 * unit + 3], held_x[5 * unit + 4],
                        begin + unit * WARPS, end, WARPS, WHOLE, mma,
                    )  # fmt: skip
                if index > 0:
                    sums = gl.sum(partial[(slot + STAGES - 1) % STAGES].load(reading), 0)
                    _finish(sums, out, bias, part, m, n, first + (index - 1) * programs, GATE, ADDS)
                partial[slot].store(total)
    _barrier()
    for slot in gl.static_range(STAGES):
        if (count + STAGES - 1) % STAGES == slot:
            sums = gl.sum(partial[slot].load(reading), 0)
            _finish(sums, out, bias, part, m, n, first + (count - 1) * programs, GATE, ADDS)
    if SPLIT > 1 and not IN_PARTS:
        _barrier()
        if gl.atomic_add(arrived + first, 1, sem="acq_rel") == SPLIT - 1:
            _join(parts, y, bias, m, n, first, programs, count, WARPS, ROWS, TILES, SPLIT, GATED, BIAS)
            gl.store(arrived + first, 0)


def fits_slices(weight: Integers) -> bool:
    """Return True if the kernel multiplies with ``weight``: integers of 4 bits in groups of 128 columns without zero points, on the compute capability
    on which it was measured. Triton's interpreter does not run the kernel."""
    n, codes = len(weight.codes), weight.codes
    if weight.bits != 4 or weight.group != PLANES or weight.zeros is not None or n % _TILE.value or INTERPRETED:
        return False
    return n * weight.columns < 1 << 33 and codes.is_cuda and torch.cuda.get_device_capability(codes.device) == (9, 0)


def slice_tile(rows: int, n: int, k: int, *, in_parts: bool) -> SliceTile | None:
    """Return the tile for ``rows`` rows and a weight ``[n, k]``, or None where other kernels are faster: for one row, and for small weights. For the sizes of an
    8B model they are among the fastest of those that were tried on an H200; other sizes have similar ones."""
    if not FEWEST_SLICED <= rows <= MOST_SLICED or n < 4096 or n * k < 1 << 24 or k % PLANES:
        return None
    whole, tiles = k // PLANES, n // _TILE.value
    for warps, most, on_each, stages in _sizes(rows, n, k, in_parts=in_parts):
        fitting = [blocks for blocks in range(most, 0, -1) if whole % blocks == 0 and _is_balanced(blocks, warps)]
        split = whole // fitting[0] if fitting else 0
        if not 0 < split <= (_MOST_PARTS if in_parts else _MOST_JOINED) or split * MOST_SLICED * n > MAX_PARTS:
            continue
        at_once = on_each * _MULTIPROCESSORS
        rounds = -(-tiles * split // at_once)
        programs = -(-tiles // rounds) if rounds < 8 else at_once // split
        return SliceTile(warps, fitting[0], programs, max(2, min(rounds, stages)), split, on_each)
    return None


def _sizes(rows: int, n: int, k: int, *, in_parts: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield numbers of warps, of blocks at most, of programs on a multiprocessor and of stages, those that were the fastest first."""
    few = rows <= 8
    if n >= _WIDE or not (few or in_parts):
        yield 16, 32, 1, 3
    if in_parts and not few and n * k < 1 << 25:
        yield 8, 8, 2, 3
    yield 8, 16, 2, 4 if few and in_parts else 3
    yield 16, 32, 1, 3


def _is_balanced(blocks: int, warps: int) -> bool:
    """Return True if nearly all warps have as many blocks as the others."""
    held = next((warps * units for units in (1, 2, 4) if blocks <= warps * units), 0)
    return blocks * 8 >= held * 7 > 0


def multiply_slices(
    x: torch.Tensor, weight: Integers, bias: torch.Tensor | None, y: torch.Tensor, gated: int, tile: SliceTile, space: Workspace,
    *, in_parts: bool,
) -> None:  # fmt: skip
    """Write the product of ``x [m, k]``, of 16 bits, and a weight ``[n, k]`` whose scales are float32 to ``y``: ``[m, n]``, ``[m, n / 2]`` if ``gated`` (see
    ``GATE_KINDS``), or float32 ``[split, m, n]`` if ``in_parts``. Mutates ``y`` and ``space``."""
    (m, k), n = x.shape, len(weight.codes)
    tiles = n // _TILE.value
    assert tile.programs <= tiles, "a program has no tile"
    launch(
        slice_rows, (tile.programs, tile.split),
        x, weight.codes.view(torch.int16), weight.scales, bias, y, space.parts, space.arrived, m, n, k, tiles,
        WARPS=tile.warps, ROWS=8 if m <= 8 else 16, BLOCKS=tile.blocks, STAGES=tile.stages, SPLIT=tile.split,
        TILES=next_power_of_2(cdiv(tiles, tile.programs)),
        GATED=gated, BIAS=bias is not None, IN_PARTS=in_parts, num_warps=tile.warps, registers=tile.registers,
    )  # fmt: skip
