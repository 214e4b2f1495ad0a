"""Model architectures: what a checkpoint needs from the rest of the house, and its forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.cache import CacheGroup
    from dovetail.interfaces.features import Feature
    from dovetail.types import Batch


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model from its config.json alone: no torch, no weights.

    Returned by the ``describe`` function that a model's ComponentSpec names. ``config`` is the architecture's own typed
    config, handed to its constructor.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    cache_groups: tuple[CacheGroup, ...]
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"  # the dtype of the checkpoint
    needs: frozenset[Feature] = frozenset()
    offers: frozenset[Feature] = frozenset()
    config: Any = field(default=None, repr=False)


class WeightTarget(NamedTuple):
    """Where a checkpoint tensor goes: rows ``[start, start + size)`` of dimension 0 of a parameter (all if None)."""

    parameter: str
    start: int | None = None
    size: int | None = None


class ModelArchitecture(ABC):
    """A model, built from ``dovetail.layers``; concrete classes are also ``torch.nn.Module``.

    Built with ``cls(info)`` under the target device and dtype as torch's defaults, then filled by the weight loader.
    """

    info: ModelInfo

    @abstractmethod
    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states ``[tokens, hidden_size]`` after the final norm, of ``batch.input_ids`` at ``batch.positions``.
        Writes K and V of the step through ``batch.kv`` and attends through ``batch.attn``.

        Where ``batch.last`` is set, nobody reads more than the tokens ``batch.logit_rows``, and the hidden states of these
        are returned alone, ``[rows of batch.last, hidden_size]``: the last layer writes K and V of all tokens, then goes on
        with these as queries and attends through ``batch.last.attn``, unless there are none. Only models that offer
        ``model.last_rows`` get it.

        Where ``batch.watch`` names layers, ``batch.hidden`` is set to their hidden states side by side, ``[tokens, len(watch)
        * hidden_size]``: the residual stream that enters layer i, for ``num_layers`` what this method returns, and for ``num_layers
        + 1`` the same before the final norm. Only models that offer ``model.hidden_states`` are asked, and then ``batch.last`` is
        None if one of these two is among them."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, vocab_size]`` of hidden states ``[n, hidden_size]``, in the model's dtype."""

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[tokens, hidden_size]`` of int64 ``[tokens]``, a new tensor. Needs ``model.hidden_states``."""
        raise NotImplementedError(f"{type(self).__name__} does not offer model.hidden_states")

    @abstractmethod
    def weights_map(self) -> Mapping[str, WeightTarget]:
        """Every tensor name of the checkpoint and where it goes. The loader refuses a checkpoint with a name that is not
        here, unless ``ignored_weights`` matches it, and one that leaves a parameter unfilled."""

    def ignored_weights(self) -> Iterable[str]:
        """Regular expressions of checkpoint names that carry nothing this model needs (buffers, tied copies)."""
        return ()
