"""Hold what is known of a model of transformers before it is built. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """Describe one attention layer, as the model's own code calls it. ``module`` is the name of the module that calls
    transformers' attention interface. ``head_dim`` is the size of queries and keys, ``value_dim`` that of values. For the
    other fields see ``AttentionLayer``; ``sinks`` is the name of the parameter that contains them."""

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: str | None = None

    @property
    def pool_dim(self) -> int:
        """Return the size of the vectors in the KV pool: keys and values are filled up with zeros to the same size."""
        return max(self.head_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class TransformersSizes:
    """Hold what ``TransformersModel`` needs in addition to ``ModelInfo``. ``config`` is config.json, ``attention`` has an
    entry for each layer, in the order of the forward pass, and ``plan`` the parallel style of each linear layer that
    ranks divide."""

    config: Mapping[str, Any] = field(repr=False)
    attention: tuple[AttentionFacts, ...]
    plan: Mapping[str, str]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each attention layer."""
        return tuple(layer.window for layer in self.attention)
