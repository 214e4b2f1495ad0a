"""Attend in plain torch, one row at a time."""

from __future__ import annotations

import torch

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.types import Batch
from dovetail_example.config import EagerConfig


class EagerAttention(AttentionBackend):
    """Gather each row's keys and values from its pages, and attend in float32."""

    def __init__(self, config: EagerConfig, context: AttentionContext) -> None:
        self._pool = context.pool
        self._group = context.num_heads // context.num_kv_heads
        self._rows: list[tuple[slice, torch.Tensor, int]] = []

    def plan(self, batch: Batch) -> None:
        """Keep, for each row, its queries, its pages, and the number of keys that they hold."""
        starts = batch.qo_indptr.tolist()
        lens = batch.kv_lens.tolist()
        self._rows = [
            (
                slice(starts[row], starts[row + 1]),
                batch.page_table[row, : -(-keys // self._pool.page_size)].long(),
                keys,
            )
            for row, keys in enumerate(lens)
        ]

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """Return softmax(q k) v, over the keys up to each query's position and within the layer's window."""
        out = torch.empty_like(q)
        for queries, pages, num_keys in self._rows:
            k = self._gather(self._pool.keys(layer.layer_id), pages, num_keys)
            v = self._gather(self._pool.values(layer.layer_id), pages, num_keys)
            scores = torch.einsum("qhd,khd->hqk", q[queries].float(), k) * layer.scale
            scores.masked_fill_(~self._sees(batch.positions[queries], num_keys, layer.window), float("-inf"))
            out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
        return out

    def _gather(self, memory: torch.Tensor, pages: torch.Tensor, num_keys: int) -> torch.Tensor:
        """Return ``[keys, num_heads, head_dim]`` in float32; each KV head serves a group of query heads."""
        return memory[pages].flatten(0, 1)[:num_keys].float().repeat_interleave(self._group, dim=1)

    @staticmethod
    def _sees(positions: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
        """Return which keys each query sees, bool ``[queries, keys]``."""
        distance = positions[:, None] - torch.arange(num_keys, device=positions.device)
        return (distance >= 0) & (distance < (window or num_keys + 1))
