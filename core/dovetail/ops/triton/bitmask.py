"""Apply packed grammar bitmasks to the constrained rows only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv

WORDS = 64  # words of the bitmask per program


@triton.jit
def _bitmask_kernel(logits, row_stride, vocab, bitmask, mask_stride, rows, WORDS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)[None, :]
    word = tl.load(bitmask + index * mask_stride + at, mask=at * 32 < vocab, other=-1)[:, None]
    token = at[:, None] * 32 + bit
    inside = token < vocab
    here = logits + tl.load(rows + index).to(tl.int64) * row_stride + token
    x = tl.load(here, mask=inside & (word != 0), other=float("-inf"))  # words that forbid all tokens are not read
    x = tl.where(((word >> bit) & 1) != 0, x, float("-inf"))
    tl.store(here, x, mask=inside & (word != -1))  # words that allow all tokens are not written


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Compute ``dovetail.ops.bitmask.apply_bitmask``."""
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    assert bitmask.stride(1) == 1, "a row of the bitmask must be contiguous"
    if len(rows):
        vocab = logits.shape[1]
        sizes = (logits, logits.stride(0), vocab, bitmask, bitmask.stride(0), rows)
        launch(_bitmask_kernel, (cdiv(vocab, WORDS * 32), len(rows)), *sizes, WORDS=WORDS)
