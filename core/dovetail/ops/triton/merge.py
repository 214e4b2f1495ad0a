"""Merge attention over two sets of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.ops.triton.sizes import cdiv, next_power_of_2


@triton.jit
def _weight(lse):
    return tl.where((lse > float("-inf")) & (lse < float("inf")), lse, float("-inf"))


@triton.jit
def _merge(
    out_a, lse_a, out_b, lse_b, out, heads, size, tokens, a_token, a_head, b_token, b_head, la_head, lb_head,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    at = tl.arange(0, BLOCK)
    real = head < heads
    inside = real[:, None] & (at < size)[None, :]
    la = _weight(tl.load(lse_a + head * la_head + token, real, float("-inf")))
    lb = _weight(tl.load(lse_b + head * lb_head + token, real, float("-inf")))
    top = tl.maximum(tl.maximum(la, lb), -1e30)  # finite even if neither set has a key
    wa, wb = tl.exp(la - top), tl.exp(lb - top)
    total = tl.maximum(wa + wb, 1e-30)
    a = tl.load(out_a + token * a_token + head[:, None] * a_head + at[None, :], inside & (wa > 0)[:, None], 0.0)
    b = tl.load(out_b + token * b_token + head[:, None] * b_head + at[None, :], inside & (wb > 0)[:, None], 0.0)
    merged = (a.to(tl.float32) * wa[:, None] + b.to(tl.float32) * wb[:, None]) / total[:, None]
    tl.store(out + (token * heads + head[:, None]) * size + at[None, :], merged.to(out.dtype.element_ty), inside)


def merge_states(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Compute ``ops.merge.merge_states``. The last dimension of each argument is contiguous."""
    tokens, heads, size = out_b.shape
    out = torch.empty(tokens, heads, size, dtype=out_b.dtype, device=out_b.device)
    block = next_power_of_2(size)
    block_heads = min(next_power_of_2(heads), max(1, 2048 // block))
    _merge[(tokens, cdiv(heads, block_heads))](
        out_a, lse_a, out_b, lse_b, out, heads, size, tokens, out_a.stride(0), out_a.stride(1), out_b.stride(0),
        out_b.stride(1), lse_a.stride(0), lse_b.stride(0), BLOCK_HEADS=block_heads, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
