"""Measure products with weights of 4 bits on one GPU, next to the time of reading their bytes.

    python benchmarks/integer_gpu.py [--rows 1 16 64] [--group 128] [--zeros] [--tune]

Results are first compared with float32. Weights are cold: calls rotate over several copies. ``floor`` is the time of reading codes and
scales at ``ops_gpu.READ``, ``bf16`` that of cuBLAS with a weight in bfloat16. With ``--tune`` other tiles compete, and the fastest are
printed, for ``bytes_tile`` in ``dovetail_quantization/triton/integer_bytes.py``, ``plane_tile`` in ``integer_rows.py``, ``many_tile`` in
``integer_many.py``, ``slice_tile`` in ``integer_slices.py`` and ``one_row_tile`` in ``integer_one_row.py``. Rows that no kernel of ours takes are multiplied
by cuBLAS with the weight that a kernel dequantizes. One row is also measured with the kernel for several rows. Up to 16 rows are also measured in parts,
as before a norm that adds them up; tiles of slices for o and down are measured so.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Iterator

import torch
from torch.nn import functional

from dovetail.ops.integers import PLANES, Integers, dequantize
from dovetail.ops.triton.tuning import MAX_PARTS
from dovetail_quantization.triton.integer_bytes import ROWS, BytesTile
from dovetail_quantization.triton.integer_many import FEWEST_MANY, ManyTile
from dovetail_quantization.triton.integer_rows import IntegerRows, IntegerTile, plain_weight
from dovetail_quantization.triton.integer_slices import FEWEST_SLICED, MOST_SLICED, SliceTile
from dovetail_quantization.triton.one_row import OneRowTile, split_of
from ops_gpu import COLD, READ, per_call, randn

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
IN_PARTS = (SHAPES["o"], SHAPES["down"])
PROGRAMS = (96, 1800)
"""The least and the greatest number of programs that is tried."""


def weights(n: int, k: int, group: int, *, zeros: bool = False) -> list[Integers]:
    """Return random weights that do not fit the L2 cache together."""
    count = max(2, -(-int(COLD) // (n * k // 2)))
    scales = torch.rand(k // group, n, device="cuda") * 0.01
    middles = torch.randint(0, 16, (k // group, n), device="cuda").float() if zeros else None
    return [
        Integers(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"), scales, middles)
        for _ in range(count)
    ]


Tile = IntegerTile | BytesTile | ManyTile | OneRowTile | SliceTile


def candidates(rows: int, n: int, k: int, group: int, *, zeros: bool = False) -> Iterator[Tile]:
    """Yield tiles that may be fast. Those of slices and of bytes serve no weights with ``zeros``."""
    if rows >= FEWEST_MANY:
        yield from many_candidates(rows, n, k)
        return
    if rows == 1:
        block_k = 1 << (k - 1).bit_length()
        for block_n, width, programs in itertools.product((2, 4, 8, 16), (512, 1024, 2048), (8, 12, 16, 24, 32)):
            warps = min(block_k // width, 16)
            if 2 <= warps <= programs and block_n * width <= 16384:
                yield OneRowTile(block_n, block_k, warps, programs // warps)
        split = split_of(k)
        for block_n, warps, programs in itertools.product((2, 4, 8, 16), (1, 2, 4), (12, 16, 24, 32)):
            if split > 1:
                yield OneRowTile(block_n, k // split, warps, programs // warps, split)
    if FEWEST_SLICED <= rows <= MOST_SLICED and group == PLANES and not zeros:
        yield from slice_candidates(rows, n, k)
    least = next(size for size in (8, 16, 32, 64) if rows <= size)
    sizes = [
        (64, 2, 4),
        (64, 2, 6),
        (64, 2, 8),
        (128, 4, 4),
        (128, 4, 6),
        (64, 4, 4),
        (64, 4, 6),
        (32, 1, 6),
        (32, 2, 6),
    ]
    tiles: list[IntegerTile | BytesTile] = [
        IntegerTile(least, block_n, PLANES, warps, stages, 1) for block_n, warps, stages in sizes
    ]
    if least <= 32:
        wide = [(32, 1), (64, 2), (64, 4), (128, 2), (128, 4), (128, 8), (256, 8)]
        shapes = itertools.product(wide, ((PLANES, 4), (PLANES, 6), (2 * PLANES, 3)))
        size = max(least, 16)
        tiles += [
            IntegerTile(size, block_n, block_k, warps, stages, 1, columns=True, ahead=4)
            for (block_n, warps), (block_k, stages) in shapes
        ]
    if 1 < rows <= ROWS.value and group % PLANES == 0 and not zeros:
        wide = [(64, 2), (64, 4), (128, 4), (128, 8), (256, 8)]
        shapes = itertools.product(wide, ((PLANES, 3), (PLANES, 4), (PLANES, 6), (2 * PLANES, 3)))
        tiles += [
            BytesTile(block_n, block_k, warps, stages, 1, ahead=4) for (block_n, warps), (block_k, stages) in shapes
        ]
    for tile, split in itertools.product(tiles, (1, 2, 4, 7, 8, 14, 16)):
        programs = -(-n // tile.block_n) * split
        height = ROWS.value if isinstance(tile, BytesTile) else tile.block_m
        fits = split == 1 or programs * tile.block_n * height <= MAX_PARTS
        if k % (split * tile.block_k) == 0 and PROGRAMS[0] <= programs <= PROGRAMS[1] and fits:
            yield tile._replace(split=split)


def slice_candidates(rows: int, n: int, k: int) -> Iterator[SliceTile]:
    """Yield tiles of slices that may be fast: 16 warps on each multiprocessor, which compute one, two or four blocks each."""
    tiles, blocks = n // 16, k // PLANES
    for warps, units, stages in itertools.product((4, 8, 16), (1, 2, 4), (2, 3, 4, 5)):
        if units * rows > 32 or (own := warps * units) > 32:
            continue
        own = next((count for count in range(own, own // 8 * 7 - 1, -1) if count and blocks % count == 0), 0)
        split = blocks // own if own else 0
        if not 0 < split <= (16 if (n, k) in IN_PARTS else 4):
            continue
        at_once = 132 * (16 // warps) // split
        even = -(-tiles // -(-tiles // at_once))
        yield from (SliceTile(warps, own, programs, stages, split) for programs in sorted({at_once, even}))


def many_candidates(rows: int, n: int, k: int) -> Iterator[ManyTile]:
    """Yield tiles that may be fast for many rows: those whose programs fit the registers and the shared memory of a multiprocessor."""
    sizes = [
        (64, 64, 4),
        (64, 128, 4),
        (64, 128, 8),
        (64, 256, 8),
        (128, 64, 4),
        (128, 128, 4),
        (128, 128, 8),
        (128, 256, 8),
        (256, 128, 8),
    ]
    for (block_m, block_n, warps), stages, split in itertools.product(sizes, (2, 3, 4, 5), (1, 2, 3, 4, 5, 6, 8)):
        tiles = -(-n // block_n) * -(-rows // block_m)
        fits = split == 1 or tiles * split * block_m * block_n <= MAX_PARTS
        bytes_ahead = stages * (block_m * 2 * PLANES + block_n * PLANES // 2)
        enough = PROGRAMS[0] <= tiles * split <= 560 or (split == 1 and tiles > PROGRAMS[0])
        if fits and enough and bytes_ahead <= 224 << 10 and block_m < 2 * rows:
            yield ManyTile(block_m, block_n, warps, stages, split)


def compile_tile(job: tuple[int, str, int, bool, Tile]) -> str | None:
    """Compile a kernel into Triton's cache, in a process of its own. Return what is wrong, if anything is."""
    rows, name, group, zeros, tile = job
    n, k = SHAPES[name]
    try:
        weight = weights(n, k, group, zeros=zeros)[0]
        call(weight, with_tile(weight, rows, tile), randn(rows, k), tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name} {rows} {tuple(tile)}: {type(error).__name__}: {error}"
    return None


