"""Apply repetition, presence and frequency penalties to rows of logits, with one kernel on CUDA and with torch
elsewhere."""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Penalise the tokens of ``logits [n, V]`` that have occurred. Mutates ``logits``, which may have any float dtype;
    computes in float32.

    Tokens of the prompt (``in_prompt`` bool ``[n, V]``) or of the output (``counts`` float32 ``[n, V]``, the number of
    occurrences) are first divided by ``repetition`` if positive and multiplied by it if not (Keskar et al. 2019, arXiv
    1909.05858). Logits of the output's tokens are then reduced by ``presence`` once and by ``frequency`` for every
    occurrence. The settings are float32 ``[n]``; the values that switch them off are 1, 0 and 0.
    """
    if logits.device.type == "cuda":
        from dovetail.ops.triton.penalties import apply_penalties as kernel

        return kernel(logits, in_prompt, counts, repetition, presence, frequency)
    x = logits.float()
    factor = repetition[:, None]
    x = torch.where(in_prompt | (counts > 0), torch.where(x > 0, x / factor, x * factor), x)
    x = x - (counts > 0) * presence[:, None] - counts * frequency[:, None]
    logits.copy_(x)
