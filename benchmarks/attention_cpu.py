"""Measure the microseconds per layer of attention on a CPU, without a model.

    OMP_NUM_THREADS=2 python benchmarks/attention_cpu.py [--heads 4 2 64] [--dtype float32] [--threads 2]

Columns: ``plan`` is paid once per step, ``store`` and ``forward`` once per layer. Each is the fastest of many short
bursts, so that a busy machine has little effect. ``scattered`` pages force a gather.

Variants that were tried, on one core of an AMD EPYC with AVX-512 (torch 2.13, float32 unless noted otherwise):

- One row of 200 keys, 4 query and 2 key heads: the CPU flash operator 13.6 us, reached through scaled_dot_product_attention
  15.5; two batched products and a softmax 13.2; one product per head 22; one product of all heads, block-diagonal, 19.
  Using the query heads of a key head as its queries beats native grouped heads (bfloat16, 8 and 2 heads: 20 against 177 us).
- bfloat16 with one query per key head: widening keys and values first 58 us, the operator on bfloat16 189.
- 16 rows of 200 keys: a gather and one padded call 280 us, one call per row on views 300 (425 with its copies); rows of 512
  keys break even. Keys transposed or by head in separate memory: 160 to 190 without the gather, which is the memory's speed.
  Gathers copy page by page (80 us against 130 key by key), into memory that is kept (a row of 2048 keys: 200 us against 1150
  with page faults).
- A prompt after a cached prefix: masked blocks of queries 10.0 ms, an unmasked and a causal part merged by their
  log-sum-exp 14.3 (4 heads) and 21 against 21 (8 heads).
- store: index_copy_ 3.2 us for keys and values, a slice found on the host 3.6, index_put_ 4.0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from dovetail.interfaces.attention import AttentionContext, AttentionLayer
from dovetail.interfaces.cache import CacheGroup
from dovetail.memory.pool import PagedKVPool
from dovetail.testing.batches import make_batch, make_page_table
from dovetail_attention.config import TorchNativeConfig
from dovetail_attention.torch_native import TorchNativeAttention

CASES: dict[str, tuple[list[int], list[int]]] = {
    **{f"decode 1 x {n}": ([n - 1], [1]) for n in (64, 200, 512, 2048)},
    **{f"decode 16 x {n}": ([n - 1] * 16, [1] * 16) for n in (64, 200, 512)},
    "decode 16 x 32..512": (np.random.default_rng(0).integers(31, 512, 16).tolist(), [1] * 16),
    "verify 1 x 5 after 200": ([200], [5]),
    **{f"extend 1 x {n}": ([0], [n]) for n in (64, 512, 1024)},
    "extend 16 x 64": ([0] * 16, [64] * 16),
    "extend 16 x 20 after 180": ([180] * 16, [20] * 16),
    "extend 1 x 512 after 1024": ([1024], [512]),
}


def fastest(action: Callable[[], object], seconds: float = 0.15) -> float:
    """Return the microseconds of the fastest burst."""
    best, burst, end = float("inf"), 1, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(burst):
            action()
        spent = (time.perf_counter() - start) / burst
        best = min(best, spent)
        burst = max(1, min(50, int(2e-3 / spent)))
    return best * 1e6


def measure(prefix: list[int], extend: list[int], page_size: int, scattered: bool, args: argparse.Namespace) -> str:
    """Return the three times of one case as text."""
    heads, kv_heads, dim = args.heads
    dtype = getattr(torch, args.dtype)
    lens = [a + b for a, b in zip(prefix, extend, strict=True)]
    num_pages = 2 + sum(-(-n // page_size) for n in lens)
    pool = PagedKVPool(CacheGroup(1, kv_heads, dim), num_pages, page_size, dtype, "cpu")
    pool.k.normal_()
    pool.v.normal_()
    table = make_page_table(lens, page_size, num_pages, seed=0 if scattered else None)
    batch = make_batch(page_size, table, prefix, extend)
    context = AttentionContext(torch.device("cpu"), dtype, heads, kv_heads, dim, pool, len(lens), max(lens))
    backend = TorchNativeAttention(TorchNativeConfig(), context)
    layer = AttentionLayer(0, dim**-0.5)
    q = torch.randn(sum(extend), heads, dim).to(dtype)
    k, v = torch.randn(2, sum(extend), kv_heads, dim).to(dtype)
    backend.plan(batch)
    backend.forward(q, layer, batch)
    plan = fastest(lambda: backend.plan(batch))
    store = fastest(lambda: pool.store(0, k, v, batch.out_loc))
    return f"{plan:8.1f} {store:8.1f} {fastest(lambda: backend.forward(q, layer, batch)):9.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs=3, type=int, default=[4, 2, 64], metavar=("HEADS", "KV_HEADS", "HEAD_DIM"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"heads {args.heads} {args.dtype} threads {args.threads}")
    print(f"{'case':28} {'pages':14} {'plan':>8} {'store':>8} {'forward':>9}  (us)")
    with torch.inference_mode():
        for name, (prefix, extend) in CASES.items():
            if args.only not in name:
                continue
            for page_size, scattered in ((16, False), (16, True), (1, True)):
                pages = f"{page_size} {'scattered' if scattered else 'in order'}"
                print(f"{name:28} {pages:14} {measure(prefix, extend, page_size, scattered, args)}", flush=True)


if __name__ == "__main__":
    main()
