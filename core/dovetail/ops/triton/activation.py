"""Compute SwiGLU's gate in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch

BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + token * 2 * width + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + (token * 2 + 1) * width + at, inside, 0.0).to(tl.float32)
    tl.store(out + token * width + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute ``ops.activation.silu_mul``."""
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(width))
        launch(_silu_mul, (tokens, triton.cdiv(width, block)), gate_up, out, width, BLOCK=block, num_warps=4)
    return out
