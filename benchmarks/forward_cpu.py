"""Measure the microseconds per operation and per forward pass of decoder models on the CPU, at batch 1 and 16.

Run: python benchmarks/forward_cpu.py [--model tiny|46m] [--dtype float32|bfloat16] [--threads N] [--ops]

The fastest variants, on 2 cores of an AMD EPYC (Zen 4, 32 MiB of L3), torch 2.13 with MKL and oneDNN, 2026-11-21; the
machine is shared, so the microseconds are upper bounds:

- One row (a decode step of one request): ``product`` reads the unpacked weight in order and prefetches it. bfloat16,
  [2816, 512] 331 (panels of torch.bmm), 116 (oneDNN, packed) -> 92; float32 about as fast as two panels of torch.bmm.
- A few rows: ``product`` up to the limit of ``ops.linear.compiled_rows``. float32, 4 rows, [512, 256]: 23 (oneDNN, packed) -> 13 us.
- More rows: weights packed by oneDNN. float32, 16 rows, [32000, 512]: 11700 (``functional.linear``), 8000 (weight @ x.T)
  -> 3300 us; 512 rows: 114 -> 95 ms. bfloat16, 16 rows: 3160 -> 1670 us.
- Norms, rotary, gates: one compiled kernel each; operations that torch needs several calls for cost 2 to 4 times as much there.
- Forward and logits, one row, 96 tokens of context: tiny 0.46 ms (bfloat16 0.41), 46 M 6.4 ms (bfloat16 3.3 ms).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from dovetail.engine.build import as_module
from dovetail.engine.weights import build_model, load_weights
from dovetail.interfaces.attention import AttentionContext
from dovetail.memory.pool import PagedKVPool
from dovetail.ops.activation import silu_mul
from dovetail.ops.cpu.kernels import kernels
from dovetail.ops.linear import linear, packed, packed_linear
from dovetail.ops.norm import rms_norm
from dovetail.ops.rotary import apply_rotary
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.batches import make_batch, make_page_table
from dovetail.testing.installed import installed
from dovetail_models.dense import DenseModel
from dovetail_models.dense_describe import describe_llama

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "46m": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}
Timed = dict[str, Callable[[], object]]


class NoAttention:
    """Attend to nothing, so that only the model's own time is measured."""

    def plan(self, batch: Any) -> None:
        """Plan nothing."""

    def forward(self, q: torch.Tensor, layer: Any, batch: Any) -> torch.Tensor:
        """Return a contiguous copy of ``q``, as attention returns a new tensor."""
        return q.contiguous()


class NoPool:
    """Store nothing."""

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor) -> None:
        """Store nothing."""


def microseconds(calls: Timed, seconds: float, repeat: int = 8) -> dict[str, float]:
    """Return the best time of each call; the calls take turns, so that a busy machine disturbs all of them equally."""
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end:
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / repeat)
    return {name: value * 1e6 for name, value in best.items()}


def operations(config: dict[str, Any], dtype: torch.dtype, rows: int) -> Timed:
    """Return the operations of a layer in all variants that were tried."""
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width, head_dim = config["intermediate_size"], hidden // heads
    shapes = {
        "qkv": ((heads + 2 * kv) * head_dim, hidden),
        "out": (hidden, hidden),
        "gate_up": (2 * width, hidden),
        "down": (hidden, width),
        "head": (config["vocab_size"], hidden),
    }
    calls: Timed = {}
    for name, shape in shapes.items():
        weights = [torch.randn(shape, dtype=dtype) for _ in range(1 if name == "head" else 4)]
        x = torch.randn(rows, shape[1], dtype=dtype)
        calls[f"{name} linear"] = turns(linear, x, weights)
        turned = [weight.t().contiguous().t() for weight in weights]
        calls[f"{name} linear, weight stored [in, out]"] = turns(linear, x, turned)
        compiled = kernels(dtype)
        if compiled is not None:
            calls[f"{name} product"] = turns(compiled.product, x, weights)
        calls[f"{name} packed"] = turns(packed_linear, x, [packed(weight) for weight in weights])
    x, weight = torch.randn(rows, hidden, dtype=dtype), torch.randn(hidden, dtype=dtype)
    calls["norm"] = lambda: rms_norm(x, weight, 1e-5)
    calls["norm functional"] = lambda: functional.rms_norm(x, weight.shape, weight, 1e-5)
    calls["add"] = lambda: x + x
    gate_up = torch.randn(rows, 2 * width, dtype=dtype)
    calls["silu_mul"] = lambda: silu_mul(gate_up)
    qk = torch.randn(rows, heads + 2 * kv, head_dim, dtype=dtype)[:, : heads + kv]
    cos, sin = torch.randn(rows, 1, head_dim, dtype=dtype), torch.randn(rows, 1, head_dim, dtype=dtype)
    calls["rotary roll"] = lambda: apply_rotary(qk, cos, sin)
    calls["rotary cat"] = lambda: rotary_cat(qk, cos, sin)
    table, ids = torch.randn(4096, hidden, dtype=dtype), torch.zeros(rows, dtype=torch.long)
    calls["embedding index_select"] = lambda: table.index_select(0, ids)
    calls["embedding functional"] = lambda: functional.embedding(ids, table)
    return calls


