"""Compute attention with PyTorch's kernels on any device. On a CPU with a compiler, most rows use Dovetail's own kernels
instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.ops.cpu.kernels import PagedKV, kernels
from dovetail.ops.kv_dtypes import raw
from dovetail.types import Batch
from dovetail_attention.kernels import attend, attend_causal, attend_shared
from dovetail_attention.planner import CPU, CUDA, Group, Planner

LayerView = tuple[int | None, bool]
"""The window of a layer, and whether its partial results may be merged. Layers that agree in both share a plan."""


class Buffer(NamedTuple):
    """Hold three views of the memory that a group's keys or values are gathered into. The first two are as
    ``ops.kv_dtypes.raw``."""

    pieces: torch.Tensor  # [pieces of all rows, unit * kv_heads * head_dim]
    places: torch.Tensor  # [places, kv_heads * head_dim]
    by_row: torch.Tensor  # [rows, kv_heads, keys, head_dim]


class Bound(NamedTuple):
    """Bind a group to the memory into which its keys and values are gathered; None where they are read in place, and for
    values that are a part of the keys."""

    group: Group
    keys: Buffer | None
    values: Buffer | None
    shared: Bound | None = None

    def gather(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the group's pieces of a layer's keys and values next to each other, and return both as
        ``[rows, kv_heads, keys, head_dim]``."""
        group, k, v, _ = self
        assert group.index is not None
        assert k is not None
        for buffer, memory in ((k, keys), (v, values)):
            if buffer is not None:
                torch.index_select(memory, 0, group.index, out=buffer.pieces)
                if group.tail is not None:
                    buffer.places.index_fill_(0, group.tail, 0)
        return k.by_row, (v or k).by_row


class AttentionPlan(NamedTuple):
    """Describe how a batch attends: dense groups, and spans (int64 ``[spans, 4]``, see ``Kernels.attend``) that are
    read in place."""

    groups: list[Bound]
    paged: np.ndarray[Any, np.dtype[np.int64]] | None