def call(weight: Integers, product: IntegerRows, x: torch.Tensor, tile: Tile | None) -> torch.Tensor | None:
    """Compute a product, or its parts if the tile is of those."""
    sliced = isinstance(tile, SliceTile) and (len(weight.codes), weight.columns) in IN_PARTS
    in_parts = sliced or (isinstance(tile, OneRowTile) and tile.split > 1)
    if not product.is_few(x):
        return functional.linear(x, plain_weight(weight, x.dtype))
    return product.parts(x) if in_parts else product.forward(x, None)


def with_tile(weight: Integers, rows: int, tile: Tile | None) -> IntegerRows:
    """Return the products of a weight, with a tile of its own for a number of rows if one is given."""
    found = IntegerRows(weight)
    if tile is not None and not isinstance(tile, SliceTile):  # slices come before other tiles
        found.slices, found.slices_in_parts = {}, {}
    if isinstance(tile, OneRowTile):
        found.one_row, found.one_row_in_parts = tile._replace(split=1), tile
    elif isinstance(tile, BytesTile):
        found.byte_tiles[rows] = tile
    elif isinstance(tile, ManyTile):
        found.many_tiles[rows] = tile
    elif isinstance(tile, SliceTile):
        found.slices[rows] = found.slices_in_parts[rows] = tile
    elif tile is not None:
        found.one_row, found.byte_tiles[rows] = None, None
        found.tiles[rows] = tile
    return found


