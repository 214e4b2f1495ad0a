"""Compare kernels of layers of experts, and their tiles, on one Hopper GPU.

    python benchmarks/experts_compare.py [--parts prompts decode one mxfp4]

Each kernel is first compared with the kernels in use, then timed as ``experts_gpu.py`` does: medians of graph replays with different
choices of experts. Kernels are compiled by processes before. The lines of a table are sorted by time; those of the kernels in use
have the name ``now``. ``prompts`` and ``decode`` time both products of Qwen3-30B-A3B each for itself and then the layer with the fastest
tiles, ``one`` the layer for one token, and ``mxfp4`` the layer of gpt-oss-20b.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.ops.expert_formats import dequantized
from dovetail.ops.routing import route
from dovetail.ops.triton import experts as plain
from dovetail.ops.triton import experts_many as many
from dovetail.ops.triton import mxfp4, mxfp4_planes
from dovetail.ops.triton.ahead import KernelsAhead
from dovetail.ops.triton.expert_tiles import tiles_of
from dovetail.ops.triton.experts_many import ManyTile, ManyTiles
from dovetail.ops.triton.mxfp4_tiles import MOST_SHARED, Mxfp4Tile, Mxfp4Tiles, shared_bytes
from dovetail.ops.triton.routing import ExpertOrder, sort_by_expert
from experts_gpu import SIZES, Size, layer_calls, library_time, logits_of, microseconds, torch_calls, weights_of

ROUNDS = 8


class Try(NamedTuple):
    """Hold a kernel to time: its name, what computes one choice of experts, and whose result it must equal."""

    name: str
    call: Callable[[Any], torch.Tensor]


def timed(title: str, tries: list[Try], inputs: list[Any], ahead: KernelsAhead) -> list[tuple[float, str]]:
    """Compile, check against the first of ``tries``, and time. Print and return the times with their names, sorted."""
    if ahead.is_active:
        with ahead.noting():
            for one in tries:
                try:
                    one.call(inputs[0])
                except Exception as error:
                    print(f"  {one.name}: {type(error).__name__} {error!s:.80}")
        ahead.wait(120)
    expected = tries[0].call(inputs[0]).float()
    found = list[tuple[float, str]]()
    for one in tries:
        try:
            got = one.call(inputs[0]).float()
            error = ((got - expected).norm() / expected.norm()).item()
            if not error < 0.01:
                print(f"  {one.name}: WRONG, the relative difference is {error:.4f}", flush=True)
                continue
            found.append((microseconds([partial(one.call, given) for given in inputs]), one.name))
        except Exception as error:
            print(f"  {one.name}: {type(error).__name__} {error!s:.80}", flush=True)
            if "CUDA" in str(error):
                raise
    found.sort()
    now = next((value for value, name in found if name == tries[0].name), float("nan"))
    print(f"{title}: now {now:.1f}; " + ", ".join(f"{value:.1f} {name}" for value, name in found[:7]), flush=True)
    return found


MANY = {
    128: (
        [(128, 64, 8, 4, 0), (128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (64, 64, 4, 3, 0), (64, 64, 8, 4, 0), (64, 64, 8, 3, 2), (64, 64, 4, 3, 2)],
        [(256, 64, 8, 4, 0), (256, 64, 8, 3, 1), (128, 64, 4, 3, 0), (128, 64, 8, 4, 0), (128, 64, 8, 3, 2), (128, 64, 4, 3, 2), (128, 128, 8, 3, 1)],
    ),
    256: ([(64, 64, 8, 4, 0), (64, 64, 8, 3, 1)], [(128, 64, 8, 4, 0), (128, 64, 8, 3, 1)]),
    64: (
        [(128, 64, 4, 3, 0), (128, 64, 8, 4, 0), (64, 64, 4, 4, 0), (64, 128, 4, 3, 0), (64, 64, 4, 4, 2), (128, 64, 4, 4, 1)],
        [(256, 64, 4, 3, 0), (256, 64, 8, 4, 0), (128, 64, 4, 4, 0), (128, 128, 4, 3, 0), (128, 64, 4, 4, 2), (256, 64, 4, 4, 1)],
    ),
    32: (
        [(64, 64, 4, 4, 0), (64, 128, 4, 3, 0), (64, 128, 4, 4, 0), (32, 128, 4, 5, 0), (128, 64, 8, 4, 0)],
        [(128, 64, 4, 4, 0), (128, 128, 4, 3, 0), (128, 128, 4, 4, 0), (64, 128, 4, 5, 0), (256, 64, 8, 4, 0)],
    ),
    16: (
        [(64, 128, 4, 3, 0), (64, 128, 4, 5, 0), (64, 128, 8, 5, 0), (32, 128, 4, 5, 0), (32, 256, 4, 4, 0), (128, 64, 8, 5, 0), (64, 128, 4, 5, 1), (32, 256, 4, 3, 2)],
        [(128, 128, 4, 3, 0), (128, 128, 4, 5, 0), (128, 128, 8, 5, 0), (64, 128, 4, 5, 0), (64, 256, 4, 4, 0), (256, 64, 8, 5, 0), (128, 128, 4, 5, 1), (64, 256, 4, 3, 2)],
    ),
}  # fmt: skip
"""Map the number of rows of a block to the tiles that are tried for both products."""


class Choice(NamedTuple):
    """Hold rows, a choice of experts and what the product with ``down`` reads."""

    x: torch.Tensor
    routing: Routing
    orders: dict[int, ExpertOrder]
    inner: torch.Tensor


def choices(size: Size, tokens: int, routing: str, blocks: list[int], weights: ExpertWeights) -> list[Choice]:
    """Return ``ROUNDS`` choices, sorted in blocks of each of the numbers of rows."""
    x = torch.randn(tokens, size.hidden, device="cuda").bfloat16()
    found = list[Choice]()
    for _ in range(ROUNDS):
        chosen = route(logits_of(size, tokens, routing), size.rule)
        orders = {rows: sort_by_expert(chosen.ids, 0, weights.whole, rows) for rows in blocks}
        inner = torch.randn(tokens * size.rule.top_k, size.size, device="cuda").bfloat16()
        found.append(Choice(x, chosen, orders, inner))
    return found


def compare_many(
    name: str, tokens: int, routing: str, blocks: list[int], weights: ExpertWeights, ahead: KernelsAhead
) -> None:
    """Time both products for themselves, then the layer."""
    size = SIZES[name]
    now = tiles_of(tokens, weights.whole, size.rule.top_k, size.hidden, size.size, 1.0, 2)
    inputs = choices(size, tokens, routing, sorted({*blocks, now.block_m}), weights)

    def now_gate(given: Choice) -> torch.Tensor:
        inner = torch.empty_like(given.inner)
        plain.launch_gate_up(given.x, inner, given.routing, weights, given.orders[now.block_m], now.gate_up)
        return inner

    def now_down(given: Choice) -> torch.Tensor:
        return plain.launch_down(
            given.inner, given.routing, weights, given.orders[now.block_m], now.down, in_parts=False
        )

    def gate(given: Choice, rows: int, tile: ManyTile) -> torch.Tensor:
        return many.gate_up(given.x, given.routing, weights, given.orders[rows], tile)

    def down(given: Choice, rows: int, tile: ManyTile) -> torch.Tensor:
        return many.down(given.inner, given.routing, weights, given.orders[rows], tile)

    gates = [Try(f"{now.block_m} now {tuple(now.gate_up)}", now_gate)]
    downs = [Try(f"{now.block_m} now {tuple(now.down)}", now_down)]
    for tries, call, which in ((gates, gate, 0), (downs, down, 1)):
        for rows in blocks:
            tiles = [ManyTile(*values) for values in MANY[rows][which]]
            tries += [Try(f"{rows} {tuple(tile)}", partial(call, rows=rows, tile=tile)) for tile in tiles]
    title = f"{name} {tokens} {routing}"
    found = timed(f"{title} gate_up", gates, inputs, ahead), timed(f"{title} down", downs, inputs, ahead)
    pairs = [
        (one + other, first, second)
        for one, first in found[0]
        for other, second in found[1]
        if first.split()[0] == second.split()[0]
    ]
    best = min(pairs, default=None)
    now_time = microseconds(layer_calls(size, weights, tokens, routing))
    library = library_time(torch_calls(size, weights, "plain", tokens, routing)) if tokens >= 256 else float("nan")
    print(
        f"{title}: layer now {now_time:.1f}, torch's products {library:.1f}, fastest products in blocks of the same size {best}",
        flush=True,
    )


def compare_one(weights: ExpertWeights, ahead: KernelsAhead) -> None:
    """Time the layer for one token."""
    size = SIZES["qwen3-30b-a3b"]
    x = torch.randn(1, size.hidden, device="cuda").bfloat16()
    inputs = [logits_of(size, 1, "uniform") for _ in range(ROUNDS)]
    usual = plain.ONE

    def call(logits: torch.Tensor, tile: plain.OneTile) -> torch.Tensor:
        plain.ONE = tile
        try:
            return plain.one_token(x, route(logits, size.rule), weights, None, in_parts=True)
        finally:
            plain.ONE = usual

    tiles = [plain.OneTile(2, 1024, 2, 4, 2, False)]
    tiles += [
        plain.OneTile(2, 1024, 2, n, warps, True)
        for n, warps in ((4, 2), (2, 1), (4, 1), (2, 2), (8, 4), (8, 2), (4, 4), (1, 1))
    ]  # fmt: skip
    tiles += [
        plain.OneTile(*gate, 4, 2, True)
        for gate in ((2, 2048, 2), (1, 2048, 1), (2, 1024, 1), (1, 1024, 1), (4, 1024, 4), (4, 512, 2), (2, 2048, 4), (4, 1024, 2), (1, 2048, 2), (2, 512, 1))
    ]  # fmt: skip
    timed("one token", [Try(str(tuple(tile)), partial(call, tile=tile)) for tile in tiles], inputs, ahead)
    timed("one token, routing alone", [Try("route", lambda logits: route(logits, size.rule).weights)], inputs, ahead)


def mxfp4_tries(tokens: int) -> Iterator[Mxfp4Tiles]:
    """Yield tiles to try for codes in planes."""
    if tokens > 256:
        for rows, n, k, warps, stages in itertools.product((64, 128, 256), (64, 128), (64, 128), (4, 8), (3,)):
            tile = Mxfp4Tile(n, k, warps, stages)
            if 64 <= rows * n // (warps * 32) <= 160 and n >= 16 * warps and shared_bytes(tile, rows, 2) <= MOST_SHARED:
                yield Mxfp4Tiles(rows, tile, tile)
        return
    blocks = (8,) if tokens <= 8 else (8, 16) if tokens <= 16 else (8, 16, 32)
    sizes = (
        (64, 128, 2),
        (128, 128, 2),
        (64, 256, 2),
        (128, 256, 4),
        (64, 128, 4),
        (128, 128, 4),
        (32, 256, 2),
        (32, 128, 1),
        (32, 256, 1),
    )
    for rows, (n, k, warps), stages in itertools.product(blocks, sizes, (3, 5)):
        tile = Mxfp4Tile(n, k, warps, stages)
        if rows * n <= warps * 32 * 64 and shared_bytes(tile, rows, 2) <= MOST_SHARED:
            yield Mxfp4Tiles(rows, tile, tile)


def compare_mxfp4(ahead: KernelsAhead, numbers: list[int]) -> None:
    """Time the layer of gpt-oss-20b."""
    size = SIZES["gpt-oss-20b"]
    weights = weights_of(size, "mxfp4")
    planes = replace(
        weights, gate_up=mxfp4_planes.in_planes(weights.gate_up), down=mxfp4_planes.in_planes(weights.down)
    )
    values = dequantized(weights, torch.bfloat16)
    for tokens in numbers:
        x = torch.randn(tokens, size.hidden, device="cuda").bfloat16()
        for routing in ("uniform", "skewed"):
            inputs = [route(logits_of(size, tokens, routing), size.rule) for _ in range(ROUNDS)]

            tries = [Try("now", partial(mxfp4.pair_results, x, weights=weights, in_parts=False))]
            for tiles in mxfp4_tries(tokens):
                call = partial(mxfp4_planes.pair_results, x, weights=planes, tiles=tiles, in_parts=False)
                tries.append(Try(f"{tiles.block_m} {tuple(tiles.down)}", call))
            if tokens > 256:
                tiles = ManyTiles(128, ManyTile(128, 64, 8, 4), ManyTile(256, 64, 8, 4))
                tries.append(Try("bfloat16", partial(many.pair_results, x, weights=values, tiles=tiles)))
            timed(f"gpt-oss-20b {tokens} {routing}", tries, inputs, ahead)


def main() -> None:
    """Compare what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("prompts", "one", "mxfp4", "decode")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 1024], help="of the part mxfp4")
    given = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    ahead = KernelsAhead(90, f"experts-compare-{time.time_ns()}", os.cpu_count() or 4)
    name = "qwen3-30b-a3b"
    for part in given.parts:
        start = time.perf_counter()
        if part == "mxfp4":
            compare_mxfp4(ahead, given.tokens)
        else:
            weights = weights_of(SIZES[name], "plain")
            if part == "one":
                compare_one(weights, ahead)
            elif part == "prompts":
                for tokens, routing, blocks in (
                    (8192, "uniform", [128, 256]),
                    (8192, "skewed", [128, 256]),
                    (1024, "skewed", [64, 128]),
                ):
                    compare_many(name, tokens, routing, blocks, weights, ahead)
            else:
                for tokens, blocks in ((16, [16]), (64, [16, 32]), (256, [16, 32, 64])):
                    compare_many(name, tokens, "skewed", blocks, weights, ahead)
            del weights
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    ahead.close()


if __name__ == "__main__":
    main()
