"""Measure layers of experts on one GPU, without a model.

    python benchmarks/experts_gpu.py [--sizes qwen3-30b-a3b gpt-oss-20b] [--tokens 1 16 64 256 1024 8192] [--format fp8_blocks] [--tune] [--compare]

Results are first compared with float32. A row of the table is one layer: routing from logits, both products, and the sum of each
token's experts. Times are medians of graph replays; each replay runs ``ROUNDS`` different choices of experts, so that the weights of
a few tokens are not in the L2 cache. ``floor`` is the time of reading the weights of the chosen experts once, or of multiplying, whichever
is longer. ``torch`` is ``grouped_mm`` for both products of pairs that are sorted already, without activation and sums. With uniform
routing all experts are chosen equally often, with skewed routing their frequencies are lognormal, as in trained models.

``parts`` is the layer as decode steps compute it, whose sums are left to the norm that follows. With ``--compare``, layers with many pairs for each
expert are measured a second time without the kernels of ``experts_many``.

``--format mxfp4`` measures weights in MXFP4; ``torch`` multiplies their values in bfloat16. With ``fp8_rows`` and ``fp8_blocks``, ``torch`` multiplies
FP8 with scales by row, without quantizing activations. ``--tune`` tries tiles, and prints the fastest of each number of tokens, for
``ops/triton/expert_tiles.py``, ``mxfp4_tiles.py`` or ``fp8_tiles.py``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, RoutingRule, SwiGLU
from dovetail.ops.expert_formats import dequantized
from dovetail.ops.experts import MOST_IN_PARTS, expert_parts, experts
from dovetail.ops.mxfp4 import quantize
from dovetail.ops.routing import route
from dovetail.ops.triton import expert_layers, experts_many, mxfp4_words
from dovetail.ops.triton import experts as plain_kernels
from dovetail.ops.triton import experts_fp8 as fp8_kernels
from dovetail.ops.triton import mxfp4 as mxfp4_kernels
from dovetail.ops.triton.ahead import KernelsAhead
from dovetail.ops.triton.expert_tiles import ExpertTile, ExpertTiles
from dovetail.ops.triton.mxfp4_plain import MEAN_PAIRS
from dovetail.ops.triton.mxfp4_tiles import MOST_SHARED, Mxfp4Tile, Mxfp4Tiles, reads_ahead, shared_bytes

READ = 4.45e12
"""The bytes per second of plain reading, measured on an H200. An H100 reads 3.0e12 (``--read``)."""
MULTIPLY = {"plain": 7e14, "mxfp4": 7e14, "fp8_rows": 1.3e15, "fp8_blocks": 1.3e15}
"""The operations per second that large products in bfloat16 and in FP8 reach."""
FP8 = torch.float8_e4m3fn
ROUNDS = 8
CHECKED = (1, 2, 16, 33, 64, 300, 5000)
"""The numbers of tokens whose results are compared with float32."""


class Size(NamedTuple):
    """Describe a layer of experts."""

    hidden: int
    size: int
    rule: RoutingRule
    activation: SwiGLU = SILU
    bias: bool = False


SIZES = {
    "qwen3-30b-a3b": Size(2048, 768, RoutingRule(128, 8, renormalize=True)),
    "gpt-oss-20b": Size(2880, 2880, RoutingRule(32, 4, after_choice=True), SwiGLU(1.702, 7.0, 1.0), bias=True),
    "deepseek-v2-lite": Size(2048, 1408, RoutingRule(64, 6)),
}


KERNELS: dict[str, Any] = {
    "plain": plain_kernels,
    "mxfp4": mxfp4_kernels,
    "fp8_rows": fp8_kernels,
    "fp8_blocks": fp8_kernels,
}
BYTES = {"plain": 2.0, "mxfp4": 17 / 32, "fp8_rows": 1.0, "fp8_blocks": 1.0}
"""The bytes of one weight."""


def weights_of(size: Size, form: str) -> ExpertWeights:
    """Return random weights for activations in bfloat16."""

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").uniform_(-0.05, 0.05)

    count, width, hidden = size.rule.num_experts, size.size, size.hidden
    biases = (random(count, 2 * width), random(count, hidden)) if size.bias else (None, None)
    if form == "plain":
        gate_up, down = random(count, 2 * width, hidden), random(count, hidden, width)
        return ExpertWeights(gate_up, down, size.activation, *biases, whole=count)
    if form != "mxfp4":
        return fp8_weights(form, random(count, 2 * width, hidden), random(count, hidden, width), size, biases)
    gate_up, gate_up_scale = zip(*(quantize(random(2 * width, hidden)) for _ in range(count)), strict=True)
    down, down_scale = zip(*(quantize(random(hidden, width)) for _ in range(count)), strict=True)
    return ExpertWeights(
        torch.stack(gate_up),
        torch.stack(down),
        size.activation,
        *biases,
        whole=count,
        format="mxfp4",
        gate_up_scale=torch.stack(gate_up_scale),
        down_scale=torch.stack(down_scale),
    )


def logits_of(size: Size, tokens: int, routing: str) -> torch.Tensor:
    """Return logits that choose experts with the frequencies of ``routing``."""
    count, top_k = size.rule.num_experts, size.rule.top_k
    if routing == "skewed":
        return torch.randn(tokens, count, device="cuda") + torch.randn(count, device="cuda")
    chosen = torch.arange(tokens * top_k, device="cuda").view(tokens, top_k)
    chosen = torch.randperm(count, device="cuda")[chosen % count]
    return torch.rand(tokens, count, device="cuda").scatter_add_(
        1, chosen, torch.full(chosen.shape, 2.0, device="cuda")
    )


def fp8_weights(
    form: str,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    size: Size,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> ExpertWeights:
    """Return weights in FP8 with a scale for each row, or for each block of 128 x 128."""

    def scales(weight: torch.Tensor) -> torch.Tensor:
        if form == "fp8_rows":
            return weight.abs().amax(2).float() / 448
        shape = [-(-n // 128) for n in weight.shape[1:]]
        return torch.full((len(weight), *shape), 0.05 / 448, device="cuda")

    def codes(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        whole = scale[:, :, None] if form == "fp8_rows" else scale[:, :1, :1]
        return torch.stack([(one / own).to(FP8) for one, own in zip(weight, whole, strict=True)])

    found = [(codes(weight, scales(weight)), scales(weight)) for weight in (gate_up, down)]
    return ExpertWeights(
        found[0][0],
        found[1][0],
        size.activation,
        *biases,
        whole=len(gate_up),
        format="fp8_rows" if form == "fp8_rows" else "fp8_blocks",
        gate_up_scale=found[0][1],
        down_scale=found[1][1],
    )


def check(size: Size, weights: ExpertWeights) -> None:
    """Compare the layer with float32, expert by expert."""
    plain = dequantized(weights, torch.bfloat16)
    wide = replace(
        plain,
        gate_up=plain.gate_up.float(),
        down=plain.down.float(),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias.float(),
        down_bias=None if weights.down_bias is None else weights.down_bias.float(),
    )
    for tokens in CHECKED:
        x = torch.randn(tokens, size.hidden, device="cuda").bfloat16()
        routing = route(logits_of(size, tokens, "skewed"), size.rule)
        expected = one_by_one(x.float(), routing, wide)
        for got in (experts(x, routing, weights), expert_layers.expert_parts(x, routing, weights).sum(0)):
            error = ((got.float() - expected).norm() / expected.norm()).item()
            allowed = 0.1 if weights.format.startswith("fp8") else 0.01  # activations are quantized too
            assert error < allowed, f"{tokens} tokens: the relative error is {error:.4f}"


def compile_ahead(size: Size, weights: ExpertWeights, numbers: list[int]) -> None:
    """Compile the kernels for these numbers of tokens, and those of ``check``, in processes on all cores."""
    major, minor = torch.cuda.get_device_capability()
    ahead = KernelsAhead(10 * major + minor, f"experts-{time.time_ns()}", os.cpu_count() or 4)
    if ahead.is_active:
        with ahead.noting():
            for tokens in sorted({*CHECKED, *numbers}):
                x = torch.randn(tokens, size.hidden, device="cuda").bfloat16()
                routing = route(logits_of(size, tokens, "skewed"), size.rule)
                experts(x, routing, weights)
                if tokens in CHECKED:
                    expert_layers.expert_parts(x, routing, weights)
        ahead.wait(120)
    ahead.close()


def one_by_one(x: torch.Tensor, routing: Routing, weights: ExpertWeights) -> torch.Tensor:
    """Compute the layer expert by expert."""
    total, act = torch.zeros_like(x), weights.activation
    for expert in range(weights.whole):
        token, place = (routing.ids == expert).nonzero(as_tuple=True)
        biases = [None if bias is None else bias[expert] for bias in (weights.gate_up_bias, weights.down_bias)]
        gate, up = functional.linear(x[token], weights.gate_up[expert], biases[0]).chunk(2, 1)
        if act.limit is not None:
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        inner = gate * torch.sigmoid(act.alpha * gate) * (up + act.offset)
        result = functional.linear(inner, weights.down[expert], biases[1])
        total.index_add_(0, token, result * routing.weights[token, place].unsqueeze(1))
    return total


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Return the median time of a call within a graph of all ``calls``."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


def library_time(calls: list[Callable[[], object]]) -> float:
    """Return ``microseconds`` of calls that torch may not have for this device: then not a number."""
    try:
        return microseconds(calls)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        print(f"  torch: {str(error).splitlines()[0]:.100}", flush=True)
        return float("nan")


def layer_calls(
    size: Size, weights: ExpertWeights, tokens: int, routing: str, compute: Callable[..., object] = experts
) -> list[Callable[[], object]]:
    """Return ``ROUNDS`` calls of the layer with different choices of experts."""
    x = torch.randn(tokens, size.hidden, device="cuda").bfloat16()
    given = [logits_of(size, tokens, routing) for _ in range(ROUNDS)]
    return [lambda logits=logits: compute(x, route(logits, size.rule), weights) for logits in given]


def other_times(size: Size, weights: ExpertWeights, tokens: int, routing: str, compare: bool) -> str:
    """Return the times of other ways to compute a layer, for the line of its row."""
    if tokens <= MOST_IN_PARTS:
        return f"   parts {microseconds(layer_calls(size, weights, tokens, routing, expert_parts)):9.1f}"
    mean = tokens * size.rule.top_k / size.rule.num_experts
    if not compare or mean < MEAN_PAIRS or weights.format not in ("plain", "mxfp4"):
        return ""
    usual = experts_many.fits
    experts_many.fits = lambda *_: False
    try:
        return f"   without experts_many {microseconds(layer_calls(size, weights, tokens, routing)):9.1f}"
    finally:
        experts_many.fits = usual


def fp8_products(rows: torch.Tensor, inner: torch.Tensor, weights: ExpertWeights, ends: torch.Tensor) -> None:
    """Multiply sorted pairs with FP8 weights, with torch and scales of 1 for each row."""
    for left, right in ((rows, weights.gate_up), (inner, weights.down)):
        ones = [torch.ones(shape, device="cuda") for shape in (left.shape[:1], right.shape[:2])]
        torch._scaled_grouped_mm(left, right.mT, *ones, offs=ends, out_dtype=torch.bfloat16)


def torch_calls(size: Size, weights: ExpertWeights, form: str, tokens: int, routing: str) -> list[Callable[[], object]]:
    """Return ``ROUNDS`` calls of torch's products of sorted pairs."""
    calls: list[Callable[[], object]] = []
    for _ in range(ROUNDS):
        ids = route(logits_of(size, tokens, routing), size.rule).ids.flatten()
        ends = torch.bincount(ids, minlength=size.rule.num_experts).cumsum(0).int()
        rows = torch.randn(len(ids), size.hidden, device="cuda").bfloat16()
        inner = torch.randn(len(ids), size.size, device="cuda").bfloat16()
        if form.startswith("fp8"):
            codes = rows.to(FP8), inner.to(FP8)
            calls.append(lambda codes=codes, ends=ends: fp8_products(*codes, weights, ends))
            continue

        def call(rows: torch.Tensor = rows, inner: torch.Tensor = inner, ends: torch.Tensor = ends) -> None:
            functional.grouped_mm(rows, weights.gate_up.mT, offs=ends)
            functional.grouped_mm(inner, weights.down.mT, offs=ends)

        calls.append(call)
    return calls


