"""Apply penalties in one pass over the logits. Blocks in which no token has occurred are not written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch

BLOCK = 2048


@triton.jit
def _penalties_kernel(
    logits,
    row_stride,
    vocab,
    in_prompt,
    prompt_stride,
    counts,
    counts_stride,
    repetition,
    presence,
    frequency,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    count = tl.load(counts + n * counts_stride + token, mask=inside, other=0.0)
    seen = (tl.load(in_prompt + n * prompt_stride + token, mask=inside, other=0) != 0) | (count > 0)
    if tl.max(seen.to(tl.int32), axis=0) > 0:
        factor = tl.load(repetition + n)
        here = logits + n * row_stride + token
        x = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(seen, tl.where(x > 0, x / factor, x * factor), x)
        x -= tl.where(count > 0, tl.load(presence + n), 0.0) + count * tl.load(frequency + n)
        tl.store(here, x.to(logits.dtype.element_ty), mask=inside & seen)


def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Compute ``dovetail.ops.penalties.apply_penalties``."""
    assert logits.stride(1) == in_prompt.stride(1) == counts.stride(1) == 1, "rows must be contiguous"
    n, vocab = logits.shape
    if n:
        launch(
            _penalties_kernel,
            (triton.cdiv(vocab, BLOCK), n),
            logits,
            logits.stride(0),
            vocab,
            in_prompt,
            in_prompt.stride(0),
            counts,
            counts.stride(0),
            repetition,
            presence,
            frequency,
            BLOCK=BLOCK,
        )
