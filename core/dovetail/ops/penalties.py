"""Apply repetition, presence and frequency penalties to rows of logits, and count the tokens on which they depend. Each
takes one kernel on CUDA, and torch elsewhere.

A table of counts is int32 ``[slots, V]``. An entry is twice the number of times that the token is in the output of the
slot's request, plus 1 if the token is in its prompt. Settings are float32 ``[n, 3]``: repetition, presence and
frequency penalty of each row. The values that switch them off are 1, 0 and 0.
"""

from __future__ import annotations

import torch

IN_PROMPT = 1
IN_OUTPUT = 2
"""What one occurrence of a token adds to its entry in a table of counts."""


def apply_penalties(
    logits: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, settings: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Write ``logits [n, V]`` with the penalties applied to ``out`` (float32 ``[n, V]``), and return ``out``, which may
    be ``logits`` itself. Computes in float32.

    ``slots`` int64 ``[n]`` are the rows of the table. Tokens of the prompt or of the output are first divided by the
    repetition penalty if their logit is positive and multiplied by it if not (Keskar et al. 2019, arXiv 1909.05858).
    Logits of the output's tokens are then reduced by the presence penalty once and by the frequency penalty for every
    occurrence. In rows whose penalties are off, the table is not read.
    """
    if logits.device.type == "cuda":
        from dovetail.ops.triton.penalties import apply_penalties as kernel

        return kernel(logits, table, slots, settings, out)
    if out is not logits:
        out.copy_(logits)
    active = (settings != torch.tensor([1.0, 0.0, 0.0])).any(1).nonzero()[:, 0]
    words = table[slots[active]]
    at, tokens = words.nonzero(as_tuple=True)
    rows = active[at]
    out[rows, tokens] = penalised(out[rows, tokens], words[at, tokens], settings[rows])
    return out


def penalised(logits: torch.Tensor, words: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Return float32 ``logits`` of single tokens with the penalties applied. ``words`` (int32) are the tokens' entries in
    the table. ``settings [..., 3]`` must broadcast to the shape of ``logits``, without its last dimension."""
    repetition, presence, frequency = settings.unbind(-1)
    counts = (words >> 1).float()
    x = torch.where(words != 0, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return x - ((counts > 0) * presence + counts * frequency)


def count_tokens(table: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, amounts: torch.Tensor) -> None:
    """Add ``amounts`` (int32 ``[n]``, or ``[1]`` for all) to the table's entries of ``tokens`` (int64 ``[n]``) in
    ``slots`` (int64 ``[n]``). An entry may occur several times."""
    if table.device.type == "cuda":
        from dovetail.ops.triton.penalties import count_tokens as kernel

        kernel(table, slots, tokens, amounts)
    else:
        table.view(-1).index_add_(0, slots * table.shape[1] + tokens, amounts.expand(len(tokens)))
