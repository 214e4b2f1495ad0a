"""Time latent attention (MLA) with the sizes of DeepSeek: latents of 512 + 64 numbers, bfloat16, pages of 16. Some decode
steps read a pool of latents in FP8.

    python benchmarks/latent_gpu.py            # outputs compared with torch in float32, then a table of times
    python benchmarks/latent_gpu.py --tune     # the same table for each tile in CANDIDATES, those of tiles.py marked
    python benchmarks/latent_gpu.py --compare  # other backends, their numbers of splits, and the steps of expansion

Decode steps are replayed as graphs, with scattered pages, and read layers whose latents exceed the caches in turn. *Floor*
is the longer of the bytes of the latents (or of the expanded keys and values), each read once, at 4.2 TB/s, and the
floating-point operations at 700 TFLOP/s: about what an H200 reaches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from attention_gpu import build, captured, median
from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.memory.pool import make_pool
from dovetail.ops.kv_dtypes import raw
from dovetail.testing.batches import make_batch, make_page_table
from dovetail.testing.installed import installed
from dovetail.types import Batch
from dovetail_attention.flash_attn.latent import FlashAttentionLatent
from dovetail_attention.triton import tiles
from dovetail_attention.triton.tiles import AttentionTile

RANK, ROPE, KEY_DIM, VALUE_DIM, PAGE_SIZE, LAYERS = 512, 64, 192, 128, 16, 4
DTYPE = torch.bfloat16
SCALE = KEY_DIM**-0.5
BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 4.2e12, 700e12
TOLERANCE = 8e-3
WORKERS = 8


@dataclass(frozen=True)
class Shape:
    """Describe decode rows of ``length`` keys or, if ``expanded``, prompts of ``length`` tokens after ``prefix`` others."""

    rows: int
    length: int
    heads: int
    expanded: bool = False
    fp8: bool = False
    prefix: int = 0

    @property
    def title(self) -> str:
        """Return the name of the shape in tables."""
        step = "expanded prompt" if self.expanded else "decode, fp8 pool" if self.fp8 else "decode"
        after = f" after {self.prefix}" if self.prefix else ""
        return f"{step} {self.rows} x {self.length}{after}, {self.heads} heads"

    @property
    def floor(self) -> float:
        """Return the least seconds (see the module's text)."""
        tokens = self.rows * self.length
        if self.expanded:
            keys, pair = tokens + self.rows * self.prefix, 2 * (KEY_DIM + VALUE_DIM)
            moved = (tokens + keys) * self.heads * (KEY_DIM + VALUE_DIM)
            seen = self.length * self.prefix + self.length * (self.length + 1) // 2
            operations = self.rows * self.heads * pair * seen
        else:
            moved, operations = tokens * (RANK + ROPE), tokens * self.heads * 2 * (2 * RANK + ROPE)
        itemsize = 1 if self.fp8 else DTYPE.itemsize
        return max(moved * itemsize / BYTES_PER_SECOND, operations / OPERATIONS_PER_SECOND)


DECODE = [(32, 8192), (1, 131_072), (256, 1024)]
SHAPES = [Shape(rows, length, heads) for heads in (16, 128) for rows, length in DECODE]
FP8_SHAPES = [Shape(rows, length, 16, fp8=True) for rows, length in DECODE]
PROMPTS = [Shape(1, length, heads, expanded=True) for heads in (16, 128) for length in (8192, 32_768)]
CHUNK = Shape(1, 8192, 16, expanded=True, prefix=24_576)
SPLITS = (0, 1, 2, 3, 4, 8, 16, 32, 64, 128)
CANDIDATES: dict[str, tuple[int, list[AttentionTile]]] = {
    "LATENT_TILES": (
        16,
        [
            *(AttentionTile(16, 64, 8, stages, 1) for stages in (2, 3)),
            *(AttentionTile(16, 32, 8, stages, 1) for stages in (3, 4, 5, 6)),
            *(AttentionTile(16, 32, 4, stages, 1) for stages in (4, 5)),
            AttentionTile(16, 32, 4, 3, 2),
            AttentionTile(16, 32, 8, 3, 2),
            AttentionTile(16, 128, 8, 2, 1),
            *(AttentionTile(16, 64, warps, 2, 1, flip=True) for warps in (4, 8)),
        ],
    ),
    "LATENT_TILES of 64 rows": (
        64,
        [
            AttentionTile(64, 64, 8, 2, 1),
            *(AttentionTile(64, 32, 8, stages, 1) for stages in (2, 3, 4)),
            *(AttentionTile(64, 16, 8, stages, 1) for stages in (4, 6)),
            AttentionTile(64, 64, 8, 2, 1, flip=True),
            AttentionTile(32, 64, 8, 2, 1, flip=True),
        ],
    ),
    "CONVERTED_TILES": (
        64,
        [
            *(AttentionTile(64, keys, 8, stages, 1) for keys, stages in ((64, 2), (64, 3), (32, 3), (32, 4))),
            *(AttentionTile(16, keys, 8, stages, 1) for keys, stages in ((64, 3), (64, 4), (32, 4), (128, 3))),
            AttentionTile(16, 64, 4, 3, 1, flip=True),
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
    """Hold pools for decode rows of up to ``keys`` keys together, and time and check the backend ``name``."""

    def __init__(self, keys: int) -> None:
        self.device, self.name = torch.device("cuda"), "triton"
        group = CacheGroup(LAYERS, 1, RANK + ROPE, CacheGroupKind.LATENT, value_dim=RANK)
        self.pools = [
            make_pool(group, keys // PAGE_SIZE + 2, PAGE_SIZE, dtype, self.device)
            for dtype in (DTYPE, torch.float8_e4m3fn)
        ]
        for layer in range(LAYERS):
            wide, narrow = (pool.keys(layer) for pool in self.pools)
            narrow.copy_(wide.normal_())
        self.layers = [AttentionLayer(i, SCALE) for i in range(LAYERS)]

    @property
    def graphs(self) -> bool:
        """Return whether the backend can be captured."""
        return Feature.ATTN_GRAPH in installed().get("attention", self.name).spec.offers

    def backend(self, shape: Shape) -> AttentionBackend:
        """Return a backend for the heads and the pool of a shape."""
        sizes = shape.heads, 1, RANK + ROPE
        pool = self.pools[shape.fp8]
        return build(self.name, AttentionContext(self.device, DTYPE, *sizes, pool, 256, 132_000, value_dim=RANK))

    def decode(self, shape: Shape) -> tuple[AttentionBackend, Batch, torch.Tensor]:
        """Return a backend that is planned for a decode step, or for its graph, the step and its queries."""
        lens = [shape.length] * shape.rows
        batch = make_batch(
            PAGE_SIZE, make_page_table(lens, PAGE_SIZE, self.pools[0].num_pages), [n - 1 for n in lens], [1] * shape.rows,
            device=self.device,
        )  # fmt: skip
        backend = self.backend(shape)
        batch.variant = backend.variant(batch)
        if self.graphs:
            backend.plan_capture(batch)
        else:
            backend.plan(batch)
        return backend, batch, torch.randn(shape.rows, shape.heads, RANK + ROPE, dtype=DTYPE, device=self.device)

    def prompts(self, shape: Shape, kv: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
        """Return a function that attends in a step of expanded prompts, of which it has the tensors. Keys and values are
        ``kv [keys, heads, both]`` if it is given."""
        tokens, length = shape.rows * shape.length, shape.length + shape.prefix
        batch = make_batch(
            PAGE_SIZE, np.zeros((shape.rows, -(-length // PAGE_SIZE)), np.int32), [shape.prefix] * shape.rows, [shape.length] * shape.rows,
            num_extend=shape.rows, device=self.device,
        )  # fmt: skip
        backend: Any = self.backend(shape)
        backend.plan_expanded(batch, torch.arange(shape.rows + 1, dtype=torch.int32, device=self.device) * length)
        sizes = [(tokens, KEY_DIM), (shape.rows * length, KEY_DIM), (shape.rows * length, VALUE_DIM)]
        q, k, v = (torch.randn(count, shape.heads, d, dtype=DTYPE, device=self.device) for count, d in sizes)
        if kv is not None:
            k, v = kv.split((KEY_DIM, VALUE_DIM), 2)
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

        if not self.graphs:  # kernels of more than 50 microseconds hide the host
            few, many = (median(lambda count=count: run(count)) for count in (2, 34))
            return (many - few) / 32
        few, many = (median(captured(lambda count=count: run(count)).replay) for count in (2, 10))
        return (many - few) / 8

    @torch.inference_mode()
    def worst(self, shape: Shape) -> float:
        """Return the largest difference from torch in float32, divided by 1 + |value|, of some queries."""
        if shape.expanded:
            out = self.prompts(shape)()
            q, k, v = self.tensors
            places = [0, 1, 127, 128, shape.length // 2 + 5, shape.length - 1]
            ends = {i: shape.prefix + i + 1 for i in places}
            found = [(out[i], causal(q[i], k[:end], v[:end])) for i, end in ends.items()]
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


def line(bench: Bench, shape: Shape, name: str = "") -> None:
    """Check a shape and print its time."""
    worst = bench.worst(shape)
    seconds = bench.seconds(shape)
    wrong = "" if worst <= TOLERANCE else "  WRONG"
    print(
        f"{shape.title + name:64} {worst:9.1e} {seconds * 1e6:9.1f} {shape.floor * 1e6:9.1f} {shape.floor / seconds:8.0%}{wrong}",
        flush=True,
    )


def report() -> None:
    """Check every shape and print its time."""
    bench = Bench(32 * 8192)
    print(f"{'shape':64} {'worst':>9} {'us':>9} {'floor us':>9} {'of floor':>8}")
    for shape in [*SHAPES, *FP8_SHAPES, *PROMPTS, CHUNK]:
        line(bench, shape)


def compare(names: Sequence[str]) -> None:
    """Print the times of these backends, of FlashAttention with each number of splits, and of the steps in which
    prompts expand latents."""
    bench = Bench(32 * 8192)
    print(f"{'shape':64} {'worst':>9} {'us':>9} {'floor us':>9} {'of floor':>8}")
    for shape in [*SHAPES, *PROMPTS, CHUNK]:
        for bench.name in names:
            attempt(lambda shape=shape: line(bench, shape, f", {bench.name}"), f"{shape.title}, {bench.name}")
    bench.name = "flash_attn_mla"
    print(
        f"\nflash_attn_mla, microseconds, keys in at most N splits (0: its own rule)\n{'':40}"
        + "".join(f"{n:8}" for n in SPLITS)
    )
    for shape in SHAPES:
        print(f"{shape.title:40}", end="")
        for splits in SPLITS:
            with fixed_splits(splits):
                attempt(lambda shape=shape: print(f"{bench.seconds(shape) * 1e6:8.0f}", end="", flush=True), "   error")
        print()
    expansion(bench)


def attempt(step: Callable[[], None], title: str) -> None:
    """Run ``step``. Print the error that it raises, if a library lacks what it needs."""
    try:
        step()
    except Exception as error:
        print(f"{title}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)


@contextmanager
def fixed_splits(count: int) -> Iterator[None]:
    """Let FlashAttention read the keys of decode rows in at most ``count`` splits."""
    before = FlashAttentionLatent._splits
    FlashAttentionLatent._splits = lambda self, rows: count
    try:
        yield
    finally:
        FlashAttentionLatent._splits = before


@torch.inference_mode()
def expansion(bench: Bench) -> None:
    """Print the time of each operation with which a chunk of a prompt expands latents, as ``LatentAttention`` does it, and
    in one product with a weight that also copies the rotated key."""
    keys, heads, plain = CHUNK.length + CHUNK.prefix, CHUNK.heads, KEY_DIM - ROPE
    pool = bench.pools[0].keys(1).flatten(0, 2)
    locations = torch.randperm(len(pool) // PAGE_SIZE, device=bench.device)[: keys // PAGE_SIZE, None] * PAGE_SIZE
    locations = (locations + torch.arange(PAGE_SIZE, device=bench.device)).flatten()
    weight = torch.randn(heads * (plain + VALUE_DIM), RANK, dtype=DTYPE, device=bench.device) * RANK**-0.5
    whole = torch.randn(heads * (KEY_DIM + VALUE_DIM), RANK + ROPE, dtype=DTYPE, device=bench.device) * RANK**-0.5
    latents = pool.index_select(0, locations)
    latent, key = latents.split((RANK, ROPE), 1)
    kv = (latent.contiguous() @ weight.T).unflatten(1, (heads, -1))
    both = (latents @ whole.T).unflatten(1, (heads, -1))
    q = torch.randn(CHUNK.length, heads, KEY_DIM, dtype=DTYPE, device=bench.device)
    steps: dict[str, Callable[[], object]] = {
        "gather latents": lambda: pool.index_select(0, locations),
        "copy the first part": lambda: latent.contiguous(),
        "expand": lambda: latent @ weight.T,
        "concatenate keys": lambda: torch.cat((kv[..., :plain], key[:, None].expand(-1, heads, -1)), 2),
        "concatenate queries": lambda: torch.cat((q[..., :plain], q[..., plain:]), 2),
        "expand and copy the rotated key in one product": lambda: latents @ whole.T,
    }
    for bench.name in ("triton", "flash_attn_mla"):
        attempt(
            lambda: steps.update({f"attend to them as slices, {bench.name}": bench.prompts(CHUNK, both)}), bench.name
        )
    print(f"\n{CHUNK.title}, microseconds")
    for name, run in steps.items():
        attempt(lambda run=run, name=name: print(f"{name:56}{median(lambda: void(run), turns=5) * 1e6:9.1f}"), name)


def void(run: Callable[[], object]) -> None:
    """Run and drop the result."""
    run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time every candidate tile")
    parser.add_argument(
        "--compare",
        metavar="A,B",
        nargs="?",
        const="triton,flash_attn_mla",
        help="time these backends, splits, and expansion",
    )
    given = parser.parse_args()
    if given.compare:
        compare(given.compare.split(","))
    if given.tune:
        tune()
    if not given.compare and not given.tune:
        report()
