"""Measure the microseconds of the kernels of a decode step on one GPU, without a model.

    python benchmarks/ops_gpu.py [--models 8b small] [--rows 1 16 64]

There are three tables. The first compares the small ops with torch's (``tests/gpu/test_ops_gpu.py`` checks them). The second compares
matrix products on cold weights, which are checked first, with cuBLAS and with the time of reading the weight at ``READ``. The third shows
steps: all layers of a model except attention, as one graph whose replays must give equal results. A step runs with cuBLAS, with the products
of ``ops.linear.few_rows``, with these products but each adding up its own parts (``ops.parts``), and without programmatic dependent launch
(``ops.triton.launch``).

On an H200 (torch 2.11, 2026-11-21), microseconds of a step without attention, ours / without dependent launch / cuBLAS:
8 layers of the 8B shape and its head, one row 1101 / 1151 / 1230, 16 rows 1170 / 1223 / 1264, 64 rows 1276 / 1322 / 1364;
all 28 of the small shape and its head 471 / 638 / 996, 653 / 831 / 891, 811 / 960 / 948. Small ops of one row, one after the
other: 0.9 to 1.2 where torch takes 2.5 to 10. One row on cold weights, ours / cuBLAS / ``READ``: [6144, 4096] 13.2 / 16.3 /
11.3, [4096, 4096] 9.7 / 12.7 / 7.5, [28672, 4096] 56 / 65 / 52.8, [4096, 14336] 29.4 / 31.7 / 26.4, [1024, 2048] 1.8 / 12.5 / 0.9.
Prefetching weights (``ProductTile.ahead``) gains next to nothing if the tiles of the next kernel are loaded before the wait anyway.

The gain from ``ProductTile.early`` and from a split known to the compiler, up to 16 rows (an H200, 2026-11-22; this replaces the numbers for
16 rows above), steps now / before / cuBLAS:
28 layers of the 3B shape and its head, 2 rows 1838 / 1950 / 2088, 9 rows 1878 / 2004 / 2136, 16 rows 1916 / 2015 / 2161 (one row 1706);
8 of the 8B shape, 9 rows 1156 / 1159 / 1255; the small one, 9 rows 617 / 651 / 884. 9 rows of the 3B shape on cold weights,
now / before / one row: [5120, 3072] 9.9 / 10.9 / 8.3, [3072, 3072] 6.9 / 8.1 / 6.6, [16384, 3072] 25.5 / 26.0 / 25.7,
[3072, 8192] 15.1 / 17.7 / 14.0.

The gain from norms that add up the parts of the product before them (the same machine and day, later), steps in parts / each adding up
its own / cuBLAS, at 2, 9, 16, 32 and 64 rows: the 3B shape 1736 / 1798 / 2064, 1819 / 1881 / 2110, 1874 / 1924 / 2136,
1915 / 1958 / 2195, 2116 / 2144 / 2253; 8 layers of the 8B shape 1096 / 1114 / 1205, 1127 / 1140 / 1223, 1135 / 1151 / 1242, 1184 / 1198 / 1286,
1263 / 1273 / 1338; the small one 551 / 589 / 1010, 576 / 619 / 877, 590 / 626 / 887, 663 / 708 / 902, 779 / 841 / 939.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from dovetail.layers.rope import RopeConfig
from dovetail.layers.rotary import rotary_table
from dovetail.ops.activation import silu_mul
from dovetail.ops.linear import few_rows
from dovetail.ops.norm import add_parts_rms_norm, add_rms_norm, rms_norm
from dovetail.ops.parts import Parts
from dovetail.ops.rotary import apply_rotary, rotate_and_store
from dovetail.ops.triton import launch, tuning
from dovetail.ops.triton.matmul import FewRows

READ = 4.45e12
"""The bytes per second of plain reading, measured on an H200."""
COLD = 400e6
"""The bytes of weights to rotate over: several times the L2 cache."""
Product = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor | Parts]


class Model(NamedTuple):
    """Describe the sizes of a dense decoder, or of the share that one rank computes. With ``inner`` 0, what follows attention is
    left out, as for models with experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    qk_norm: bool

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of a layer's matrices and of the head."""
        width = self.heads * self.head_dim
        mlp = {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}
        return {
            "qkv": (width + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, width),
            **(mlp if self.inner else {}),
            "head": (self.vocab, self.hidden),
        }


MODELS = {
    "8b": Model(32, 4096, 32, 8, 128, 14336, 128256, False),
    "3b": Model(28, 3072, 24, 8, 128, 8192, 128256, True),
    "small": Model(28, 1024, 16, 8, 128, 3072, 151936, True),
    "32b-tp2": Model(64, 5120, 32, 4, 128, 12800, 75968, True),
    "30b-a3b": Model(48, 2048, 32, 4, 128, 0, 151936, True),
    "30b-a3b-tp2": Model(48, 2048, 16, 2, 128, 0, 75968, True),
}
USUAL = ["8b", "3b", "small"]
"""The models that run unless others are named."""


