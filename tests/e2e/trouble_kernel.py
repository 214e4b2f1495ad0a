"""Define a kernel that writes to an address without memory."""

import torch
import triton
import triton.language as tl


@triton.jit
def _write(pointer, distance):
    tl.store(pointer + distance, 1.0)


def write_far(device: torch.device) -> None:
    """Launch the kernel; return before it has failed."""
    _write[(1,)](torch.zeros(1, device=device), 1 << 42)
