"""Compute attention in float32, one row and one query at a time, as the reference of model tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.attention import AttentionBackend, AttentionLayer

if TYPE_CHECKING:
    from dovetail.interfaces.store import KVStore
    from dovetail.types import Batch


class EagerAttention(AttentionBackend):
    """Attend over one pool, with windows, soft caps, sinks and grouped heads, but without tree mask."""

    def __init__(self, pool: KVStore) -> None:
        self._pool = pool

    def plan(self, batch: Batch) -> None:
        """Do nothing: ``forward`` reads everything from the batch."""

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        assert batch.tree_mask is None
        size = self._pool.keys(layer.layer_id).shape[-1]
        if q.ndim != 3 or len(q) != len(batch.positions) or q.shape[2] != size:
            raise ValueError(
                f"q is {list(q.shape)}; expected [tokens, heads, head_dim]: [{len(batch.positions)}, heads, {size}]"
            )
        out = q.new_empty(*q.shape[:2], self._pool.values(layer.layer_id).shape[-1])
        starts = batch.qo_indptr.tolist()
        for row, kv_len in enumerate(batch.kv_lens.tolist()):
            pages = batch.page_table[row].long()
            tensors = self._pool.tensors(layer.layer_id)
            k, v = (memory[pages].flatten(0, 1)[:kv_len].float() for memory in tensors[:2])
            if tensors.scales is not None:
                scales = (own[pages].flatten(0, 1)[:kv_len].float()[..., None] for own in tensors.scales)
                k, v = (x * own for x, own in zip((k, v), scales, strict=True))
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            for token in range(starts[row], starts[row + 1]):
                end = int(batch.positions[token]) + 1
                first = 0 if layer.window is None else max(0, end - layer.window)
                scores = torch.einsum("hd,khd->hk", q[token].float(), k[first:end]) * layer.scale
                if layer.soft_cap is not None:
                    scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
                if layer.sinks is not None:  # one more key, which has no value
                    scores = torch.cat([scores, layer.sinks.float()[:, None]], 1)
                probs = scores.softmax(-1)[:, : end - first]
                out[token] = torch.einsum("hk,khd->hd", probs, v[first:end]).to(q.dtype)
        return out
