"""Find the table of ``dovetail.ops.triton.tuning``: tiles of matrix products with few rows, compared with cuBLAS.

    python benchmarks/tune_matmul.py [--models 8b small] [--rows 1 16 32 64 128 256] [--top 8] [--known] [--seconds 150]

Every tile that fits a shape is checked against float32 and timed on cold weights. The fastest tiles then compete in the
step of ``ops_gpu.Step``, one matrix after the other, because the effect of prefetching weights appears only among other
kernels. Tiles that load weights early are better the less they disturb each other, which appears only there too: all of
them compete. The results and the table are printed.

With ``--known``, only tiles that are in the table for another shape are tried, with which a model takes a minute or less. After
``--seconds`` nothing further is tried, and the table has what was found by then.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch.nn import functional

from dovetail.ops.triton.matmul import Workspace, matmul
from dovetail.ops.triton.tuning import MAX_PARTS, MAX_TILES, MEASURED, ProductTile
from ops_gpu import COLD, MODELS, USUAL, Independent, Model, Step, per_call, randn, torch_product

SHARED_MEMORY = 227 * 1024
SMS = 132
GAIN = 0.997
"""A tile replaces another in a step if it makes the step this much faster, and cuBLAS by half of that."""

ONE_ROW = [
    (2, 256, 1), (4, 256, 1), (8, 256, 1), (2, 512, 1), (4, 512, 1), (1, 512, 2), (2, 512, 2), (4, 512, 2), (8, 512, 2),
    (2, 1024, 2), (4, 1024, 2), (1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (1, 2048, 4), (2, 2048, 4),
    (1, 2048, 8), (2, 2048, 8), (4, 2048, 8), (1, 4096, 8), (2, 4096, 8),
]  # fmt: skip
FEW_ROWS = [
    (32, 128, 4, 6), (32, 128, 4, 8), (32, 256, 4, 4), (32, 256, 4, 6), (64, 64, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6),
    (64, 128, 4, 8), (64, 256, 4, 2), (64, 256, 4, 3), (64, 256, 4, 5), (128, 64, 4, 6), (128, 128, 4, 3), (128, 128, 4, 5),
    (128, 128, 8, 3), (128, 128, 8, 4), (256, 64, 8, 4),
]  # fmt: skip
MANY_ROWS = [
    (64, 64, 4, 4), (64, 128, 4, 3), (64, 64, 8, 4), (64, 128, 8, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 4),
    (128, 64, 8, 5), (128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4),
]  # fmt: skip
AHEAD = (0, 8, 16, 32)
EARLY = 16
"""The number of rows up to which ``ProductTile.early`` is tried."""
Choice = ProductTile | None


class Search(NamedTuple):
    """Describe what is tried: with ``known``, only tiles that are in the table for another shape; and until ``deadline``
    (``time.monotonic``)."""

    known: bool = False
    deadline: float = math.inf

    @property
    def over(self) -> bool:
        """Return whether nothing further is tried."""
        return time.monotonic() > self.deadline

    def tiles(self, block_m: int, n: int, k: int) -> list[ProductTile]:
        """Return the tiles to try."""
        found = candidates(block_m, n, k)
        if not self.known:
            return found
        table = {tile._replace(ahead=0) for tiles in MEASURED.values() for tile in tiles.values() if tile is not None}
        return [tile for tile in found if tile in table]


def candidates(block_m: int, n: int, k: int) -> list[ProductTile]:
    """Return all tiles that fit."""
    if block_m == 1:
        return [
            ProductTile(1, rows, width, warps, per_sm=per_sm)
            for (rows, width, warps), per_sm in itertools.product(ONE_ROW, (0, 2, 4, 6, 8, 12, 16))
            if k % width == 0 and (per_sm == 0 or (per_sm * warps in (8, 16, 24, 32) and per_sm * SMS * rows < n))
        ]
    found = []
    for (block_n, block_k, warps, stages), split in itertools.product(
        FEW_ROWS if block_m <= 64 else MANY_ROWS, (1, 2, 3, 4, 5, 6, 7, 8, 9)
    ):
        programs = -(-n // block_n) * split
        if (
            k % (block_k * split) == 0
            and 2 * (block_n + block_m) * block_k * stages <= SHARED_MEMORY
            and (programs >= SMS // 2 or split >= 8)
            and (
                split == 1
                or (programs <= SMS * 8 and programs * block_n * block_m <= MAX_PARTS and programs <= MAX_TILES)
            )
        ):
            tile = ProductTile(block_m, block_n, block_k, warps, stages, split)
            found += [tile, tile._replace(early=True)] if block_m <= EARLY else [tile]
    return found


def aheads(choice: Choice) -> Sequence[int]:
    """Return the values of ``ProductTile.ahead`` to try."""
    return AHEAD if choice is not None and not choice.early else (0,)


def right(x: torch.Tensor, weight: torch.Tensor, exact: torch.Tensor, tile: ProductTile, space: Workspace) -> bool:
    """Return whether the product agrees with float32, twice in a row, in memory that was poisoned."""
    for _ in range(2):
        torch.full(
            (x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype, device=x.device
        )  # its memory is freed and becomes the output's
        got = matmul(x, weight, None, tile, space).float()
        if not (got - exact).norm() < 5e-3 * exact.norm():
            return False
    return True


def compile_all(cases: Iterable[tuple[ProductTile, bool]], space: Workspace) -> None:
    """Compile tiles on all cores; each comes with whether it ends in the gate."""
    x, w = (torch.zeros(size, dtype=torch.bfloat16, device="cuda") for size in (1 << 20, 1 << 22))
    wanted = {(tile._replace(per_sm=min(tile.per_sm, 1)), gated) for tile, gated in cases}

    def compile_one(case: tuple[ProductTile, bool]) -> None:
        tile, gated = case
        k = tile.block_k * tile.split * 2
        try:
            matmul(x[: 2 * k].view(2, k)[: tile.block_m], w[: 256 * k].view(256, k), None, tile, space, gated)
        except Exception as error:
            print("FAILED", tile, repr(error)[:200])

    start = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compile_one, sorted(wanted)))
    torch.cuda.synchronize()
    print(f"{len(wanted)} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)


def tune_alone(
    name: str, n: int, k: int, buckets: Sequence[int], space: Workspace, top: int, search: Search
) -> dict[int, list[Choice]]:
    """Return the best tiles of one shape by number of rows; None stands for cuBLAS."""
    weights = [randn(n, k, scale=0.02) for _ in range(max(2, -(-int(COLD) // (2 * n * k))))]
    inputs, best = randn(max(buckets), k), {}
    exact = inputs.float() @ weights[0].float().t()
    for m in buckets:
        x = inputs[:m].contiguous()
        found: list[tuple[float, Choice]] = [
            (per_call([lambda x=x, w=w: functional.linear(x, w) for w in weights]), None)
        ]
        for tile in search.tiles(m, n, k) + (search.tiles(16, n, k) if m == 1 else []):
            if search.over:
                break
            if not right(x, weights[0], exact[:m], tile, space):
                print("WRONG", name, m, tile, flush=True)
                continue
            calls = [lambda x=x, w=w, tile=tile: matmul(x, w, None, tile, space) for w in weights]
            found.append((per_call(calls, 3), tile))
        found.sort(key=lambda pair: pair[0])
        cublas = next(us for us, tile in found if tile is None)
        text = ", ".join(f"{us:.2f} {tile and tuple(tile)}" for us, tile in found[:3])
        print(f"{name} [{n}, {k}] m={m}: cuBLAS {cublas:.2f} us; {text}", flush=True)
        best[m] = [tile for _, tile in found if tile is None or not tile.early][:top]
        best[m] += [tile for _, tile in found if tile is not None and tile.early]
        if None not in best[m]:
            best[m].append(None)
    return best


def tune_together(
    model: Model, m: int, best: dict[str, list[Choice]], space: Workspace, step: Step, search: Search
) -> dict[str, Choice]:
    """Choose the tile of each matrix of a layer in the step where it is used."""
    if "gate_up" in best:  # tiles that can hold a gate and its value
        best = {**best, "gate_up": [tile for tile in best["gate_up"] if tile is None or tile.block_n > 1]}
    chosen = {name: choices[0] for name, choices in best.items()}
    if search.over:
        print(f"  m={m}: not tried in a step, because the time is over")
        return chosen
    trials = ((name, choice) for name, choices in best.items() for choice in choices if choice is not None)
    compile_all(
        ((choice._replace(ahead=ahead), name == "gate_up") for name, choice in trials for ahead in aheads(choice)),
        space,
    )

    def measure(name: str, choice: Choice) -> float:
        return whole({**chosen, name: choice}, name == "head")

    def whole(trial: dict[str, Choice], head: bool) -> float:
        def product(name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            tile = trial[name]
            if tile is None:
                return torch_product(name, x, weight)
            return matmul(x, weight, None, tile, space, name == "gate_up")

        return per_call([lambda: step.run(m, product, head=head)], 7)

    for turn, (name, choices) in itertools.product(range(2), best.items()):
        if name == "head" and turn:
            continue
        now = measure(name, chosen[name])
        for choice in choices:
            for ahead in aheads(choice):
                if search.over:
                    continue
                tile = choice and choice._replace(ahead=ahead)
                us = measure(name, tile)
                if us < now * GAIN or (chosen[name] is None and us < now):
                    now, chosen[name] = us, tile
        tile = chosen[name]
        print(f"  m={m} {name}: {now:.1f} us, {tile and tuple(tile)}", flush=True)
    with Independent():
        alone = whole(chosen, True)
    cublas = whole(dict.fromkeys(chosen), True)
    print(
        f"  m={m}: chosen {whole(chosen, True):.1f} us, each kernel after the other {alone:.1f}, all cuBLAS {cublas:.1f}"
    )
    return chosen


def main() -> None:
    """Tune the shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=USUAL, choices=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 16, 32, 64, 128, 256])
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--shapes", nargs="*", default=[], metavar="OUTxIN", help="tune these alone, instead of models")
    parser.add_argument("--known", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    args = parser.parse_args()
    search = Search(args.known, time.monotonic() + args.seconds)
    torch.manual_seed(0)
    space, table = Workspace(torch.device("cuda")), {}
    with torch.inference_mode():
        alone = [(int(n), int(k)) for n, k in (shape.split("x") for shape in args.shapes)]
        models = [] if alone else args.models
        shapes = {*alone, *(shape for name in models for shape in MODELS[name].matrices.values())}
        tiles = (tile for m, shape in itertools.product(args.rows, shapes) for tile in search.tiles(m, *shape))
        compile_all(((tile, False) for tile in tiles), space)
        for shape in alone:
            found = tune_alone("", *shape, args.rows, space, args.top, search)
            table[shape] = {m: fastest(choices) for m, choices in found.items()}
        for name in models:
            model = MODELS[name]
            best = {
                part: tune_alone(f"{name} {part}", *shape, args.rows, space, args.top, search)
                for part, shape in model.matrices.items()
            }
            step = Step(model, 8 if model.hidden >= 4096 else model.layers)
            for m in args.rows:
                chosen = tune_together(model, m, {part: found[m] for part, found in best.items()}, space, step, search)
                for part, tile in chosen.items():
                    table.setdefault(model.matrices[part], {})[m] = tile
    for shape, tiles in table.items():
        lines = "".join(f"        {m}: {source(tile)},\n" for m, tile in tiles.items())
        print(f"    {shape}: {{\n{lines}    }},")


def fastest(choices: Sequence[Choice]) -> Choice:
    """Return the fastest choice, of tiles that can hold a gate and its value, without those that are early: how fast they are
    appears in a step only."""
    return next(tile for tile in choices if tile is None or (tile.block_n > 1 and not tile.early))


def source(tile: Choice) -> str:
    """Return the Python text of a tile, as in the table."""
    if tile is None:
        return "None"
    given = [*map(str, tile[:4]), *([str(tile.stages)] if tile.stages > 1 else [])]
    given += [f"split={tile.split}"] if tile.split > 1 else []
    given += [f"{name}={getattr(tile, name)}" for name in ("ahead", "per_sm", "early") if getattr(tile, name)]
    return f"ProductTile({', '.join(given)})"


if __name__ == "__main__":
    main()
