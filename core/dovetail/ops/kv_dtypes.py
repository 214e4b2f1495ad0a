"""Convert numbers to the dtype of a KV pool."""

from __future__ import annotations

import torch


def limit(dtype: torch.dtype) -> float | None:
    """Return the magnitude at which numbers saturate when they are written to a pool of ``dtype``, or None if they do
    not saturate."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else None


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` as a pool of ``dtype`` stores it: rounded once; with 8 bits, numbers that are too large become the
    largest number."""
    largest = limit(dtype)
    return x.to(dtype) if largest is None else x.clamp(-largest, largest).to(dtype)


def raw(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory in a dtype that torch can copy and fill on every device: 8-bit floats as bytes, other
    dtypes unchanged."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
