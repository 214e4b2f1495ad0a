"""A kernel that writes where nothing is."""

import torch
import triton
import triton.language as tl


@triton.jit
def _write(pointer, distance):
    tl.store(pointer + distance, 1.0)


def write_far(device: torch.device) -> None:
    """Launch it; returns before it has failed."""
    _write[(1,)](torch.zeros(1, device=device), 1 << 42)
