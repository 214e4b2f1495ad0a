"""How kernels are launched.

Programmatic dependent launch (compute capability 9.0 and later): a kernel may start while the one before it still runs, and
fetch what that one does not write, such as weights. It must execute ``gdc_wait`` before it touches anything else (but see
leaders, below), whether to read or to write, and every kernel here does so in every program, so that the end of a kernel still
means the end of all before it. One waits inside of a loop, whose first loads of weights Triton's pipeline puts before it (``matmul._few_rows``);
``tests/core/test_early_loads.py`` looks at what the compiler makes of that. ``gdc_launch_dependents`` lets the next kernel start;
kernels that are launched without it are not affected. A weight must not be written by the very kernel before one that reads it
ahead. It saves about a microsecond per kernel: ``benchmarks/ops_gpu.py`` holds what a step gains.

What was written before a *leader*, and is not written behind it (page tables, schedules of attention), may be read ahead by every
kernel behind that leader. A leader executes ``gdc_wait`` before ``gdc_launch_dependents``, in every program: what starts behind it
starts when all before it has ended. They read around the L1 cache (``.cg``), which may hold what was there before. Attention of the
first layer of each window leads.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def prefetch(address) -> None:
    """Ask for the lines at ``address``, a tensor of pointers, to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    as_written: bool = False,
    **constants: Any,
) -> None:
    """Run ``kernel`` over ``grid`` with its arguments and constants; it has one more constant, ``PDL``. ``as_written``: no
    multiplication and addition become one, which depends on what the compiler finds next to each other."""
    kernel[grid](*args, **constants, **_options(num_warps, num_stages, as_written))


@functools.cache
def _options(num_warps: int, num_stages: int, as_written: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"PDL": False, "num_warps": num_warps, "num_stages": num_stages}
    if not INTERPRETED:
        if torch.cuda.get_device_capability()[0] >= 9:
            found.update(PDL=True, launch_pdl=True)
        if as_written:
            found.update(enable_fp_fusion=False)
    return found