def floor(size: Size, form: str, tokens: int, routing: str, read: float) -> float:
    """Return the microseconds that no kernel can do without."""
    weights_of_one = 3 * size.hidden * size.size
    chosen = [route(logits_of(size, tokens, routing), size.rule).ids.unique().numel() for _ in range(ROUNDS)]
    multiply = tokens * size.rule.top_k * weights_of_one * 2 / MULTIPLY[form]
    return max(statistics.mean(chosen) * weights_of_one * BYTES[form] / read, multiply) * 1e6


def candidates(tokens: int) -> Iterator[ExpertTiles]:
    """Yield tiles to try. Both products use blocks of the same number of rows."""
    blocks = (16, 32, 64) if tokens <= 256 else (32, 64, 128)
    widths, depths = ((32, 64, 128), (64, 128, 256)) if tokens <= 256 else ((64, 128, 256), (64, 128))
    for block_m, block_n, block_k, warps, stages in itertools.product(blocks, widths, depths, (4, 8), (3, 4, 5)):
        if (block_m + 2 * block_n) * block_k * 2 * stages <= 224 << 10:
            tile = ExpertTile(block_n, block_k, warps, stages)
            yield ExpertTiles(block_m, tile, tile)


def mxfp4_candidates(tokens: int) -> Iterator[Mxfp4Tiles]:
    """Yield tiles to try for weights in MXFP4."""
    blocks = (8,) if tokens <= 8 else (8, 16) if tokens <= 64 else (16, 32, 64) if tokens <= 256 else (64, 128)
    warps, stages = ((1, 2, 4), (3, 5)) if tokens <= 256 else ((2, 4, 8), (2, 3))
    for block_m, block_n, block_k, count, depth in itertools.product(
        blocks, (16, 32, 64, 128, 256), (128, 256), warps, stages
    ):
        tile = Mxfp4Tile(block_n, block_k, count, depth)
        few = block_n * block_m <= count * 32 * 128  # registers for the sums
        if few and block_n >= 16 * count and reads_ahead(tile) and shared_bytes(tile, block_m, 2) <= MOST_SHARED:
            yield Mxfp4Tiles(block_m, tile, tile)


