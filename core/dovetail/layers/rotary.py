"""Cosines and sines of the positions of a step, computed once and passed to every layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dovetail.layers.base import Layer
from dovetail.layers.rope import RopeConfig


class Rotation(NamedTuple):
    """Cosines and signed sines of a step's tokens, ``[tokens, 1, head_dim]``, see ``ops.rotary.apply_rotary``."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary(Layer):
    """A table of all positions. One per model; layers get the rows of a step as an argument."""

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self._dtype = torch.get_default_dtype()
        self.register_buffer("table", rotary_table(rope, torch.get_default_device()), persistent=False)
        self._table: torch.Tensor

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        self._table = self.get_buffer("table")
        super().prepare()

    def forward(self, positions: torch.Tensor) -> Rotation:
        """The rotation of int64 ``positions [tokens]``, in the model's dtype."""
        if not self.prepared:
            self.prepare()
        rows = self._table.index_select(0, positions)
        if self._dtype is not torch.float32:
            rows = rows.to(self._dtype)
        cos, sin = rows.split(1, 1)
        return Rotation(cos, sin)


def rotary_table(rope: RopeConfig, device: torch.device) -> torch.Tensor:
    """float32 ``[context_len, 2, head_dim]``: cosines ``[c, c]`` and signed sines ``[-s, s]`` of every position."""
    frequencies = torch.from_numpy(rope.inverse_frequencies()).to(device)
    positions = torch.arange(rope.context_len, device=device, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    table = torch.empty(rope.context_len, 2, rope.head_dim, device=device, dtype=torch.float32)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    half = rope.head_dim // 2
    table[:, 0, :half] = table[:, 0, half:] = cos
    table[:, 1, :half], table[:, 1, half:] = -sin, sin
    return table
