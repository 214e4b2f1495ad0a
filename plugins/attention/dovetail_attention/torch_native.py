"""Attention with PyTorch's own kernels, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import BaseModel

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.types import Batch
from dovetail_attention.kernels import attend, attend_shared
from dovetail_attention.planner import CPU, CUDA, Group, Planner

Way = tuple[int | None, bool]
"""How layers look at a batch: their window, and whether parts of it may be merged."""


class Buffer(NamedTuple):
    """Three views of the memory that a group's keys or values are gathered into."""

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


class TorchNativeAttention(AttentionBackend):
    """``plan`` groups the rows (see ``planner``); ``forward`` runs one dense kernel per group (see ``kernels``).

    Nothing in ``forward`` waits for the device. A window that no layer had before is planned when it is first met.
    """

    def __init__(self, config: BaseModel, context: AttentionContext) -> None:
        self._pool = context.pool
        self._dtype = context.dtype
        self._heads, self._dim = context.num_kv_heads, context.head_dim
        self._stride = context.num_kv_heads * context.head_dim
        self._limits = CPU if context.device.type == "cpu" else CUDA
        self._ways: list[Way] = []
        self._groups: dict[Way, list[Bound]] = {}
        self._planner: Planner | None = None
        self._memory: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._scratch: list[torch.Tensor] = [context.pool.keys(0).new_empty(0) for _ in range(4)]

    def plan(self, batch: Batch) -> None:
        """See ``AttentionBackend.plan``."""
        bytes_per_key = self._stride * self._dtype.itemsize
        self._planner = Planner(batch, self._pool.page_size, bytes_per_key, self._dtype, self._limits)
        self._groups = {way: self._plan_way(way) for way in self._ways}

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        way = layer.window, layer.soft_cap is None and layer.sinks is None
        groups = self._groups.get(way)
        if groups is None:
            self._ways.append(way)
            groups = self._groups[way] = self._plan_way(way)
        if len(groups) == 1:  # then its tokens are all there are, in order
            return self._attend(groups[0], q, layer)
        out = torch.empty_like(q)
        for bound in groups:
            tokens = bound.group.tokens
            if isinstance(tokens, slice):
                out[tokens] = self._attend(bound, q[tokens], layer)
            else:
                out.index_copy_(0, tokens, self._attend(bound, q.index_select(0, tokens), layer))
        return out

    def _attend(self, bound: Bound, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        group = bound.group
        if bound.shared is None:
            return attend(q, *self._read(bound, layer), group.mask, group.causal, layer)
        return attend_shared(q, self._read(bound.shared, layer), self._read(bound, layer), group.mask, layer.scale)

    def _read(self, bound: Bound, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """The group's keys and values, ``[rows, kv_heads, keys, head_dim]``."""
        group = bound.group
        keys, values = self._memory.get((layer.layer_id, group.unit)) or self._pieces(layer.layer_id, group.unit)
        if group.index is None:
            return self._in_place(keys, group), self._in_place(values, group)
        return bound.gather(keys, values)

    def _in_place(self, memory: torch.Tensor, group: Group) -> torch.Tensor:
        start = memory.storage_offset() + group.start * self._stride
        size, strides = (1, self._heads, group.keys, self._dim), (0, self._dim, self._stride, 1)
        return memory.as_strided(size, strides, start)

    def _pieces(self, layer_id: int, unit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values in rows of ``unit`` places, the same memory. Pools must be contiguous per layer."""
        keys, values = (
            x.view(-1, unit * self._stride) for x in (self._pool.keys(layer_id), self._pool.values(layer_id))
        )
        self._memory[layer_id, unit] = keys, values
        return keys, values

    def _plan_way(self, way: Way) -> list[Bound]:
        assert self._planner is not None, "plan comes before forward"
        window, may_share = way
        return [self._bind(group) for group in self._planner.groups(window, may_share=may_share)]

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
        return Buffer(flat.view(-1, width), flat.view(-1, self._stride), by_row)
