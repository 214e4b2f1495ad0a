"""Apply the grammar bitmasks of a step to its logits, and provide the memory in which they are filled."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from dovetail.engine.captures import TURNS
from dovetail.errors import EngineError
from dovetail.ops.bitmask import apply_bitmask
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    import numpy as np

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


class PinnedMappings:
    """Pin memory that another process writes too, so that the device copies from it directly. Does nothing unless
    ``device`` is a CUDA device.

    Copies from memory that is not pinned go through a buffer of the driver, and the host waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mappings: list[torch.Tensor] = []  # a mapping must exist as long as it is pinned

    def add(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Pin ``memory`` (uint8 ``[bytes]``, whole pages) until ``close``. Raises ``EngineError``."""
        if self._device.type != "cuda":
            return
        mapping = torch.from_numpy(memory)
        with torch.cuda.device(self._device):
            _check(_runtime().cudaHostRegister(mapping.data_ptr(), mapping.nbytes, 0), "pin", mapping)
        self._mappings.append(mapping)

    def close(self) -> None:
        """Wait for the device, which may still read, and end the pinning. Raises ``EngineError``."""
        if not self._mappings:
            return
        torch.cuda.synchronize(self._device)
        while self._mappings:
            mapping = self._mappings.pop()
            _check(_runtime().cudaHostUnregister(mapping.data_ptr()), "unpin", mapping)


def _runtime() -> Any:
    return torch.cuda.cudart()


def _check(status: Any, verb: str, mapping: torch.Tensor) -> None:
    if int(status):
        reason = torch.cuda.CudaError(int(status))
        with suppress(RuntimeError):  # CUDA reports the error again at the next launch, which shall be this one
            torch.zeros(1, device="cuda")
        raise EngineError(f"cannot {verb} {mapping.nbytes} bytes of shared memory for grammar bitmasks: {reason}")


def mask_logits(logits: torch.Tensor, masks: Masks) -> None:
    """Mask the tokens that the grammars forbid, in place. The memory of ``masks`` must not change before the device has
    read it."""
    device = logits.device
    bits = torch.from_numpy(masks.bits).to(device, non_blocking=True)
    apply_bitmask(logits, bits, to_device(masks.logit_rows, device))