def fp8_candidates(tokens: int) -> Iterator[ExpertTiles]:
    """Yield tiles to try for weights in FP8, whose scales belong to 128 columns."""
    blocks = (16,) if tokens <= 16 else (16, 32, 64) if tokens <= 256 else (32, 64, 128)
    for block_m, block_n, warps, stages in itertools.product(blocks, (32, 64, 128), (4, 8), (3, 4, 5, 6)):
        if (2 * block_m + 2 * block_n) * 128 * stages <= 224 << 10 and 4 * block_m * block_n <= warps * 32 * 224:
            tile = ExpertTile(block_n, 128, warps, stages)
            yield ExpertTiles(block_m, tile, tile)


def tune(name: str, size: Size, weights: ExpertWeights, tokens: int) -> None:
    """Print the fastest tiles: first of both products with one tile, then of each with the other's fixed."""
    calls = layer_calls(size, weights, tokens, "skewed")
    kernels = KERNELS[weights.format]
    tiles_of = kernels.tiles_of
    mxfp4_words.pays = lambda *_: False  # its kernels have tiles of their own
    tried = {"plain": candidates, "mxfp4": mxfp4_candidates}.get(weights.format, fp8_candidates)(tokens)

    def time_of(tiles: Any) -> float:
        kernels.tiles_of = lambda *_: tiles
        try:
            return microseconds(calls)
        except Exception as error:  # too much shared memory, or a tile that does not compile
            print(f"  {tiles}: {type(error).__name__}", flush=True)
            return float("inf")
        finally:
            kernels.tiles_of = tiles_of

    found = sorted((time_of(tiles), tiles) for tiles in tried)[:6]
    best = min((time_of(a._replace(down=b.down)), a._replace(down=b.down)) for _, a in found for _, b in found)
    print(f"{name} {tokens} tokens: {best[0]:.1f} us with {best[1]}", flush=True)


def main() -> None:
    """Check, then measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 1024, 8192])
    parser.add_argument("--read", type=float, default=READ, help="bytes per second")
    parser.add_argument("--format", choices=KERNELS, default="plain")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in given.sizes:
        size = SIZES[name]
        weights = weights_of(size, given.format)
        compile_ahead(size, weights, given.tokens)
        check(size, weights)
        fp8 = given.format.startswith("fp8")
        values = weights if fp8 else dequantized(weights, torch.bfloat16)
        print(f"{name}: equal to float32; microseconds of one layer")
        for tokens in given.tokens:
            if given.tune:
                tune(name, size, weights, tokens)
                continue
            for routing in ("uniform", "skewed"):
                ours = microseconds(layer_calls(size, weights, tokens, routing))
                products = library_time(torch_calls(size, values, given.format, tokens, routing))
                others = other_times(size, weights, tokens, routing, given.compare)
                least = floor(size, given.format, tokens, routing, given.read)
                print(
                    f"  {tokens:5} tokens, {routing}: {ours:9.1f}   floor {least:9.1f} ({ours / least:.2f}x)   torch {products:9.1f}{others}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
