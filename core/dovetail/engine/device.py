"""What an error says of the device."""

from __future__ import annotations

import torch


def lost_device(error: BaseException) -> bool:
    """True if the device cannot be used any more after ``error``: the process must end."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) and not isinstance(error, torch.OutOfMemoryError)
