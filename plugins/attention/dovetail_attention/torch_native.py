"""Attention with PyTorch's own kernels, on any device; on a CPU with a compiler mostly with ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.ops.cpu.kernels import PagedKV, kernels
from dovetail.ops.kv import raw
from dovetail.types import Batch
from dovetail_attention.kernels import attend, attend_shared
from dovetail_attention.planner import CPU, CUDA, Group, Planner

Way = tuple[int | None, bool]
"""How layers look at a batch: their window, and whether parts of it may be merged."""


class Buffer(NamedTuple):
    """Three views of the memory that a group's keys or values are gathered into; the first two as ``ops.kv.raw``."""

    pieces: torch.Tensor  # [pieces of all rows, unit * kv_heads * head_dim]
    places: torch.Tensor  # [places, kv_heads * head_dim]
    by_row: torch.Tensor  # [rows, kv_heads, keys, head_dim]


class Bound(NamedTuple):
    """A group, and where its keys and values are gathered; None where they are read in place."""

    group: Group
    keys: Buffer | None
    values: Buffer | None
    shared: Bound | None = None

    def gather(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the group's pieces of a layer's keys and values next to each other: ``[rows, kv_heads, keys, head_dim]``."""
        group, k, v, _ = self
        assert group.index is not None
        assert k is not None
        assert v is not None
        torch.index_select(keys, 0, group.index, out=k.pieces)
        torch.index_select(values, 0, group.index, out=v.pieces)
        if group.tail is not None:
            k.places.index_fill_(0, group.tail, 0)
            v.places.index_fill_(0, group.tail, 0)
        return k.by_row, v.by_row


class AttentionPlan(NamedTuple):
    """How a batch is attended to: dense groups, and spans (int64 ``[spans, 4]``, see ``Kernels.attend``) read in place."""

    groups: list[Bound]
    paged: np.ndarray[Any, np.dtype[np.int64]] | None


class TorchNativeAttention(AttentionBackend):
    """``plan`` groups the rows (see ``planner``); ``forward`` runs one dense kernel per group (see ``kernels``), and one for
    all rows that are read through the page table.

    Nothing in ``forward`` waits for the device. A window that no layer had before is planned when it is first met.
    """

    def __init__(self, config: BaseModel, context: AttentionContext) -> None:
        self._pool = context.pool
        self._dtype = context.dtype
        self._heads, self._dim = context.num_kv_heads, context.head_dim
        self._stride = context.num_kv_heads * context.head_dim
        self._limits = CPU if context.device.type == "cpu" else CUDA
        same_dtype = context.pool.keys(0).dtype is context.dtype
        self._kernels = kernels(context.dtype) if context.device.type == "cpu" and same_dtype else None
        if self._kernels is not None:
            self._limits = replace(self._limits, paged=True)
        self._ways: list[Way] = []
        self._plans: dict[Way, AttentionPlan] = {}
        self._planner: Planner | None = None
        self._memory: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._scratch: list[torch.Tensor] = [context.pool.keys(0).new_empty(0) for _ in range(4)]

    def plan(self, batch: Batch) -> None:
        """See ``AttentionBackend.plan``."""
        bytes_per_key = self._stride * self._dtype.itemsize
        self._planner = Planner(batch, self._pool.page_size, bytes_per_key, self._dtype, self._limits)
        self._plans = {way: self._plan_way(way) for way in self._ways}

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        way = layer.window, layer.soft_cap is None and layer.sinks is None
        plan = self._plans.get(way)
        if plan is None:
            self._ways.append(way)
            plan = self._plans[way] = self._plan_way(way)
        groups, paged = plan
        if len(groups) == 1 and paged is None:  # then its tokens are all there are, in order
            return self._attend(groups[0], q, layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if paged is not None:
            self._attend_paged(paged, q, layer, batch, out)
        for bound in groups:
            tokens = bound.group.tokens
            if isinstance(tokens, slice):
                out[tokens] = self._attend(bound, q[tokens], layer)
            else:
                out.index_copy_(0, tokens, self._attend(bound, q.index_select(0, tokens), layer))
        return out

    def _attend_paged(
        self,
        spans: np.ndarray[Any, np.dtype[np.int64]],
        q: torch.Tensor,
        layer: AttentionLayer,
        batch: Batch,
        out: torch.Tensor,
    ) -> None:
        assert self._kernels is not None
        kv = PagedKV(self._pool.keys(layer.layer_id), self._pool.values(layer.layer_id), batch.page_table)
        sinks = None if layer.sinks is None else layer.sinks.float()
        self._kernels.attend(
            q, kv, spans, out, scale=layer.scale, window=layer.window, soft_cap=layer.soft_cap, sinks=sinks
        )

    def _attend(self, bound: Bound, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        group = bound.group
        if bound.shared is None:
            return attend(q, *self._read(bound, layer), group.mask, group.causal, layer)
        return attend_shared(q, self._read(bound.shared, layer), self._read(bound, layer), group.mask, layer.scale)

    def _read(self, bound: Bound, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """The group's keys and values, ``[rows, kv_heads, keys, head_dim]``."""
        group = bound.group
        if group.index is None:
            keys, values = self._pool.keys(layer.layer_id), self._pool.values(layer.layer_id)
            return self._in_place(keys, group), self._in_place(values, group)
        return bound.gather(*self._memory.get((layer.layer_id, group.unit)) or self._pieces(layer.layer_id, group.unit))

    def _in_place(self, memory: torch.Tensor, group: Group) -> torch.Tensor:
        start = memory.storage_offset() + group.start * self._stride
        size, strides = (1, self._heads, group.keys, self._dim), (0, self._dim, self._stride, 1)
        return memory.as_strided(size, strides, start)

    def _pieces(self, layer_id: int, unit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values in rows of ``unit`` places, the same memory. Pools must be contiguous per layer."""
        keys, values = (
            raw(x).view(-1, unit * self._stride) for x in (self._pool.keys(layer_id), self._pool.values(layer_id))
        )
        self._memory[layer_id, unit] = keys, values
        return keys, values

    def _plan_way(self, way: Way) -> AttentionPlan:
        assert self._planner is not None, "plan comes before forward"
        window, may_share = way
        groups = [self._bind(group) for group in self._planner.groups(window, may_share=may_share)]
        spans = [span[:4] for span in self._planner.paged]
        return AttentionPlan(groups, np.array(spans, np.int64) if spans else None)

    def _bind(self, group: Group) -> Bound:
        shared = self._bind(group.shared) if group.shared is not None else None
        offset = (
            2 if shared is None or shared.group.index is None else 4
        )  # both parts are gathered before they are read
        return Bound(group, self._buffer(group, offset - 2), self._buffer(group, offset - 1), shared)

    def _buffer(self, group: Group, which: int) -> Buffer | None:
        """Memory to gather keys (0) or values (1) into: kept, because the system takes large blocks back after each use,
        and faulting them in again costs several times the copy. Groups of a step use the same in turn."""
        if group.index is None:
            return None
        width = group.unit * self._stride
        size = len(group.index) * width
        if len(self._scratch[which]) < size:
            with torch.inference_mode(False):  # so that it can be written to in either mode
                self._scratch[which] = self._scratch[which].new_empty(size)
        flat = self._scratch[which][:size]
        by_row = flat.view(group.rows, -1, self._heads, self._dim)[:, : group.keys].transpose(1, 2)
        return Buffer(raw(flat).view(-1, width), raw(flat).view(-1, self._stride), by_row)
