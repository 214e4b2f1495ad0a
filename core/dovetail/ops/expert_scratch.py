"""Hold memory for the weights of experts that are dequantized in each step."""

from __future__ import annotations

import math

import torch


class ExpertScratch:
    """Hold memory for one dequantized weight of the layers of experts of one model, which are computed one after the other.

    Layers of one size share memory. It is allocated when the first of them uses it, and stays allocated, because captured graphs may
    read it. Two engines must not share an instance: each launches kernels in a thread of its own, so that a weight of one could be
    overwritten by the other before it is multiplied.
    """

    def __init__(self) -> None:
        self._memory = dict[int, torch.Tensor]()

    def take(self, numel: int, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of ``shape`` with the dtype, of 16 bits, and on the device of ``like``. It is undefined, and valid until the
        next call. ``numel`` is the number of elements of the larger weight of a layer; layers with the same number share memory."""
        found = self._memory.get(numel)
        if found is None:
            found = self._memory[numel] = torch.empty(numel, dtype=torch.int16, device=like.device)
        return found[: math.prod(shape)].view(like.dtype).view(shape)
