"""Measure the kernels of adapters (LoRA) in one decoder layer: each product after a norm, without adapters and with one, some and
many of them, which the product adds itself or the kernel after it, and ``shrink`` and ``expand`` alone, in microseconds. See
``adapters_gpu.py --kernels``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from dovetail.ops.adapter_weights import AdapterCount, LowRankWeights, TokenTiles
from dovetail.ops.low_rank import FEW_SLOTS, SEVERAL_SLOTS, SMALL_TILE, most_tiles, packed_tiles, unpacked_tiles
from dovetail.ops.triton.adapted_rows import AdaptedRows
from dovetail.ops.triton.low_rank import row_blocks
from dovetail.ops.triton.low_rank_few import arrivals, expand, shrink
from dovetail.ops.triton.matmul import FewRows
from dovetail.ops.triton.norm import rms_norm
from gpubench.models import shape

COPIES = 4
"""Each product is measured with this number of weights in turns, so that the L2 cache does not hold them."""
REPEATS = 5
ACTIVE = (1, FEW_SLOTS, 2 * FEW_SLOTS, SEVERAL_SLOTS)
"""The numbers of adapters that are measured, and as many as there are rows, which the product does not add."""
WAYS = {
    AdapterCount.ONE: "in one kernel",
    AdapterCount.FEW: "in the product",
    AdapterCount.SEVERAL: "in a second loop of it",
    AdapterCount.MANY: "after it",
}


class Layer(NamedTuple):
    """Describe a linear layer: its inputs, the sizes of its parts, and how its product is used."""

    name: str
    inputs: int
    parts: tuple[int, ...]
    form: str


def layers(model: str) -> list[Layer]:
    """Return the linear layers of a decoder layer."""
    c = shape(model)
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    return [
        Layer("qkv", hidden, (queries, keys, keys), "whole"),
        Layer("o", queries, (hidden,), "parts"),
        Layer("gate_up", hidden, (inner, inner), "gated"),
        Layer("down", inner, (hidden,), "parts"),
    ]


def tiles_of(slots: np.ndarray, device: str, count: AdapterCount) -> TokenTiles:
    """Return the tiles of rows with ``slots``, padded as in graphs of steps with ``count`` adapters."""
    most_slots = {AdapterCount.ONE: 1, AdapterCount.FEW: FEW_SLOTS, AdapterCount.SEVERAL: SEVERAL_SLOTS}
    least = most_slots.get(count, len(slots))
    most = most_tiles(len(slots), max(least, len(set(slots.tolist()))))
    packed = torch.from_numpy(packed_tiles(slots.astype(np.int32), SMALL_TILE, len(slots), most)).to(device)
    return unpacked_tiles(packed, SMALL_TILE, len(slots), len(slots), count=count)


def adapters_of(layer: Layer, slots: int, rank: int, device: str) -> LowRankWeights:
    """Return random matrices of adapters in all slots."""
    starts = [sum(layer.parts[:i]) for i in range(len(layer.parts))]
    parts = tuple(zip(starts, layer.parts, strict=True))
    a = torch.randn(slots, len(parts), rank, layer.inputs, device=device, dtype=torch.bfloat16) / layer.inputs**0.5
    b = torch.randn(slots, sum(layer.parts), rank, device=device, dtype=torch.bfloat16)
    ranks = np.full((slots, len(parts)), rank, np.int32)
    blocks = row_blocks(parts, torch.device(device))
    return LowRankWeights(
        a, b, parts, ranks, torch.from_numpy(ranks).to(device), blocks, arrivals(torch.device(device))
    )


def steps(layer: Layer, batch: int, rank: int, device: str, copies: int) -> dict[str, list[Callable[[], Any]]]:
    """Return what is measured, by its name: for each copy of the weights, a function that launches it."""
    cases = {
        f"{number} active, {way}": tiles_of(np.arange(batch) % number, device, count)
        for number in sorted({*ACTIVE, batch})
        for count, way in WAYS.items()
        if number <= batch
        and (count > AdapterCount.FEW or number in ACTIVE)
        and (count > AdapterCount.ONE or number == 1)
    }
    x = torch.randn(batch, layer.inputs, device=device, dtype=torch.bfloat16)
    scale = torch.ones(layer.inputs, device=device, dtype=torch.bfloat16)
    norm = partial(rms_norm, x, scale, 1e-5)
    n = sum(layer.parts)
    out = torch.zeros(batch, n, device=device, dtype=torch.bfloat16)
    found: dict[str, list[Callable[[], Any]]] = {}
    for _ in range(copies):
        weight = torch.randn(n, layer.inputs, device=device, dtype=torch.bfloat16) / layer.inputs**0.5
        adapters = adapters_of(layer, batch, rank, device)
        base, rows = FewRows(weight), AdaptedRows(weight, adapters)
        gated, in_parts = layer.form == "gated", layer.form == "parts" and base.parts(x) is not None
        own = {"gated": partial(base.gated, bias=None), "parts": base.parts}.get(layer.form, partial(base, bias=None))
        found.setdefault("norm", []).append(norm)
        found.setdefault("base", []).append(lambda own=own: own(norm()))
        for name, tiles in cases.items():
            if rows.can(tiles, batch, gated=gated, parts=in_parts):
                added = partial(rows, bias=None, tokens=tiles, gated="silu" if gated else None, in_parts=in_parts)
                found.setdefault(name, []).append(lambda added=added: added(norm()))
        for count in (1, batch):
            tiles = tiles_of(np.arange(batch) % count, device, AdapterCount.FEW if count == 1 else AdapterCount.MANY)
            low = shrink(x, adapters, tiles)
            apart = partial(_apart, base, adapters, tiles)
            found.setdefault(f"{count} active, own kernels", []).append(lambda apart=apart: apart(norm()))
            found.setdefault(f"shrink {count}", []).append(
                lambda adapters=adapters, tiles=tiles: shrink(norm(), adapters, tiles, leads=True)
            )
            found.setdefault(f"expand {count}", []).append(partial(expand, out, low, adapters, tiles))
    return found


def _apart(base: FewRows, adapters: LowRankWeights, tiles: TokenTiles, x: torch.Tensor) -> torch.Tensor:
    return expand(base(x, None), shrink(x, adapters, tiles), adapters, tiles)


def microseconds(functions: list[Callable[[], Any]]) -> float:
    """Return the time of one call, in a graph of all ``functions``, several times in turns."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = 8
    with torch.cuda.graph(graph):
        for _ in range(calls):
            for function in functions:
                function()
    best = float("inf")
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / (calls * len(functions)))
    return best


def measure(model: str, batch: int, rank: int) -> dict[str, dict[str, float]]:
    """Measure all layers, and print the times and their differences to the product without adapters."""
    found: dict[str, dict[str, float]] = {}
    for layer in layers(model):
        times = {name: microseconds(own) for name, own in steps(layer, batch, rank, "cuda", COPIES).items()}
        found[layer.name] = times
        print(layer.name, flush=True)
        for name, time in times.items():
            print(f"  {name:32} {time:8.2f} us  {time - times['base']:+8.2f}", flush=True)
    return found
