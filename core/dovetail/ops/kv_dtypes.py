"""Convert numbers to the dtype of a KV pool, and describe the scales of pools that have some (``ops.kv_scales``)."""

from __future__ import annotations

from typing import NamedTuple

import torch

LEAST_SCALE = 2.0**-120
"""Computed scales are not smaller, so that zeros have a scale too."""


class KVScaleRows(NamedTuple):
    """Hold the scales of the keys and values of a layer: bfloat16 ``[locations, kv_heads]`` each, to be computed, or float32
    ``[kv_heads]`` each, which are fixed."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def computed(self) -> bool:
        """Return True if each token has its own scales."""
        return self.keys.ndim == 2


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
