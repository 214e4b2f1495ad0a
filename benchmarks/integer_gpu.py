"""Measure products with weights of 4 bits on one GPU, next to the time of reading their bytes.

    python benchmarks/integer_gpu.py [--rows 1 16 64] [--group 128] [--tune]

Results are first compared with float32. Weights are cold: calls rotate over several copies. ``floor`` is the time of reading codes and
scales at ``ops_gpu.READ``, ``bf16`` that of cuBLAS with a weight in bfloat16. With ``--tune`` other tiles compete, and the fastest are
printed, for ``plane_tile`` in ``dovetail_quantization/triton/integer_rows.py``, ``resident_tile`` in ``integer_resident.py`` and ``one_row_tile`` in
``integer_one_row.py``. Products before a norm, which adds their parts up, are also measured in parts.
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
from dovetail_quantization.triton.integer_one_row import OneRowTile, split_of
from dovetail_quantization.triton.integer_resident import MOST_ROWS as MOST_RESIDENT_ROWS
from dovetail_quantization.triton.integer_resident import ResidentTile
from dovetail_quantization.triton.integer_rows import IntegerRows, IntegerTile
from ops_gpu import COLD, READ, per_call, randn

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
PROGRAMS = (96, 1800)
"""The least and the greatest number of programs that is tried."""


def weights(n: int, k: int, group: int, count: int | None = None) -> list[Integers]:
    """Return random weights, by default more than fit the L2 cache."""
    count = max(2, -(-int(COLD) // (n * k // 2))) if count is None else count
    scales = torch.rand(k // group, n, device="cuda") * 0.01
    return [
        Integers(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"), scales) for _ in range(count)
    ]


Tile = IntegerTile | OneRowTile | ResidentTile
IN_PARTS = {"o", "down"}
"""The products that stay in parts, for the norm that follows."""


def candidates(rows: int, name: str) -> Iterator[Tile]:
    """Yield tiles that may be fast."""
    n, k = SHAPES[name]
    if rows <= MOST_RESIDENT_ROWS:
        yield from resident_candidates(rows, name)
    if rows == 1:
        block_k, split = 1 << (k - 1).bit_length(), split_of(k)
        for block_n, programs in itertools.product((4, 8, 16), (16, 24, 32)):
            yield OneRowTile(block_n, block_k, min(block_k // 512, 16), max(1, programs * 512 // block_k))
            if name in IN_PARTS:
                yield OneRowTile(block_n, k // split, 4, programs // 4, split)
        return
    least = next(size for size in (8, 16, 32, 64) if rows <= size)
    sizes = [(64, 2, 8), (128, 4, 4), (128, 4, 6), (64, 4, 4), (64, 4, 6)]
    for (block_n, warps, stages), split in itertools.product(sizes, (1, 2, 4, 8, 16)):
        programs = -(-n // block_n) * split
        fits = split == 1 or -(-n // block_n) * split * block_n * least <= MAX_PARTS
        if k % (split * PLANES) == 0 and PROGRAMS[0] <= programs <= PROGRAMS[1] and fits:
            yield IntegerTile(least, block_n, PLANES, warps, stages, split)


def resident_candidates(rows: int, name: str) -> Iterator[ResidentTile]:
    """Yield tiles of the kernel that holds rows. ``per_sm`` is limited by registers."""
    k, block_m = SHAPES[name][1], 8 if rows <= 8 else 16
    for (warps, blocks), block_n in itertools.product(((16, 2), (16, 1), (8, 2), (8, 1), (32, 1)), (16, 32)):
        split = -(-k // (warps * blocks * PLANES))
        if (warps == 32 and block_m == 16) or k % (split * PLANES) or (split > 1 and name not in IN_PARTS):
            continue
        for per_sm in (1, 2, 4):
            if 8 <= warps * per_sm <= 32 and (per_sm * warps <= 16 or blocks == 1):
                yield ResidentTile(block_m, block_n, warps, blocks, per_sm, split)


def compile_tile(job: tuple[int, str, int, Tile]) -> str | None:
    """Compile a kernel into Triton's cache, in a process of its own. Return what is wrong, if anything is."""
    rows, name, group, tile = job
    n, k = SHAPES[name]
    try:
        call(name, with_tile(weights(n, k, group, 1)[0], rows, tile), randn(rows, k), tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name} {rows} {tuple(tile)}: {type(error).__name__}: {error}"
    return None


