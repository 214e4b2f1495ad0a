"""Apply the grammar bitmasks of a step to its logits, and provide the memory in which they are filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.engine.captures import TURNS
from dovetail.ops.bitmask import apply_bitmask
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from dovetail.types import IntArray, Masks


class MaskBuffers:
    """Hold memory for the bitmasks of a step. On CUDA it is pinned, so that the device reads directly what matchers
    write, and it is reused, because pinning takes longer than filling. There are several buffers, which are used in
    turns, because under overlap two steps are in flight."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turns: list[torch.Tensor] = []
        self._next = 0

    def take(self, rows: int, width: int) -> IntArray:
        """Return an uninitialised int32 array ``[rows, width]``. The next ``TURNS - 1`` calls return other memory."""
        if self._device.type != "cuda":
            return torch.empty(rows, width, dtype=torch.int32).numpy()
        if not self._turns or self._turns[0].numel() < rows * width:
            size = (1 << (rows - 1).bit_length()) * width
            self._turns = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(TURNS)]
        self._next = (self._next + 1) % TURNS
        return self._turns[self._next][: rows * width].view(rows, width).numpy()


def mask_logits(logits: torch.Tensor, masks: Masks) -> None:
    """Mask the tokens that the grammars forbid, in place. The memory of ``masks`` must not change before the device has
    read it."""
    device = logits.device
    bits = torch.from_numpy(masks.bits).to(device, non_blocking=True)
    apply_bitmask(logits, bits, to_device(masks.logit_rows, device))