def per_call(calls: Sequence[Callable[[], object]], rounds: int = 5) -> float:
    """Return the median microseconds of one call; all of ``calls`` are captured in one graph, which is replayed."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1000 / len(calls)


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return random bfloat16 numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


MAX_ROWS = 256
"""The number of rows for which a ``Step`` has inputs and buffers."""


class Step:
    """Run a decode step without attention: the projection after attention receives what attention would receive."""

    def __init__(self, model: Model, layers: int) -> None:
        self.model = model
        self.weights = [
            {name: randn(*shape, scale=0.02) for name, shape in model.matrices.items() if name != "head"}
            for _ in range(layers)
        ]
        self.head = randn(*model.matrices["head"], scale=0.02)
        self.norm = torch.ones(model.hidden, device="cuda", dtype=torch.bfloat16)
        head_norm = torch.ones(model.head_dim, device="cuda", dtype=torch.bfloat16)
        self.qk_norm = (head_norm, head_norm, 1e-6) if model.qk_norm else None
        rope = RopeConfig(head_dim=model.head_dim, theta=1e4, original_len=4096, context_len=4096)
        self.table = rotary_table(rope, torch.device("cuda"))
        self.keys, self.values = torch.zeros(
            2, MAX_ROWS, model.kv_heads, model.head_dim, device="cuda", dtype=torch.bfloat16
        )
        self.places = torch.arange(MAX_ROWS, device="cuda")
        self.inputs = randn(MAX_ROWS, model.hidden)

    def run(self, rows: int, product: Product, head: bool = True) -> torch.Tensor:
        """Return the logits (or hidden states) of ``rows`` rows."""
        model, places = self.model, self.places[:rows]
        x: torch.Tensor | Parts = self.inputs[:rows]
        residual = None
        for layer in self.weights:
            normed, residual = self.add(x, residual)
            qkv = whole(product("qkv", normed, layer["qkv"])).view(rows, -1, model.head_dim)
            q = rotate_and_store(
                qkv, model.heads, model.kv_heads, self.table, places, self.qk_norm, self.keys, self.values, places
            )
            x = product("o", q.view(rows, -1), layer["o"])
            if self.model.inner:
                normed, residual = self.add(x, residual)
                x = product("down", whole(product("gate_up", normed, layer["gate_up"])), layer["down"])
        normed, _ = self.add(x, residual)
        return whole(product("head", normed, self.head)) if head else normed

    def add(self, x: torch.Tensor | Parts, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of the sum, and the sum."""
        if isinstance(x, Parts):
            assert residual is not None
            return add_parts_rms_norm(x, residual, self.norm, 1e-5)
        return (rms_norm(x, self.norm, 1e-5) if residual is None else add_rms_norm(x, residual, self.norm, 1e-5)), x

    @property
    def bytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(w.nbytes for layer in self.weights for w in layer.values()) + self.head.nbytes


def whole(x: torch.Tensor | Parts) -> torch.Tensor:
    """Return ``x``, which must not be in parts."""
    assert isinstance(x, torch.Tensor)
    return x


