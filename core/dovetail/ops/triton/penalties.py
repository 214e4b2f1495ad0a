"""Apply penalties in one pass over the logits, and count the tokens on which they depend."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv

BLOCK = 2048
COUNT_BLOCK = 128


@triton.jit(do_not_specialize_on_alignment=["slots", "settings"])
def _penalties_kernel(
    logits,
    row_stride,
    vocab,
    table,
    slots,
    settings,
    out,
    out_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    repetition = tl.load(settings + n * 3)
    presence = tl.load(settings + n * 3 + 1)
    frequency = tl.load(settings + n * 3 + 2)
    x = tl.load(logits + n * row_stride + token, mask=inside, other=0.0).to(tl.float32)
    if (repetition != 1) | (presence != 0) | (frequency != 0):
        slot = tl.load(slots + n)
        word = tl.load(table + slot * vocab + token, mask=inside, other=0)
        count = (word >> 1).to(tl.float32)
        x = tl.where(word != 0, tl.where(x > 0, x / repetition, x * repetition), x)
        x -= tl.where(count > 0, presence, 0.0) + count * frequency
    tl.store(out + n * out_stride + token, x, mask=inside)


def apply_penalties(
    logits: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, settings: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Compute ``dovetail.ops.penalties.apply_penalties``."""
    n, vocab = logits.shape
    if n:
        assert logits.stride(1) == out.stride(1) == 1, "rows must be contiguous"
        assert table.is_contiguous()
        assert slots.is_contiguous()
        assert table.shape[1] == vocab, "a table of counts has an entry for each logit"
        grid, row, to = (cdiv(vocab, BLOCK), n), (logits, logits.stride(0), vocab), (out, out.stride(0))
        launch(_penalties_kernel, grid, *row, table, slots, settings.contiguous(), *to, BLOCK=BLOCK)
    return out


@triton.jit
def _count_kernel(
    table,
    vocab,
    slots,
    tokens,
    amounts,
    amount_stride,
    n,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    slot = tl.load(slots + at, mask=inside, other=0)
    token = tl.load(tokens + at, mask=inside, other=0)
    amount = tl.load(amounts + at * amount_stride, mask=inside, other=0)
    tl.atomic_add(table + slot * vocab + token, amount, mask=inside)


def count_tokens(table: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, amounts: torch.Tensor) -> None:
    """Compute ``dovetail.ops.penalties.count_tokens``."""
    n, stride = len(tokens), 0 if len(amounts) == 1 else 1
    if n:
        assert table.is_contiguous()
        assert slots.is_contiguous()
        assert tokens.is_contiguous()
        grid, width = (cdiv(n, COUNT_BLOCK),), table.shape[1]
        launch(_count_kernel, grid, table, width, slots, tokens, amounts, stride, n, BLOCK=COUNT_BLOCK)