def call(name: str, product: IntegerRows, x: torch.Tensor, tile: Tile | None) -> torch.Tensor | None:
    """Compute a product as a model does, or its parts if the tile is of those."""
    if isinstance(tile, (OneRowTile, ResidentTile)) and tile.split > 1:
        return product.parts(x)
    return product.gated(x, None, "silu") if name == "gate_up" else product.forward(x, None)


def with_tile(weight: Integers, rows: int, tile: Tile | None) -> IntegerRows:
    """Return the products of a weight, with a tile of its own for a number of rows if one is given."""
    found = IntegerRows(weight)
    if tile is None:
        return found
    found.resident[rows] = found.resident_in_parts[rows] = found.one_row = None
    if isinstance(tile, OneRowTile):
        found.one_row, found.one_row_in_parts = tile._replace(split=1), tile
    elif isinstance(tile, ResidentTile):
        found.resident[rows], found.resident_in_parts[rows] = tile._replace(split=1), tile
    else:
        found.tiles[rows] = tile
    return found


def tile_in_parts(product: IntegerRows, rows: int) -> Tile | None:
    """Return the tile with which a product of few rows stays in parts."""
    if rows > MOST_RESIDENT_ROWS:
        return None
    return product.resident_in_parts[rows] or (product.one_row_in_parts if rows == 1 else None)


def main() -> None:
    """Print a line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if args.tune:
        jobs = [
            (rows, name, args.group, tile) for rows in args.rows for name in SHAPES for tile in candidates(rows, name)
        ]
        with multiprocessing.get_context("spawn").Pool(12) as pool:
            for wrong in filter(None, pool.imap_unordered(compile_tile, jobs, chunksize=4)):
                print(wrong)
    print(f"{'':16}{'rows':>6}{'us':>9}{'floor':>9}{'bf16':>9}{'share of READ':>15}")
    for name, (n, k) in SHAPES.items():
        copies = weights(n, k, args.group)
        plain = [randn(n, k) for _ in range(max(2, -(-int(COLD) // (n * k * 2))))]
        floor = (n * k / 2 + n * k / args.group * 4) / READ * 1e6
        for rows in args.rows:
            x = randn(rows, k)
            exact = x.float() @ dequantize(copies[0], torch.float32).T
            parts = IntegerRows(copies[0]).parts(x)
            for got in (IntegerRows(copies[0]).forward(x, None), exact if parts is None else parts.sum(0)):
                error = (got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
                assert error < 6e-3, f"{name}: the relative error is {error:.1e}"
            took = measured(name, copies, x)
            dense = per_call([lambda weight=weight, x=x: functional.linear(x, weight) for weight in plain])
            print(f"{name:16}{rows:6}{took:9.1f}{floor:9.1f}{dense:9.1f}{floor / took:15.2f}", flush=True)
            if name in IN_PARTS and (split := tile_in_parts(IntegerRows(copies[0]), rows)) is not None:
                print(f"{'  in parts':16}{rows:6}{measured(name, copies, x, split):9.1f}  {split}", flush=True)
            if args.tune:
                tune(name, copies, x)


def tune(name: str, copies: list[Integers], x: torch.Tensor) -> None:
    """Print the fastest tiles."""
    found = list[tuple[float, str]]()
    for tile in candidates(len(x), name):
        try:
            found.append((measured(name, copies, x, tile), repr(tile)))
        except Exception as error:
            print(f"{name} {len(x)} {tile}: {type(error).__name__}: {str(error)[:100]}")
    for time, tile in sorted(found)[:6]:
        print(f"{'':22}{time:9.1f}  {tile}", flush=True)


def measured(name: str, copies: list[Integers], x: torch.Tensor, tile: Tile | None = None) -> float:
    """Return microseconds of a product."""
    products = [with_tile(each, len(x), tile) for each in copies]
    return per_call([lambda each=each: call(name, each, x, tile) for each in products])


if __name__ == "__main__":
    main()
