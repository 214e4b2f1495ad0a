"""Define what attention backends that offer ``attention.expanded`` implement besides ``AttentionBackend``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.attention import AttentionLayer
    from dovetail.types import Batch


class ExpandedAttention(Protocol):
    """Attend from prompts over keys and values that the latents of their rows (MLA) were expanded to."""

    def plan_expanded(self, batch: Batch, kv_indptr: torch.Tensor) -> None:
        """Prepare a step for ``forward_expanded``. All rows of ``batch`` are extend rows.

        Row r has the keys ``[kv_indptr[r], kv_indptr[r + 1])`` (int32 ``[rows + 1]``, on the device) of those that
        ``forward_expanded`` gets: ``kv_lens[r]`` keys, of which the last ``extend_lens[r]`` belong to its queries. The engine
        calls this in place of ``AttentionBackend.plan``, for models with latent attention. It may plan another backend of
        this class between this call and ``forward_expanded``.
        """
        ...

    def forward_expanded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: Batch
    ) -> torch.Tensor:
        """Return the causal attention of ``q [tokens, num_heads, d]`` over ``k [keys, num_heads, d]`` and ``v [keys,
        num_heads, size of values]``, which are not in the pool: ``[tokens, num_heads, size of values]``, contiguous. Values are
        not wider than keys.

        The model calls this once per layer, with the batch that was given to ``plan_expanded``. ``layer`` has neither a
        window nor a soft cap nor sinks. ``k`` and ``v`` are contiguous except in the first two dimensions. Mutates nothing.
        """
        ...