def torch_product(name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the product with cuBLAS, and the gate after ``gate_up``."""
    out = functional.linear(x, weight)
    return silu_mul(out) if name == "gate_up" else out


def our_product(*, in_parts: bool = True) -> Product:
    """Return the product that the layers use. ``in_parts``: sums that a norm follows are returned in parts, see
    ``ops.parts``."""
    kept: dict[int, FewRows | None] = {}

    def product(name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | Parts:
        call = kept.get(weight.data_ptr())
        if call is None:
            call = kept[weight.data_ptr()] = few_rows(weight)
        if call is None:
            return torch_product(name, x, weight)
        if name == "gate_up":
            return call.gated(x, None)
        parts = call.parts(x) if in_parts and name in ("o", "down") else None
        return call(x, None) if parts is None else parts

    return product


class Independent:
    """Prevent, within this context, that a kernel starts before the previous kernel has ended."""

    def __enter__(self) -> None:
        self.options = launch._options
        launch._options = lambda *given: {**self.options(*given), "PDL": False, "launch_pdl": False}

    def __exit__(self, *error: object) -> None:
        launch._options = self.options


def small_ops(model: Model, rows: int) -> None:
    """Print the table of the small ops, with warm inputs as in a step."""
    x, residual, gate_up = randn(rows, model.hidden), randn(rows, model.hidden), randn(rows, 2 * model.inner)
    weight, heads = randn(model.hidden), model.heads + 2 * model.kv_heads
    qkv, half = randn(rows, heads, model.head_dim), model.inner
    rope = RopeConfig(head_dim=model.head_dim, theta=1e4, original_len=8192, context_len=8192)
    table = rotary_table(rope, torch.device("cuda"))
    places = torch.arange(rows, device="cuda")
    keys, values = randn(2, rows, model.kv_heads, model.head_dim)
    norms = (randn(model.head_dim), randn(model.head_dim), 1e-6) if model.qk_norm else None
    cos, sin = table.index_select(0, places).bfloat16().split(1, 1)

    def torch_rotate() -> None:
        qk, v = torch.split_with_sizes(qkv, [heads - model.kv_heads, model.kv_heads], 1)
        if norms is not None:
            qk = functional.rms_norm(qk, (model.head_dim,), norms[0], 1e-6)
        turned = apply_rotary(qk, cos, sin)
        keys.index_copy_(0, places, turned[:, model.heads :])
        values.index_copy_(0, places, v)

    rotate_bytes = 2 * qkv.nbytes
    cases: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {
        "rms_norm": (
            lambda: rms_norm(x, weight, 1e-5),
            lambda: functional.rms_norm(x, weight.shape, weight, 1e-5),
            2 * x.nbytes,
        ),
        "add_rms_norm": (
            lambda: add_rms_norm(x, residual, weight, 1e-5),
            lambda: functional.rms_norm(x.add_(residual), weight.shape, weight, 1e-5),
            4 * x.nbytes,
        ),
        "silu_mul": (
            lambda: silu_mul(gate_up),
            lambda: functional.silu(gate_up[:, :half]).mul_(gate_up[:, half:]),
            gate_up.nbytes * 3 // 2,
        ),
        "rotate_and_store": (
            lambda: rotate_and_store(qkv, model.heads, model.kv_heads, table, places, norms, keys, values, places),
            torch_rotate,
            rotate_bytes,
        ),
    }
    if not model.inner:
        del cases["silu_mul"]
    for name, (ours, theirs, size) in cases.items():
        us, torch_us = per_call([ours] * 20), per_call([theirs] * 20)
        print(
            f"  {name:18} m={rows:<5} {us:8.2f} us {size / us / 1e6:6.2f} TB/s   torch {torch_us:8.2f} us", flush=True
        )


def products(model: Model, rows: Sequence[int]) -> None:
    """Check and print the table of the matrix products, with cold weights."""
    for name, (n, k) in model.matrices.items():
        copies = max(2, -(-int(COLD) // (2 * n * k)))
        weights = [randn(n, k, scale=0.02) for _ in range(copies)]
        ours, floor = our_product(), 2 * n * k / READ * 1e6
        for m in rows:
            x = randn(m, k)
            exact = x.float() @ weights[0].float().t()
            error = float((whole(ours("", x, weights[0])).float() - exact).norm() / exact.norm())
            assert error < 5e-3, (name, m, error)
            us = per_call([lambda w=w, x=x, ours=ours: ours("", x, w) for w in weights])
            cublas = per_call([lambda w=w, x=x: functional.linear(x, w) for w in weights])
            print(
                f"  {name:8} [{n}, {k}] m={m:<3} {us:7.2f} us {2 * n * k / us / 1e6:5.2f} TB/s  cuBLAS {cublas:7.2f} us"
                f"  floor {floor:7.2f}  {tuning.tile_of(m, n, k) or 'cuBLAS'}",
                flush=True,
            )


def steps(model: Model, rows: Sequence[int]) -> None:
    """Check and print the table of whole steps without attention."""
    step = Step(model, model.layers)
    for m in rows:
        ours = our_product()
        ways: dict[str, Product] = {
            "cuBLAS": torch_product,
            "ours": ours,
            "ours, each adding up its parts": our_product(in_parts=False),
        }
        exact, once = step.run(m, torch_product).float(), step.run(m, ours)
        torch.cuda.synchronize()
        error = float((once.float() - exact).norm() / exact.norm())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step.run(m, ours)
        for _ in range(20):
            out.fill_(torch.nan)
            graph.replay()
            assert out.equal(once), "a replay differs from the run before"
        times = {name: per_call([lambda way=way, m=m: step.run(m, way)]) for name, way in ways.items()}
        with Independent():
            times["ours, each after the other"] = per_call([lambda ours=ours, m=m: step.run(m, ours)])
        matrices = {name: per_call([lambda way=way, m=m: matrices_only(step, m, way)]) for name, way in ways.items()}
        print(
            f"  m={m:<3} floor {step.bytes / READ * 1e6:7.0f} us;",
            ", ".join(f"{name} {us:.0f}" for name, us in times.items()),
            "; matrices alone:",
            ", ".join(f"{name} {us:.0f}" for name, us in matrices.items()),
            f"; difference to cuBLAS {error:.4f}",
            flush=True,
        )


def matrices_only(step: Step, rows: int, product: Product) -> None:
    """Run the products of a step on inputs that do not depend on each other."""
    inputs = {name: step.inputs.new_ones(rows, shape[1]) for name, shape in step.model.matrices.items()}
    for layer in step.weights:
        for name, weight in layer.items():
            product(name, inputs[name], weight)
    product("head", inputs["head"], step.head)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=USUAL, choices=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        for name in args.models:
            print(f"{name}: small ops")
            for rows in (1, 16, 64, 8192):
                small_ops(MODELS[name], rows)
            print(f"{name}: matrix products")
            products(MODELS[name], args.rows)
            print(f"{name}: steps without attention")
            steps(MODELS[name], args.rows)


if __name__ == "__main__":
    main()
