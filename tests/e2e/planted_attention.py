"""Attend row by row, with a defect or a delay that config selects."""

from __future__ import annotations

import time

import torch
from planted_config import PlantedConfig

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.types import Batch


class PlantedAttention(AttentionBackend):
    """Gather the keys of each row and attend in float32."""

    def __init__(self, config: PlantedConfig, context: AttentionContext) -> None:
        self.fault, self.sleep = config.fault, config.sleep_ms / 1e3
        if self.fault == "no_engine":
            raise OSError("this backend was not built")
        self.pool, self.heads = context.pool, context.num_heads // context.num_kv_heads

    def plan(self, batch: Batch) -> None:
        time.sleep(self.sleep)
        if self.fault == "many_rows" and len(batch.extend_lens) > 4:
            raise IndexError("more rows than planned for")
        size, ends = self.pool.page_size, (batch.prefix_lens + batch.extend_lens).tolist()
        self.places = [
            (batch.page_table[row, torch.arange(end) // size].long() * size + torch.arange(end) % size)
            for row, end in enumerate(ends)
        ]

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        out = torch.empty_like(q)
        keys, values = self.pool.keys(layer.layer_id), self.pool.values(layer.layer_id)
        keys, values = (x.reshape(-1, *x.shape[-2:]) for x in (keys, values))
        start = 0
        for row, count in enumerate(batch.extend_lens.tolist()):
            place = self.places[row]
            k, v = (x[place].float().repeat_interleave(self.heads, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[start : start + count].float(), k) * layer.scale
            scores = scores.masked_fill(~self.mask(count, len(place), row < batch.num_extend), float("-inf"))
            out[start : start + count] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
            start += count
        return out

    def mask(self, queries: int, keys: int, extend: bool) -> torch.Tensor:
        """Return bool ``[queries, keys]``: the visible keys."""
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + (self.fault == "ahead" and extend))
        if self.fault == "oldest" and not extend:
            seen[:, 0] = False
        return seen
