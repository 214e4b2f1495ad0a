"""Time attention backends on the decisive shapes: one layer of 32 query and 8 key heads of 128, pages of 16, bfloat16.

    python benchmarks/attention_gpu.py triton flash_attn
    python benchmarks/attention_gpu.py --tiles

Decode steps are replayed as graphs (the median of many replays); prompts run as the engine runs them. Each row shows
its time as a rate: the bytes of KV that a perfect kernel reads once, divided by the time, or the floating-point
operations divided by it. Rows have scattered pages. What they read of four layers in turn exceeds the caches, except in
the smallest steps. With ``--tiles``, decode steps of 64 to 256 rows are timed with each tile of ``triton``'s decode kernel, rows in one part,
and with a schedule.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.interfaces.cache import CacheGroup
from dovetail.memory.pool import PagedKVPool
from dovetail.registry.targets import load_attribute
from dovetail.testing.batches import make_batch, make_page_table, share_prefixes
from dovetail.testing.installed import installed
from dovetail.types import Batch

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 32, 8, 128, 16, 4
DTYPE = torch.bfloat16
MAX_ROWS, MAX_CONTEXT = 512, 40_000
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize


@dataclass(frozen=True)
class Shape:
    """Describe rows of ``prefix`` tokens that are extended by ``extend`` tokens.

    The first ``groups * size`` rows share their first ``shared`` tokens within each group.
    """

    title: str
    prefix: Sequence[int]
    extend: Sequence[int]
    groups: int = 0
    size: int = 0
    shared: int = 0

    @property
    def bytes(self) -> int:
        """Return the bytes of the KV, each read once."""
        tokens = sum(self.prefix) + sum(self.extend) - self.groups * (self.size - 1) * self.shared
        return tokens * TOKEN_BYTES

    @property
    def operations(self) -> int:
        """Return the floating-point operations of both products below the diagonal."""
        seen = sum(e * p + e * (e + 1) // 2 for p, e in zip(self.prefix, self.extend, strict=True))
        return 4 * HEADS * HEAD_DIM * seen


def decode(rows: int, context: int) -> Shape:
    """Return a decode step of rows of one length."""
    return Shape(f"decode {rows} x {context}", [context - 1] * rows, [1] * rows)


def uneven(rows: int, low: int, high: int) -> Shape:
    """Return a decode step of rows with lengths between two bounds."""
    prefix = np.random.default_rng(0).integers(low, high, rows).tolist()
    return Shape(f"decode {rows} x U[{low}, {high}]", prefix, [1] * rows)


def shared(rows: int, groups: int, length: int, own: int) -> Shape:
    """Return a decode step of groups of one size."""
    title = f"shared {rows} rows, {groups} x {length} + {own}"
    return Shape(title, [length + own - 1] * rows, [1] * rows, groups, rows // groups, length)


SHAPES = (
    decode(1, 600),
    decode(16, 600),
    decode(64, 600),
    decode(256, 600),
    decode(8, 32000),
    uneven(256, 100, 1024),
    Shape("decode 63 x 600, 1 x 32000", [599] * 63 + [31999], [1] * 64),
    shared(256, 16, 2048, 256),
    shared(512, 32, 2048, 256),
    shared(64, 1, 8192, 128),
    Shape("prompt 1024", [0], [1024]),
    Shape("prompt 8192", [0], [8192]),
    Shape("prompt 2048 after 30000", [30000], [2048]),
    Shape("8 prompts of 1024", [0] * 8, [1024] * 8),
    Shape("mixed: prompt 1024, 64 x 600", [0] + [599] * 64, [1024] + [1] * 64),
)

TILE_SHAPES = tuple(
    shape
    for rows in (64, 80, 96, 112, 128, 160, 256)
    for shape in (decode(rows, 600), decode(rows, 1500), *(uneven(rows, *ends) for ends in ((100, 1024), (100, 2048))))
)


class Bench:
    """Hold a pool and time backends on it."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        pages = max(sum(-(-(p + e) // PAGE_SIZE) for p, e in zip(s.prefix, s.extend, strict=True)) for s in SHAPES) + 1
        self.pool = PagedKVPool(CacheGroup(LAYERS, KV_HEADS, HEAD_DIM), pages, PAGE_SIZE, DTYPE, self.device)
        self.pool.k.normal_()
        self.pool.v.normal_()

    def context(self) -> AttentionContext:
        """Return the context for which backends are built."""
        return AttentionContext(
            self.device, DTYPE, HEADS, KV_HEADS, HEAD_DIM, self.pool, max_rows=MAX_ROWS, max_context=MAX_CONTEXT
        )

    def batch(self, shape: Shape) -> Batch:
        """Return the step of a shape."""
        lens = [p + e for p, e in zip(shape.prefix, shape.extend, strict=True)]
        table = make_page_table(lens, PAGE_SIZE, self.pool.num_pages)
        pages = shape.shared // PAGE_SIZE
        for group in range(shape.groups):
            first = group * shape.size
            table[first : first + shape.size, :pages] = table[first, :pages]
        batch = make_batch(PAGE_SIZE, table, shape.prefix, shape.extend, device=self.device)
        if shape.groups:
            starts = list(range(0, shape.groups * shape.size + 1, shape.size))
            share_prefixes(batch, table, starts, [shape.shared] * shape.groups, PAGE_SIZE)
        return batch

    @torch.inference_mode()
    def seconds(self, backend: AttentionBackend, shape: Shape, variant: int = 0) -> float:
        """Return the seconds of one layer, of a decode step in a variant of the backend.

        They are the slope between few layers and many, so that work done once per step does not count.
        """
        batch = self.batch(shape)
        q = torch.randn(sum(shape.extend), HEADS, HEAD_DIM, dtype=DTYPE, device=self.device)
        layers = [AttentionLayer(i, HEAD_DIM**-0.5) for i in range(LAYERS)]
        decodes = max(shape.extend) == 1

        def run(count: int) -> None:
            for i in range(count):  # the first layer once: backends may do work there for all layers
                backend.forward(q, layers[1 + (i - 1) % (LAYERS - 1) if i else 0], batch)

        if not decodes:
            backend.plan(batch)
            return median(lambda: run(20), turns=5) / 20
        prefix, batch.variant = batch.prefix_lens, variant
        batch.prefix_lens = np.full_like(prefix, MAX_CONTEXT - 1)
        backend.plan_capture(batch)
        batch.prefix_lens = prefix
        backend.plan_replay(batch)
        few, many = (median(captured(lambda count=count: run(count)).replay) for count in (2, 10))
        return (many - few) / 8


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture ``step`` as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def median(step: Callable[[], None], turns: int = 20) -> float:
    """Return the median seconds of ``step`` on the device."""
    for _ in range(3):
        step()
    times = list[float]()
    for _ in range(turns):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def compare_tiles(bench: Bench) -> None:
    """Print a line per shape of ``TILE_SHAPES``: the microseconds with each tile, and with a schedule."""
    from dovetail.ops.triton import decode as kernels
    from dovetail_attention.triton.backend import UNEVEN

    for shape in TILE_SHAPES:
        times = dict[str, float]()
        for tile in kernels.RESIDENT:
            with patch.object(kernels, "tiling", lambda *_, tile=tile, **__: tile):
                times[f"{tile.keys} keys"] = bench.seconds(build("triton", bench.context()), shape)
        times["schedule"] = bench.seconds(build("triton", bench.context()), shape, UNEVEN)
        found = "  ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in times.items())
        print(f"{shape.title:24} bytes {shape.bytes / 4e6:.1f}  {found}", flush=True)


def build(name: str, context: AttentionContext) -> AttentionBackend:
    """Build a backend with its default settings."""
    component = installed().get("attention", name)
    config = installed().config_class("attention", name).model_validate({"kind": name})
    return load_attribute(component.spec.target, component.label)(config, context)


def report(bench: Bench, names: Sequence[str]) -> None:
    """Print one line per shape and backend."""
    for shape in SHAPES:
        for name in names:
            try:
                seconds = bench.seconds(build(name, bench.context()), shape)
            except NotImplementedError as error:
                print(f"{shape.title:32} {name:14} {error}")
                continue
            rate = f"{shape.operations / seconds / 1e12:7.0f} TFLOP/s"
            if max(shape.extend) == 1:
                rate = f"{shape.bytes / seconds / 1e12:7.2f} TB/s"
            print(f"{shape.title:32} {name:14} {seconds * 1e6:9.1f} us {rate}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--tiles"]:
        SHAPES = TILE_SHAPES  # whose pages the pool must hold
        compare_tiles(Bench())
    else:
        report(Bench(), sys.argv[1:] or ["triton"])
