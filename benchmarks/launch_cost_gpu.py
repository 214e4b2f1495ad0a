"""Measure the host time of one launch of a Triton kernel, through ``launch`` and through Triton alone, in turns.

    python benchmarks/launch_cost_gpu.py

The kernel is the norm of a row of 64 numbers, which the device computes faster than the host launches it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from dovetail.ops.norm import rms_norm
from dovetail.ops.triton import launch

LAUNCHES = 200
ROUNDS = 40


def microseconds(run: Callable[[], object]) -> float:
    """Return the host time of one call of ``run`` among ``LAUNCHES``, which the device can queue."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        run()
    return (time.perf_counter() - start) / LAUNCHES * 1e6


def main() -> None:
    """Print the medians."""
    x = torch.randn(1, 64, dtype=torch.bfloat16, device="cuda")
    weight, out = torch.randn(64, dtype=torch.bfloat16, device="cuda"), torch.empty_like(x)
    runs: dict[str, Callable[[], object]] = {
        "tensor of the result": lambda: torch.empty_like(x),
        "copy of torch": lambda: out.copy_(x),
        "norm": lambda: rms_norm(x, weight, 1e-6),
    }
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            found.setdefault(name, []).append(microseconds(run))
        known, launch._RUN = launch._RUN, None  # has ``launch`` leave the launch to Triton
        try:
            found.setdefault("norm, launched by Triton", []).append(microseconds(runs["norm"]))
        finally:
            launch._RUN = known
    table = Table("host time of", "us")
    for name, times in found.items():
        table.add_row(name, f"{statistics.median(times):.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
