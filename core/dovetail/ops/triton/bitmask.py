"""Packed grammar masks, applied to the constrained rows alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _bitmask_kernel(logits, row_stride, vocab, bitmask, mask_stride, rows, BLOCK: tl.constexpr):
    index = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask + index * mask_stride + token // 32, mask=token < vocab, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    row = tl.load(rows + index).to(tl.int64)
    tl.store(logits + row * row_stride + token, float("-inf"), mask=forbidden & (token < vocab))


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """``dovetail.ops.bitmask.apply_bitmask``; only forbidden logits are written, none is read."""
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    assert bitmask.stride(1) == 1, "a row of the bitmask must be contiguous"
    if len(rows):
        vocab = logits.shape[1]
        grid = (triton.cdiv(vocab, BLOCK), len(rows))
        _bitmask_kernel[grid](
            logits, logits.stride(0), vocab, bitmask, bitmask.stride(0), rows, BLOCK=BLOCK, num_warps=4
        )
