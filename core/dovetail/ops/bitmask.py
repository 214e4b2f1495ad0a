"""Apply packed grammar bitmasks to logits, with one kernel on CUDA and with torch elsewhere."""

from __future__ import annotations

import torch


def bitmask_width(vocab_size: int) -> int:
    """Return the number of 32-bit words that hold one bit per token."""
    return (vocab_size + 31) // 32


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set ``logits[rows[i], t]`` to -inf where bit t of ``bitmask[i]`` is 0. Mutates ``logits``.

    ``logits`` is ``[n, V]`` of any float dtype, ``bitmask`` int32 ``[m, ceil(V / 32)]`` (bit t % 32 of word t // 32),
    ``rows`` int64 ``[m]``, all different.
    """
    if logits.device.type == "cuda":
        from dovetail.ops.triton.bitmask import apply_bitmask as kernel

        return kernel(logits, bitmask, rows)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bitmask[:, :, None] >> shifts) & 1).view(bitmask.shape[0], -1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(allowed == 0, float("-inf"))
