"""Measure the microseconds of sampling on CUDA and compare with torch's sort, flashinfer.sampling and the byte floor.

    python benchmarks/sampling_gpu.py [--vocab 128256] [--rows 1 16 64 256] [--dtype bfloat16] [--spread 1 3] [--quick]

Times are medians of graph replays. The floor reads the logits once at 4.45 TB/s. Logits are normal: at spread 1 top-p
keeps tens of thousands of tokens (as random weights do), at spread 3 a few hundred or thousand. Replays rotate over
several sets of logits, so that the cache is not measured. Measured 2026-11-21 on one H200 (torch 2.11, triton 3.6;
128256 tokens, bfloat16, spread 3). Brackets contain torch and flashinfer (softmax and rejection, with its own random
numbers), measured in an earlier run:

    rows 1    greedy 2.1 (27)   sample 4.5 (60, 39)     top_k 50 + top_p 0.95: 34 (150, 90)     top_p 0.95: 190 (143, 48)
    rows 256  greedy 19 (47)    sample 26.5 (803, 280)  top_k 50 + top_p 0.95: 93 (4853, 573)   top_p 0.95: 434 (4646, 318)

A nucleus of more than about 500 tokens, or a larger top-k, streams each row about ten times: the last column.

- Statistics by blocks of 4096 tokens and 4 warps: blocks of 2048 take 23 against 19 us (greedy, 256 rows), blocks of 8192 the same.
- The filters with 512 groups and 16 warps: top_k 50 takes 26 and 76 us (1 and 256 rows), with 256 groups 22 and 67, with 8
  warps also 20 and 53; but 8 warps take a quarter more on the whole row. 32 warps: 13 % less there, a fifth more elsewhere.
- Before, each pass of a search halved its interval and summed every tile: 296 and 656 us instead of 190 and 434.
- Masks: one store per forbidden token 108 us, whole words read and written 34 (random bits), 21 (mostly forbidden).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from dovetail.ops.bitmask import apply_bitmask, bitmask_width
from dovetail.ops.logprobs import chosen_and_top
from dovetail.ops.penalties import apply_penalties
from dovetail.ops.sampling import Filters, greedy, sample, sample_reference

BYTES_PER_MICROSECOND = 4.45e6
Action = Callable[[torch.Tensor], object]


def microseconds(action: Action, sets: list[torch.Tensor], replays: int = 30) -> float:
    """Return the median over replays of a graph that runs ``action`` on each set once, in microseconds per set."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            action(sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for logits in sets:
            action(logits)
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(sets))
    return statistics.median(times)


def make_filters(n: int, vocab: int, top_k: int | None, top_p: float | None, min_p: float | None) -> Filters:
    def column(value: float | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if value is None else torch.full((n, 1), value, dtype=dtype, device="cuda")

    temperature = torch.full((n, 1), 0.8, device="cuda")
    return Filters(temperature, column(top_k, torch.int64), column(top_p, torch.float64), column(min_p, torch.float64))


def flashinfer_action(n: int, filters: Filters) -> Action | None:
    """Return the closest operation of flashinfer: softmax, then rejection sampling with its own random numbers."""
    try:
        from flashinfer import sampling
    except ImportError:
        return None
    k = None if filters.top_k is None else filters.top_k[:, 0].int()
    p = None if filters.top_p is None else filters.top_p[:, 0].float()
    m = None if filters.min_p is None else filters.min_p[:, 0].float()

    def action(logits: torch.Tensor) -> object:
        probs = sampling.softmax(logits.float(), temperature=filters.temperature[:, 0])
        if k is not None and p is not None:
            return sampling.top_k_top_p_sampling_from_probs(probs, k, p, filter_apply_order="top_k_first")
        if k is not None:
            return sampling.top_k_sampling_from_probs(probs, k)
        if p is not None:
            return sampling.top_p_sampling_from_probs(probs, p)
        if m is not None:
            return sampling.min_p_sampling_from_probs(probs, m)
        return sampling.sampling_from_probs(probs)

    return action


CASES: dict[str, tuple[int | None, float | None, float | None]] = {
    "sample": (None, None, None),
    "top_k 50": (50, None, None),
    "top_k 5000": (5000, None, None),
    "top_p 0.95": (None, 0.95, None),
    "top_k 50, top_p 0.95": (50, 0.95, None),
    "top_k 5000, top_p 0.95": (5000, 0.95, None),
    "min_p 0.05": (None, None, 0.05),
}


def run(n: int, vocab: int, dtype: torch.dtype, spread: float, quick: bool) -> None:
    size = n * vocab * dtype.itemsize
    sets = [(torch.randn(n, vocab, device="cuda") * spread).to(dtype) for _ in range(min(32, 2 + 300_000_000 // size))]
    uniform = torch.rand(n, dtype=torch.float64, device="cuda")
    mask = torch.randint(-(2**31), 2**31, (n, bitmask_width(vocab)), device="cuda").int()
    rows = torch.arange(n, device="cuda")
    counts = (torch.rand(n, vocab, device="cuda") < 0.005).int()
    penalties, penalised = (
        torch.tensor([[1.1, 0.5, 0.5]], device="cuda").repeat(n, 1),
        torch.empty_like(sets[0]).float(),
    )
    tokens, top = torch.zeros(n, dtype=torch.int64, device="cuda"), torch.empty(n, 5, device="cuda")
    chosen, top_ids = torch.empty(n, device="cuda"), torch.empty(n, 5, dtype=torch.int64, device="cuda")
    actions: dict[str, tuple[Action, Action | None, Action | None]] = {
        "greedy": (greedy, lambda logits: logits.argmax(-1), None),
    }
    for name, settings in CASES.items():
        filters = make_filters(n, vocab, *settings)
        actions[name] = (
            lambda logits, filters=filters: sample(logits, filters, uniform),
            lambda logits, filters=filters: sample_reference(logits.float(), filters, uniform),
            flashinfer_action(n, filters),
        )
    actions["bitmask"] = (lambda logits: apply_bitmask(logits, mask, rows), None, None)
    actions["penalties"] = (lambda x: apply_penalties(x, counts, rows, penalties, penalised), None, None)
    actions["5 logprobs"] = (
        lambda x: chosen_and_top(x, tokens, chosen, top, top_ids),
        lambda x: torch.log_softmax(x.float(), -1).topk(5),
        None,
    )
    for name, (ours, torch_, flashinfer) in actions.items():
        columns = [microseconds(ours, sets)]
        for peer in (torch_, flashinfer):
            try:
                columns.append(float("nan") if quick or peer is None else microseconds(peer, sets[:4], 5))
            except Exception as error:  # a peer that cannot be captured or built
                print(f"# {name}: {type(error).__name__}: {str(error)[:100]}")
                columns.append(float("nan"))
        figures = " ".join(f"{us:10.1f}" for us in [*columns, size / BYTES_PER_MICROSECOND])
        print(f"{n:4} {spread:6} {name:24} {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--spread", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--quick", action="store_true", help="do not measure the peers")
    args = parser.parse_args()
    print(f"rows spread case {'dovetail':>25} {'torch':>10} {'flashinfer':>10} {'floor':>10}")
    for n in args.rows:
        for spread in args.spread:
            run(n, args.vocab, getattr(torch, args.dtype), spread, args.quick)


if __name__ == "__main__":
    main()
