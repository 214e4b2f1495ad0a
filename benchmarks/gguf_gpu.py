"""Measure products with packed blocks of GGUF on one GPU, next to the time of reading their bytes.

    python benchmarks/gguf_gpu.py [--rows 1 2 16 64] [--shapes gate_up down] [--tune]

Weights are cold: calls rotate over several copies. ``file`` is the time of reading the blocks as the file stores them, ``packed`` that of
the packed rows, both at ``ops_gpu.READ``; ``bf16`` is the product with the weight in bfloat16. One row is also multiplied in parts, as
before a norm that adds them up. With ``--tune`` other tiles compete, and the fastest are printed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dovetail.gguf.block_types import TYPES
from dovetail.ops.activation import Activation
from dovetail.ops.linear import few_rows
from dovetail.ops.packed_blocks import PACKED, PackedWeight, pack
from dovetail_quantization.gguf_blocks import fill_random
from dovetail_quantization.triton.one_row import OneRowTile, split_of
from dovetail_quantization.triton.packed_product import PackedRows, PackedTile
from ops_gpu import COLD, READ, per_call, randn

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
KINDS = {"qkv": ("Q4_K",), "o": ("Q4_K",), "gate_up": ("Q4_K",), "down": ("Q4_K", "Q6_K"), "head": ("Q6_K",)}


class Case(NamedTuple):
    """Hold copies of a weight, and the bytes of one in the file."""

    name: str
    kind: str
    copies: list[PackedRows]
    stored: int
    packed: int


def case(name: str, kind: str) -> Case:
    """Return random weights."""
    n, k = SHAPES[name]
    one, copies = TYPES[kind], list[PackedRows]()
    stored = n * one.row_bytes(k)
    generator = torch.Generator("cuda").manual_seed(0)
    packed = 0
    for _ in range(max(2, -(-int(COLD) // stored))):
        blocks = torch.empty(n, one.row_bytes(k), dtype=torch.uint8, device="cuda")
        fill_random(blocks.view(-1, one.nbytes), one, 0.02, generator)
        rows = pack(blocks, one)
        packed = rows.nbytes
        copies.append(PackedRows(PackedWeight(rows, PACKED[kind], k)))
    return Case(name, kind, copies, stored, packed)


def measure(given: Case, m: int, *, in_parts: bool = False) -> float:
    """Return the microseconds of a product of ``m`` rows, with the gate if it has one, or of its parts."""
    n, k = SHAPES[given.name]
    gate: Activation | None = "silu" if gated(given) else None
    x, y = randn(m, k), torch.empty(m, n // 2 if gate else n, device="cuda", dtype=torch.bfloat16)
    count = max(len(given.copies), 20)
    rows = [given.copies[index % len(given.copies)] for index in range(count)]
    if in_parts:
        return per_call([lambda one=one: one.parts(x) for one in rows])
    return per_call([lambda one=one: one.multiply(x, None, y, gate) for one in rows])


def gated(given: Case) -> bool:
    """Return whether a product is followed by a gate."""
    return given.name == "gate_up"


def dense(name: str, m: int) -> float:
    """Return the microseconds of the product in bfloat16."""
    n, k = SHAPES[name]
    weights = [randn(n, k, scale=0.02) for _ in range(max(2, -(-int(COLD) // (2 * n * k))))]
    x, products = randn(m, k), [few_rows(weight) for weight in weights]
    calls = [
        lambda weight=weight, product=product: x @ weight.T if product is None else product(x, None)
        for weight, product in zip(weights, products, strict=True)
    ]
    return per_call((calls * 20)[:20])


def tiles(given: Case, m: int) -> Iterator[OneRowTile | PackedTile]:
    """Yield other tiles."""
    first = given.copies[0]
    n, k = SHAPES[given.name]
    if m == 1:
        assert first.one_row is not None
        block_k = first.one_row.block_k
        for block_n, per_warp, programs in itertools.product((2, 4, 8), (1024, 2048), (0.5, 1, 1.5, 2)):
            warps = block_k // per_warp
            if 1 <= warps <= 32 and (per_sm := round(16 * programs / warps)) >= 1:
                yield OneRowTile(block_n, block_k, warps, per_sm)
        split = split_of(k)
        for block_n, warps, programs in itertools.product((4, 8), (2, 4), (12, 16, 24)):
            if split > 1 and not gated(given):
                yield OneRowTile(block_n, k // split, warps, programs // warps, split)
        return
    block_m = first.few_rows[m].block_m
    for block_n, block_k, warps, stages, split in itertools.product(
        (64, 128), (128, 256), (4, 8), (2, 3, 4), (1, 2, 4, 8)
    ):
        span = -(-k // block_k // split) * block_k
        if warps * 16 <= block_n and span * split == k and -(-n // block_n) * split * block_n * block_m <= 1 << 22:
            yield PackedTile(block_m, block_n, block_k, warps, stages, split, span)


def tune(given: Case, m: int) -> list[tuple[float, OneRowTile | PackedTile]]:
    """Return the times of other tiles, the shortest first."""
    found = []
    for tile in set(tiles(given, m)):
        in_parts = isinstance(tile, OneRowTile) and tile.split > 1
        for rows in given.copies:
            if isinstance(tile, OneRowTile):
                rows.one_row, rows.one_row_in_parts = tile._replace(split=1), tile
            else:
                rows.few_rows[m] = tile
        try:
            found.append((measure(given, m, in_parts=in_parts), tile))
        except Exception as error:
            print("FAILED", tile, repr(error)[:100], flush=True)
    return sorted(found, key=lambda one: one[0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 16, 64])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--top", type=int, default=4)
    args = parser.parse_args()
    print(f"{'':16}{'rows':>6}{'us':>9}{'file':>9}{'packed':>9}{'bf16':>9}{'share of READ':>15}")
    for name, kind in ((shape, kind) for shape in args.shapes for kind in KINDS[shape]):
        given = case(name, kind)
        for m in args.rows:
            took, packed = measure(given, m), given.packed / READ * 1e6
            line = f"{took:9.1f}{given.stored / READ * 1e6:9.1f}{packed:9.1f}{dense(name, m):9.1f}{packed / took:15.2f}"
            print(f"{name + ' ' + kind:16}{m:6}{line}", flush=True)
            if m == 1 and not gated(given) and given.copies[0].one_row_in_parts is not None:
                print(f"{'  in parts':16}{m:6}{measure(given, m, in_parts=True):9.1f}", flush=True)
            for time, tile in tune(given, m)[: args.top] if args.tune else []:
                print(f"{'':22}{time:9.1f}  {tile}", flush=True)


if __name__ == "__main__":
    main()
