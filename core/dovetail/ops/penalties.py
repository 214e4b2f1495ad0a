"""Repetition, presence and frequency penalties of rows of logits. One kernel on CUDA, torch elsewhere."""

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
    """Penalise, in place, the tokens of ``logits [n, V]`` (any float dtype; computed in float32) that have occurred.

    Tokens of the prompt (``in_prompt`` bool ``[n, V]``) or the output (``counts`` float32 ``[n, V]``, how often) are first
    divided by ``repetition`` where positive and multiplied by it where not (Keskar et al. 2019, arXiv 1909.05858); those of
    the output then lose ``presence`` once and ``frequency`` for every time. The settings are float32 ``[n]``; off are 1, 0
    and 0.
    """
    if logits.device.type == "cuda":
        from dovetail.ops.triton.penalties import apply_penalties as kernel

        return kernel(logits, in_prompt, counts, repetition, presence, frequency)
    x = logits.float()
    factor = repetition[:, None]
    x = torch.where(in_prompt | (counts > 0), torch.where(x > 0, x / factor, x * factor), x)
    x = x - (counts > 0) * presence[:, None] - counts * frequency[:, None]
    logits.copy_(x)