class TorchNativeAttention(AttentionBackend):
    """Run one dense kernel per group of rows (see ``kernels``), and one for all rows that are read through the page
    table.

    ``plan`` makes the groups (see ``planner``). ``forward`` does not wait for the device. If a layer has a window that
    no layer had before, ``forward`` plans for that window; from the next step on, ``plan`` does so.

    In a latent group whole keys stand for the values, because the kernels want both of one size; ``forward`` returns the
    part of the result that belongs to the values. Keys and values with scales are multiplied when they have been gathered,
    and rounded to the dtype of queries.
    """

    def __init__(self, config: BaseModel, context: AttentionContext) -> None:
        self._pool = context.pool
        self._value_dim = context.value_dim
        self._dtype = context.dtype
        self._heads, self._dim = context.num_kv_heads, context.head_dim
        self._stride = context.num_kv_heads * context.head_dim
        self._limits = CPU if context.device.type == "cpu" else CUDA
        same_dtype = context.pool.keys(0).dtype is context.dtype
        self._kernels = kernels(context.dtype) if context.device.type == "cpu" and same_dtype else None
        if self._kernels is not None:
            self._limits = replace(self._limits, paged=True)
        self._scaled = context.pool.tensors(0).scales is not None
        self._views: list[LayerView] = []
        self._plans: dict[LayerView, AttentionPlan] = {}
        self._planner: Planner | None = None
        self._memory: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._scratch: list[torch.Tensor] = [context.pool.keys(0).new_empty(0) for _ in range(4)]

    def plan(self, batch: Batch) -> None:
        """See ``AttentionBackend.plan``."""
        bytes_per_key = self._stride * self._dtype.itemsize
        self._planner = Planner(batch, self._pool.page_size, bytes_per_key, self._dtype, self._limits)
        self._plans = {view: self._plan_view(view) for view in self._views}

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        view = layer.window, layer.soft_cap is None and layer.sinks is None
        plan = self._plans.get(view)
        if plan is None:
            self._views.append(view)
            plan = self._plans[view] = self._plan_view(view)
        out = self._run(plan, q, layer, batch)
        return out if self._value_dim is None else out[..., : self._value_dim]

    def _run(self, plan: AttentionPlan, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        groups, paged = plan
        if len(groups) == 1 and paged is None:  # then the group contains all tokens in order
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

    def plan_expanded(self, batch: Batch, kv_indptr: torch.Tensor) -> None:
        """See ``ExpandedAttention.plan_expanded``."""

    def forward_expanded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: Batch
    ) -> torch.Tensor:
        """See ``ExpandedAttention.forward_expanded``."""
        out = q.new_empty(*q.shape[:2], v.shape[2])
        token = key = 0
        for prefix, queries in zip(batch.prefix_lens.tolist(), batch.extend_lens.tolist(), strict=True):
            tokens, keys = slice(token, token + queries), slice(key, key + prefix + queries)
            attend_causal(q[tokens], k[keys], v[keys], layer, out[tokens])
            token, key = tokens.stop, keys.stop
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
        kv = PagedKV(*self._layer(layer.layer_id), batch.page_table)
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
        """Return the group's keys and values, both ``[rows, kv_heads, keys, head_dim]``."""
        group = bound.group
        if group.index is None:
            keys, values = (self._in_place(memory, group) for memory in self._layer(layer.layer_id))
        else:
            pieces = self._memory.get((layer.layer_id, group.unit)) or self._pieces(layer.layer_id, group.unit)
            keys, values = bound.gather(*pieces)
        return self._multiplied(keys, values, group, layer) if self._scaled else (keys, values)

    def _multiplied(
        self, keys: torch.Tensor, values: torch.Tensor, group: Group, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a group's keys and values, both ``[rows, kv_heads, keys, head_dim]``, multiplied by their scales."""
        scales = self._pool.tensors(layer.layer_id).scales
        assert scales is not None
        k, v = (self._scales_of(group, own)[..., None] for own in scales)
        return (keys.float() * k).to(self._dtype), (values.float() * v).to(self._dtype)

    def _scales_of(self, group: Group, scales: torch.Tensor) -> torch.Tensor:
        """Return the scales of a group's keys or values, float32 ``[rows or 1, kv_heads, keys or 1]``."""
        if scales.stride(0) == 0:  # one for each head
            return scales[0, 0].float()[None, :, None]
        places = scales.view(-1, self._heads)
        if group.index is None:
            return places[group.start :][: group.keys].float().t()[None]
        found = places.view(-1, group.unit * self._heads).index_select(0, group.index).view(-1, self._heads).float()
        if group.tail is not None:
            found.index_fill_(0, group.tail, 0)
        return found.view(group.rows, -1, self._heads)[:, : group.keys].transpose(1, 2)

    def _layer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys, and its values or what stands for them, of the same shape."""
        keys = self._pool.keys(layer_id)
        return keys, self._pool.values(layer_id) if self._value_dim is None else keys

    def _in_place(self, memory: torch.Tensor, group: Group) -> torch.Tensor:
        start = memory.storage_offset() + group.start * self._stride
        size, strides = (1, self._heads, group.keys, self._dim), (0, self._dim, self._stride, 1)
        return memory.as_strided(size, strides, start)

    def _pieces(self, layer_id: int, unit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a layer's keys and values in rows of ``unit`` places. Pools must be contiguous per layer."""
        keys, values = (raw(x).view(-1, unit * self._stride) for x in self._layer(layer_id))
        self._memory[layer_id, unit] = keys, values
        return keys, values

    def _plan_view(self, view: LayerView) -> AttentionPlan:
        assert self._planner is not None, "plan comes before forward"
        window, may_share = view
        groups = [self._bind(group) for group in self._planner.groups(window, may_share=may_share)]
        spans = [span[:4] for span in self._planner.paged]
        return AttentionPlan(groups, np.array(spans, np.int64) if spans else None)

    def _bind(self, group: Group) -> Bound:
        shared = self._bind(group.shared) if group.shared is not None else None
        offset = (
            2 if shared is None or shared.group.index is None else 4
        )  # both parts are gathered before they are read
        values = self._buffer(group, offset - 1) if self._value_dim is None else None
        return Bound(group, self._buffer(group, offset - 2), values, shared)

    def _buffer(self, group: Group, which: int) -> Buffer | None:
        """Return memory into which keys (``which`` is even) or values (odd) are gathered.

        The memory is kept between steps: the system takes large blocks back after each use, and faulting them in again
        costs several times as much as the copy. The groups of a step use the same memory in turn.
        """
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
