"""Time the triton backend's latent attention (MLA) with the sizes of DeepSeek: latents of 512 + 64 numbers, bfloat16, pages of
16. Some decode steps read a pool of latents in FP8.

    python benchmarks/latent_gpu.py            # outputs compared with torch in float32, then a table of times
    python benchmarks/latent_gpu.py --tune     # the same table for each tile in CANDIDATES, those of tiles.py marked

Decode steps are replayed as graphs, with scattered pages, and read layers whose latents exceed the caches in turn. *Floor*
is the longer of the bytes of the latents (or of the expanded keys and values), each read once, at 4.2 TB/s, and the
floating-point operations at 700 TFLOP/s: about what an H200 reaches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch

from attention_gpu import captured, median
from dovetail.interfaces.attention import AttentionContext, AttentionLayer
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.memory.pool import make_pool
from dovetail.ops.kv_dtypes import raw
from dovetail.testing.batches import make_batch, make_page_table
from dovetail.types import Batch
from dovetail_attention.config import TritonConfig
from dovetail_attention.triton import tiles
from dovetail_attention.triton.backend import TritonAttention
from dovetail_attention.triton.tiles import AttentionTile

RANK, ROPE, KEY_DIM, VALUE_DIM, PAGE_SIZE, LAYERS = 512, 64, 192, 128, 16, 4
DTYPE = torch.bfloat16
SCALE = KEY_DIM**-0.5
BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 4.2e12, 700e12
TOLERANCE = 8e-3
WORKERS = 8


@dataclass(frozen=True)
class Shape:
    """Describe decode rows of ``length`` keys or, if ``expanded``, prompts of ``length`` tokens."""

    rows: int
    length: int
    heads: int
    expanded: bool = False
    fp8: bool = False

    @property
    def title(self) -> str:
        """Return the name of the shape in tables."""
        step = "expanded prompt" if self.expanded else "decode, fp8 pool" if self.fp8 else "decode"
        return f"{step} {self.rows} x {self.length}, {self.heads} heads"

    @property
    def floor(self) -> float:
        """Return the least seconds (see the module's text)."""
        tokens = self.rows * self.length
        if self.expanded:
            moved, pair = tokens * self.heads * 2 * (KEY_DIM + VALUE_DIM), 2 * (KEY_DIM + VALUE_DIM)
            operations = self.rows * self.heads * pair * self.length * (self.length + 1) // 2
        else:
            moved, operations = tokens * (RANK + ROPE), tokens * self.heads * 2 * (2 * RANK + ROPE)
        itemsize = 1 if self.fp8 else DTYPE.itemsize
        return max(moved * itemsize / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND)


DECODE = [(32, 8192), (1, 131_072), (256, 1024)]
SHAPES = [Shape(rows, length, heads) for heads in (16, 128) for rows, length in DECODE]
FP8_SHAPES = [Shape(rows, length, 16, fp8=True) for rows, length in DECODE]
PROMPTS = [Shape(1, length, heads, expanded=True) for heads in (16, 128) for length in (8192, 32_768)]
CANDIDATES: dict[str, tuple[int, list[AttentionTile]]] = {
    "LATENT_TILES": (
        16,
        [
            *(AttentionTile(16, 64, warps, stages, 1, flip=True) for warps in (4, 8) for stages in (2, 3)),
            AttentionTile(16, 64, 8, 3, 2),
            AttentionTile(16, 32, 8, 4, 2),
            AttentionTile(16, 32, 4, 3, 2),
            AttentionTile(16, 128, 8, 2, 1),
            AttentionTile(64, 64, 8, 3, 1),
        ],
    ),
    "LATENT_TILES of 64 rows": (
        64,
        [
            *(AttentionTile(64, keys, 8, stages, 1) for keys, stages in ((64, 3), (64, 2), (32, 3), (32, 4))),
            AttentionTile(64, 64, 8, 3, 1, flip=True),
            AttentionTile(32, 64, 8, 3, 1, flip=True),
            AttentionTile(16, 64, 4, 3, 1, flip=True),
        ],
    ),
    "CONVERTED_TILES": (
        64,
        [
            *(AttentionTile(64, keys, 8, stages, 1) for keys, stages in ((64, 3), (64, 2), (32, 3), (128, 2))),
            AttentionTile(16, 64, 8, 3, 2),
            AttentionTile(16, 128, 8, 2, 1),
            AttentionTile(16, 64, 4, 3, 1, flip=True),
            AttentionTile(16, 128, 8, 3, 1, flip=True),
        ],
    ),
    "EXPANDED_TILES": (
        128,
        [
            *(AttentionTile(128, keys, 8, stages, 1) for keys, stages in ((64, 3), (64, 2), (128, 2), (32, 4))),
            AttentionTile(64, 64, 4, 3, 1),
            AttentionTile(64, 64, 4, 2, 2),
        ],
    ),
}


def shapes_of(table: str) -> list[Shape]:
    """Return the shapes for which a table of tiles is compared."""
    if table == "EXPANDED_TILES":
        return [PROMPTS[0], PROMPTS[2]]
    if table == "CONVERTED_TILES":
        return FP8_SHAPES
    heads = 128 if "64" in table else 16
    return [shape for shape in SHAPES if shape.heads == heads]


@contextmanager
def using(table: str, tile: AttentionTile) -> Iterator[None]:
    """Replace an entry of a table of tiles."""
    found, rows = getattr(tiles, table.split()[0]), CANDIDATES[table][0]
    before = found[rows]
    found[rows] = tile
    try:
        yield
    finally:
        found[rows] = before


class Bench:
    """Hold pools for decode rows of up to ``keys`` keys together, and time and check the backend."""

    def __init__(self, keys: int) -> None:
        self.device = torch.device("cuda")
        group = CacheGroup(LAYERS, 1, RANK + ROPE, CacheGroupKind.LATENT, value_dim=RANK)
        self.pools = [
            make_pool(group, keys // PAGE_SIZE + 2, PAGE_SIZE, dtype, self.device)
            for dtype in (DTYPE, torch.float8_e4m3fn)
        ]
        for layer in range(LAYERS):
            wide, narrow = (pool.keys(layer) for pool in self.pools)
            narrow.copy_(wide.normal_())
        self.layers = [AttentionLayer(i, SCALE) for i in range(LAYERS)]

    def backend(self, shape: Shape) -> TritonAttention:
        """Return a backend for the heads and the pool of a shape."""
        sizes = shape.heads, 1, RANK + ROPE
        pool = self.pools[shape.fp8]
        return TritonAttention(
            TritonConfig(), AttentionContext(self.device, DTYPE, *sizes, pool, 256, 132_000, value_dim=RANK)
        )

    def decode(self, shape: Shape) -> tuple[TritonAttention, Batch, torch.Tensor]:
        """Return a backend that is planned for the graph of a decode step, the step and its queries."""
        lens = [shape.length] * shape.rows
        batch = make_batch(
            PAGE_SIZE, make_page_table(lens, PAGE_SIZE, self.pools[0].num_pages), [n - 1 for n in lens], [1] * shape.rows,
            device=self.device,
        )  # fmt: skip
        backend = self.backend(shape)
        batch.variant = backend.variant(batch)
        backend.plan_capture(batch)
        return backend, batch, torch.randn(shape.rows, shape.heads, RANK + ROPE, dtype=DTYPE, device=self.device)

    def prompts(self, shape: Shape) -> Callable[[], torch.Tensor]:
        """Return a function that attends in a step of expanded prompts, of which it has the tensors."""
        tokens = shape.rows * shape.length
        batch = make_batch(
            PAGE_SIZE, np.zeros((shape.rows, -(-shape.length // PAGE_SIZE)), np.int32), [0] * shape.rows, [shape.length] * shape.rows,
            num_extend=shape.rows, device=self.device,
        )  # fmt: skip
        backend = self.backend(shape)
        backend.plan_expanded(batch, torch.arange(shape.rows + 1, dtype=torch.int32, device=self.device) * shape.length)
        q, k = (torch.randn(tokens, shape.heads, KEY_DIM, dtype=DTYPE, device=self.device) for _ in range(2))
        v = torch.randn(tokens, shape.heads, VALUE_DIM, dtype=DTYPE, device=self.device)
        self.tensors = q, k, v
        return lambda: backend.forward_expanded(q, k, v, self.layers[0], batch)

    @torch.inference_mode()
    def seconds(self, shape: Shape) -> float:
        """Return the seconds of one layer. Those of decode steps are the slope between few layers and many."""
        if shape.expanded:
            step = self.prompts(shape)

            def once() -> None:
                step()

            return median(once, turns=5)
        backend, batch, q = self.decode(shape)

        def run(count: int) -> None:
            for i in range(count):  # the first layer once, because it makes the schedule
                backend.forward(q, self.layers[1 + (i - 1) % (LAYERS - 1) if i else 0], batch)

        few, many = (median(captured(lambda count=count: run(count)).replay) for count in (2, 10))
        return (many - few) / 8

    @torch.inference_mode()
    def worst(self, shape: Shape) -> float:
        """Return the largest difference from torch in float32, divided by 1 + |value|, of some queries."""
        if shape.expanded:
            out = self.prompts(shape)()
            q, k, v = self.tensors
            places = [0, 1, 127, 128, shape.length // 2 + 5, shape.length - 1]
            found = [(out[i], causal(q[i], k[: i + 1], v[: i + 1])) for i in places]
        else:
            backend, batch, q = self.decode(shape)
            out = backend.forward(q, self.layers[1], batch)
            table = batch.page_table[:, : shape.length // PAGE_SIZE].long()
            pages = self.pools[shape.fp8].keys(1)
            found = []
            for row in {0, shape.rows // 2, shape.rows - 1}:
                keys = raw(pages)[table[row]].view(pages.dtype).flatten(0, 2).float()
                weights = (q[row].float() @ keys.T * SCALE).softmax(-1)
                found.append((out[row], weights @ keys[:, :RANK]))
        return max(((one.float() - other).abs() / (1 + other.abs())).max().item() for one, other in found)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention of one query ``[heads, d]`` over all keys ``[keys, heads, d]``, in float32."""
    weights = (torch.einsum("hd,khd->hk", q.float(), k.float()) * SCALE).softmax(-1)
    return torch.einsum("hk,khd->hd", weights, v.float())


def compile_tile(given: tuple[str, AttentionTile]) -> str:
    """Compile what a tile needs into Triton's cache, in a process of its own, by running small steps. Return an error, or
    an empty text."""
    table, tile = given
    bench = Bench(4096)
    try:
        with using(table, tile), torch.inference_mode():
            for shape in {Shape(min(s.rows, 2), 256, s.heads, s.expanded, s.fp8) for s in shapes_of(table)}:
                if shape.expanded:
                    step = bench.prompts(shape)
                    for _ in range(2):
                        step()
                    continue
                backend, batch, q = bench.decode(shape)
                for layer in bench.layers[:2]:
                    backend.forward(q, layer, batch)
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def tune() -> None:
    """Print the time of every shape with every candidate, and mark the tile that ``tiles`` has."""
    jobs = [(table, tile) for table, (_, found) in CANDIDATES.items() for tile in found]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        errors = dict(zip(jobs, pool.map(compile_tile, jobs), strict=True))
    bench = Bench(32 * 8192)
    for table, (rows, found) in CANDIDATES.items():
        shapes = shapes_of(table)
        print(f"\n{table} [{rows}], microseconds: {' | '.join(shape.title for shape in shapes)}")
        print(f"{'floor':78}" + "".join(f"{shape.floor * 1e6:12.0f}" for shape in shapes))
        for tile in found:
            used = "*" if getattr(tiles, table.split()[0])[rows] == tile else " "
            if errors[table, tile]:
                print(f"{used} {tile!s:76}  {errors[table, tile]}")
                continue
            with using(table, tile):
                times = [bench.seconds(shape) for shape in shapes]
            print(f"{used} {tile!s:76}" + "".join(f"{time * 1e6:12.0f}" for time in times), flush=True)


def report() -> None:
    """Check every shape and print its time."""
    bench = Bench(32 * 8192)
    print(f"{'shape':44} {'worst':>9} {'us':>9} {'floor us':>9} {'of floor':>9}")
    for shape in SHAPES + FP8_SHAPES + PROMPTS:
        worst = bench.worst(shape)
        seconds = bench.seconds(shape)
        of_floor = f"{shape.floor / seconds:8.0%}"
        wrong = "" if worst <= TOLERANCE else "  WRONG"
        print(
            f"{shape.title:44} {worst:9.1e} {seconds * 1e6:9.1f} {shape.floor * 1e6:9.1f} {of_floor:>9}{wrong}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time every candidate tile")
    tune() if parser.parse_args().tune else report()
