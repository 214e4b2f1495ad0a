"""Test that kernels which were launched before are found again, with the constants, alignments and options of the launch.

Run on a GPU machine: python -m pytest tests/gpu/test_launch_gpu.py
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from dovetail.ops.triton import launch as module
from dovetail.ops.triton.launch import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@triton.jit
def _add(x, out, size, number: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < size, 0) + number, at < size)


def add(x: torch.Tensor, number: float, warps: int = 4) -> torch.Tensor:
    out = torch.zeros_like(x)
    grid = (triton.cdiv(len(x), 128),)
    launch(_add, grid, x, out, len(x), number=number, BLOCK=128, num_warps=warps)
    return out


def test_each_launch_has_the_kernel_of_its_arguments():
    for _ in range(3):
        for dtype in (torch.float32, torch.float16, torch.int32):
            for size in (1, 16, 128, 1000):
                memory = torch.arange(size + 3, device="cuda").to(dtype)
                for offset in (0, 1, 3):  # aligned, and not
                    for number in (1, 2):
                        x = memory[offset : offset + size]
                        torch.testing.assert_close(add(x, number), x + number)


def test_launches_with_other_options_have_kernels_of_their_own():
    before = len(module._COMPILED)
    x = torch.randn(64, device="cuda")
    for warps in (1, 2, 4, 2, 1):
        torch.testing.assert_close(add(x, 7, warps), x + 7)
    assert len(module._COMPILED) == before + 3


def test_launches_run_on_the_current_stream_and_are_captured():
    x, out = torch.zeros(256, device="cuda"), torch.zeros(256, device="cuda")
    sizes = {"number": 5, "BLOCK": 128}
    launch(_add, (2,), x, out, 256, **sizes)
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(_add, (2,), x, out, 256, **sizes)
    x.fill_(1)
    torch.cuda.synchronize()
    assert out.sum() == 0, "nothing runs during a capture"
    graph.replay()
    torch.testing.assert_close(out, x + 5)


def test_hooks_of_a_profiler_see_each_launch():
    x, seen = torch.zeros(64, device="cuda"), []
    add(x, 3)
    hook = seen.append
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        add(x, 3)
        add(x, 3)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    add(x, 3)
    assert [found.get()["name"] for found in seen] == ["_add", "_add"]
