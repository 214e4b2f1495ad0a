"""Launch kernels, with programmatic dependent launch where the device supports it.

Programmatic dependent launch (compute capability 9.0 and later): a kernel may start while the previous kernel still
runs, and may fetch data that the previous kernel does not write, such as weights. It must execute ``gdc_wait`` before
it reads or writes anything else (except as described under leaders, below). Every kernel here does so in every program,
so that the end of a kernel still means the end of all kernels before it. One kernel waits inside a loop whose first
loads of weights Triton's pipeline moves before the loop (``matmul._few_rows``); ``tests/core/test_early_loads.py``
checks the compiler's output for that. ``gdc_launch_dependents`` allows the next kernel to start; kernels that are
launched without this feature are not affected. The kernel directly before a kernel that reads a weight early must not
write that weight. This saves about a microsecond per kernel; ``benchmarks/ops_gpu.py`` contains the gain per step.

Some data (page tables, schedules of attention) is written before a *leader* kernel and not written after it. Every
kernel after that leader may read such data before its ``gdc_wait``. A leader executes ``gdc_wait`` before
``gdc_launch_dependents``, in every program: a kernel that starts after the leader therefore starts when all kernels
before the leader have ended. These early reads bypass the L1 cache (``.cg``), which may hold older content. The
attention kernel of the first layer of each window is a leader; steps of few rows with one token each also read lengths,
places and the keys of earlier steps early (``decode_projected``). So is the kernel of gate and up of one token (``experts_one``): the kernel after it
reads early which experts were chosen.

Triton compiles a kernel anew if a pointer is not a multiple of 16, unless the kernel names the argument in
``do_not_specialize_on_alignment``. Kernels name the arguments from which a program reads single numbers, such as
positions: they are often views of a packed copy, whose addresses vary.

``launch`` finds a kernel that was launched before by what Triton's binder makes of its arguments, and launches it in two
thirds of the time of ``JITFunction.run`` (``benchmarks/launch_cost_gpu.py``, docs/benchmarks.md). It does not check whether global
constants or Triton's settings (``knobs``), other than hooks of launches, have changed since the first launch.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from dovetail.ops.triton.cache_keys import hash_callees_first

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

hash_callees_first()

_RUN = JITFunction.run
_ENTER, _EXIT = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
_COMPILED: dict[tuple[Any, ...], tuple[Any, Any]] = {}
"""The kernels that were launched: each with the function that it was compiled from, so that the id in its key stays valid."""


@triton.jit
def prefetch(address) -> None:
    """Prefetch the cache lines at ``address``, a tensor of pointers, to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device, or a number of similar size if kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    as_written: bool = False,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """Run ``kernel`` over ``grid`` with its arguments and constants. The kernel has one more constant, ``PDL``. With
    ``as_written``, the compiler does not fuse a multiplication and an addition into one operation. Whether it fuses
    them otherwise depends on which operations it finds next to each other. With ``registers``, a thread has at most that number of
    registers, so that more programs share a multiprocessor.
    """
    options = _options(num_warps, num_stages, as_written, registers)
    # Triton itself runs kernels while launches are replaced (``ahead``) or observed by hooks, such as those of its profiler
    if INTERPRETED or JITFunction.run is not _RUN or _ENTER.calls or _EXIT.calls:
        kernel[grid](*args, **constants, **options)
        return
    device = torch.cuda.current_device()
    bound, specialization, _ = kernel.device_caches[device][-1](*args, **constants, **options)
    key = id(kernel), device, num_warps, num_stages, as_written, registers, *specialization
    found = _COMPILED.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants, **options)
        if compiled is not None:
            _COMPILED[key] = kernel, compiled
        return
    compiled = found[1]
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    nothing = None, None, None  # the metadata for hooks, and the hooks
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, *nothing, *bound.values())


@functools.cache
def _options(num_warps: int, num_stages: int, as_written: bool, registers: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"PDL": False, "num_warps": num_warps, "num_stages": num_stages}
    if not INTERPRETED:
        if torch.cuda.get_device_capability()[0] >= 9:
            found.update(PDL=True, launch_pdl=True)
        if as_written:
            found.update(enable_fp_fusion=False)
        if registers is not None:
            found.update(maxnreg=registers)
    return found