def main() -> None:
    """Print a line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--zeros", action="store_true", help="weights with zero points")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if args.tune:
        jobs = [
            (rows, name, args.group, args.zeros, tile)
            for rows in args.rows
            for name, shape in SHAPES.items()
            for tile in candidates(rows, *shape, args.group, zeros=args.zeros)
        ]
        with multiprocessing.get_context("spawn").Pool(12) as pool:
            for wrong in filter(None, pool.imap_unordered(compile_tile, jobs, chunksize=4)):
                print(wrong)
    print(f"{'':16}{'rows':>6}{'us':>9}{'floor':>9}{'bf16':>9}{'share of READ':>15}")
    for name, (n, k) in SHAPES.items():
        copies = weights(n, k, args.group, zeros=args.zeros)
        plain = [randn(n, k) for _ in range(max(2, -(-int(COLD) // (n * k * 2))))]
        floor = (n * k / 2 + n * k / args.group * 4) / READ * 1e6
        for rows in args.rows:
            x, product = randn(rows, k), IntegerRows(copies[0])
            exact = x.float() @ dequantize(copies[0], torch.float32).T
            got = call(copies[0], product, x, None)
            assert got is not None
            error = (got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
            assert error < 6e-3, f"{name}: the relative error is {error:.1e}"
            took = measured(copies, x)
            dense = per_call([lambda weight=weight, x=x: functional.linear(x, weight) for weight in plain])
            print(f"{name:16}{rows:6}{took:9.1f}{floor:9.1f}{dense:9.1f}{floor / took:15.2f}", flush=True)
            parts = product.one_row_in_parts if rows == 1 else None
            if (n, k) in IN_PARTS and rows > 1:
                parts = product.slices_in_parts.get(rows)
            if parts is not None:
                print(f"{'  in parts':16}{rows:6}{measured(copies, x, parts):9.1f}", flush=True)
            if args.tune:
                tiles = candidates(rows, n, k, args.group, zeros=args.zeros)
                found = sorted((measured(copies, x, tile), tuple(tile)) for tile in tiles)
                fastest = ", ".join(f"{time:.1f} {tile}" for time, tile in found[:6])
                print("   ", fastest, "; now", in_use(product, x, in_parts=(n, k) in IN_PARTS))


def in_use(product: IntegerRows, x: torch.Tensor, *, in_parts: bool) -> str:
    """Return the tile with which ``x`` is multiplied, and if ``in_parts``, that with which the product stays in parts."""
    if not product.is_few(x):
        return "dequantized"
    one = len(x) == 1 and product.one_row is not None
    found = str(product.one_row if one else product.tile(x))
    if in_parts and product.parts(x) is not None:
        found += f", in parts {product.one_row_in_parts if one else product.tile(x, in_parts=True)}"
    return found


def measured(copies: list[Integers], x: torch.Tensor, tile: Tile | None = None) -> float:
    """Return microseconds of a product."""
    products = [(each, with_tile(each, len(x), tile)) for each in copies]
    return per_call([lambda each=each: call(*each, x, tile) for each in products])


if __name__ == "__main__":
    main()