def turns(function: Callable[..., torch.Tensor], x: torch.Tensor, weights: list[Any]) -> Callable[[], object]:
    """Return a function that calls ``function(x, weight)`` with the weights in turn, as the layers of a model do."""
    state = [0]

    def call() -> object:
        state[0] = (state[0] + 1) % len(weights)
        return function(x, weights[state[0]])

    return call


def rotary_cat(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings in the usual way: swap the halves by concatenation."""
    first, second = x.chunk(2, -1)
    return torch.cat((second, first), -1).mul_(sin).addcmul_(x, cos)


def forwards(config: dict[str, Any], dtype: torch.dtype, rows: int, context: int, attention: str) -> Timed:
    """Return decode steps of ``rows`` rows of ``context`` tokens: whole, without attention, and the head alone."""
    info = describe_llama(config)
    model = build_model(DenseModel, info, torch.device("cpu"), dtype)
    load_weights(model, directory=None, load_format="dummy")  # type: ignore[arg-type]
    group, page_size = info.cache_groups[0], 16
    table = make_page_table([context] * rows, page_size, 1 + rows * -(-context // page_size))
    pool = PagedKVPool(group, int(table.max()) + 1, page_size, dtype, "cpu")
    pool.k.zero_()
    pool.v.zero_()
    hidden = torch.randn(rows, info.hidden_size, dtype=dtype)
    calls: Timed = {"logits": lambda: model.logits(hidden)}
    backends: dict[str, tuple[Any, Any]] = {"none": (NoAttention(), NoPool())}
    if attention != "none":
        shape = (info.num_heads, info.num_kv_heads, info.head_dim)
        context_of = AttentionContext(torch.device("cpu"), dtype, *shape, pool, rows, context)
        component = installed().get(ComponentKind.ATTENTION, attention)
        section = installed().config_class(ComponentKind.ATTENTION, attention)(kind=attention)
        backends[attention] = (load_attribute(component.spec.target, component.label)(section, context_of), pool)
    for name, (backend, kv) in backends.items():
        batch = make_batch(page_size, table, [context - 1] * rows, [1] * rows, attn=(backend,), kv=(kv,))
        batch.input_ids.zero_()
        backend.plan(batch)
        calls[f"plan, attention {name}"] = lambda backend=backend, batch=batch: backend.plan(batch)
        calls[f"forward, attention {name}"] = lambda batch=batch: model.forward(batch)
        calls[f"forward and logits, attention {name}"] = lambda batch=batch: model.logits(model.forward(batch))
    print(f"{sum(p.numel() for p in as_module(model).parameters()) / 1e6:.1f} M parameters")
    return calls


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=96, help="tokens that a row attends to")
    parser.add_argument("--attention", default="torch_native", help="attention component, or none")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line")
    parser.add_argument("--ops", action="store_true", help="single operations too")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config, dtype = MODELS[given.model], getattr(torch, given.dtype)
    for rows in (1, 16):
        print(f"== {given.model}, {given.dtype}, {given.threads} threads, {rows} rows")
        calls = forwards(config, dtype, rows, given.context, given.attention)
        if given.ops:
            calls |= operations(config, dtype, rows)
        for name, value in microseconds(calls, given.seconds).items():
            print(f"{name:45} {value:9.1f}")


if __name__ == "__main__":
    main()
