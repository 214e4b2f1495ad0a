"""Define what layers with a state pass to the operations that compute them: sizes and tensors of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dovetail.interfaces.features import Feature

if TYPE_CHECKING:
    import torch

CONV_NEEDS = frozenset({Feature.MIXER_SHORT_CONV})
"""What models with short convolutions need of a backend of layers with a state."""
DELTA_NEEDS = CONV_NEEDS | {Feature.MIXER_GATED_DELTA}
"""What models with gated delta nets need."""
KDA_NEEDS = CONV_NEEDS | {Feature.MIXER_KDA}
"""What models with Kimi delta attention need."""
SSD_NEEDS = CONV_NEEDS | {Feature.MIXER_SSD}
"""What models with Mamba-2 mixers need."""
SCAN_NEEDS = CONV_NEEDS | {Feature.MIXER_SELECTIVE_SCAN}
"""What models with Mamba mixers need."""


class StateShape(NamedTuple):
    """Describe a state of one request: its shape, and the name of its dtype, or None for the model's dtype.

    ``parts`` say how ranks divide the first dimension: it consists of parts, each of which is a number of equal things,
    such as heads, and the size of one of them. Ranks divide the number; if there are more ranks than things, several ranks
    keep the same thing. Without parts, every rank keeps the whole state.
    """

    shape: tuple[int, ...]
    dtype: str | None = None
    parts: tuple[tuple[int, int], ...] = ()

    def share(self, ranks: int) -> StateShape:
        """Return the shape of the state that one of ``ranks`` ranks keeps."""
        if not self.parts:
            return self
        parts = tuple((max(number // ranks, 1), size) for number, size in self.parts)
        return StateShape((sum(number * size for number, size in parts), *self.shape[1:]), self.dtype, parts)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Describe the heads of a layer. Value heads ``[i * n, (i + 1) * n)`` use key head i, where n is ``value_heads //
    key_heads``."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Return the size of a token's queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> tuple[int, int, int]:
        """Return the shape of a state."""
        return self.value_heads, self.key_dim, self.value_dim


class DeltaGates(NamedTuple):
    """Hold what decays and strengths are computed from. ``rate`` and ``bias`` are float32; ``a`` and ``b`` are contiguous
    except in the token dimension. With a decay for each key channel, ``a`` and ``bias`` have a last dimension
    ``key_dim``."""

    a: torch.Tensor  # [tokens, value_heads] or [tokens, value_heads, key_dim]
    b: torch.Tensor  # [tokens, value_heads]
    rate: torch.Tensor  # [value_heads]
    bias: torch.Tensor  # [value_heads] or [value_heads, key_dim]

    @property
    def by_channel(self) -> bool:
        """Return True if there is a decay for each key channel."""
        return self.a.ndim == 3
