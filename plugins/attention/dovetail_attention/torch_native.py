"""Attention with PyTorch's own kernels, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import BaseModel

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.types import Batch
from dovetail_attention.kernels import attend
from dovetail_attention.planner import CPU, CUDA, Group, Planner


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

    def gather(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the group's pieces of a layer's keys and values next to each other: ``[rows, kv_heads, keys, head_dim]``."""
        group, k, v = self
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
        self._windows: list[int | None] = []
        self._groups: dict[int | None, list[Bound]] = {}
        self._planner: Planner | None = None
        self._memory: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._scratch: list[torch.Tensor] = [context.pool.keys(0).new_empty(0) for _ in range(2)]

    def plan(self, batch: Batch) -> None:
        """See ``AttentionBackend.plan``."""
        bytes_per_key = self._stride * self._dtype.itemsize
        self._planner = Planner(batch, self._pool.page_size, bytes_per_key, self._dtype, self._limits)
        self._groups = {window: self._plan_window(window) for window in self._windows}

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        if layer.window not in self._groups:
            self._windows.append(layer.window)
            self._groups[layer.window] = self._plan_window(layer.window)
        groups = self._groups[layer.window]
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
        unit = group.unit
        keys, values = self._memory.get((layer.layer_id, unit)) or self._pieces(layer.layer_id, unit)
        if group.index is None:
            k, v = self._in_place(keys, group), self._in_place(values, group)
        else:
            k, v = bound.gather(keys, values)
        return attend(q, k, v, group.mask, group.causal, layer)

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

    def _plan_window(self, window: int | None) -> list[Bound]:
        assert self._planner is not None, "plan comes before forward"
        groups = self._planner.groups(window)
        return [Bound(group, *(self._buffer(group, i) for i in range(2))) for group in groups]

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
