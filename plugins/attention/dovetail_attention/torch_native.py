"""Attention with PyTorch's own kernels, on any device."""

from __future__ import annotations

import torch
from pydantic import BaseModel

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.types import Batch
from dovetail_attention.kernels import attend
from dovetail_attention.planner import CPU, CUDA, Group, Planner


class TorchNativeAttention(AttentionBackend):
    """``plan`` groups the rows (see ``planner``); ``forward`` runs one dense kernel per group (see ``kernels``).

    Nothing in ``forward`` waits for the device. A window that no layer had before is planned when it is first met.
    """

    def __init__(self, config: BaseModel, context: AttentionContext) -> None:
        self._pool = context.pool
        self._dtype = context.dtype
        self._kv_heads, self._dim = context.num_kv_heads, context.head_dim
        self._key_stride = context.num_kv_heads * context.head_dim
        self._limits = CPU if context.device.type == "cpu" else CUDA
        self._windows: list[int | None] = []
        self._groups: dict[int | None, list[Group]] = {}
        self._planner: Planner | None = None
        self._flat: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scratch = None if self._limits is CUDA else [torch.empty(0), torch.empty(0)]

    def plan(self, batch: Batch) -> None:
        """See ``AttentionBackend.plan``."""
        bytes_per_key = self._key_stride * self._dtype.itemsize
        self._planner = Planner(batch, self._pool.page_size, bytes_per_key, self._dtype, self._limits)
        self._groups = {window: self._planner.groups(window) for window in self._windows}

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        groups = self._groups.get(layer.window)
        if groups is None:
            groups = self._meet(layer.window)
        keys, values = self._flat.get(layer.layer_id) or self._flatten(layer.layer_id)
        if len(groups) == 1:  # then its tokens are all there are, in order
            return self._attend(groups[0], q, keys, values, layer)
        out = torch.empty_like(q)
        for group in groups:
            out[group.tokens] = self._attend(group, q[group.tokens], keys, values, layer)
        return out

    def _meet(self, window: int | None) -> list[Group]:
        assert self._planner is not None, "plan comes before forward"
        self._windows.append(window)
        self._groups[window] = self._planner.groups(window)
        return self._groups[window]

    def _flatten(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values as ``[places, kv_heads, head_dim]``, the same memory."""
        keys, values = self._pool.keys(layer_id), self._pool.values(layer_id)
        assert keys.is_contiguous(), "torch_native reads pools whose layers are contiguous"
        assert values.is_contiguous(), "torch_native reads pools whose layers are contiguous"
        self._flat[layer_id] = keys.flatten(0, 1), values.flatten(0, 1)
        return self._flat[layer_id]

    def _attend(
        self, group: Group, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: AttentionLayer
    ) -> torch.Tensor:
        k, v = self._read(group, keys, 0), self._read(group, values, 1)
        return attend(q, k, v, group.mask, group.causal, layer)

    def _read(self, group: Group, memory: torch.Tensor, which: int) -> torch.Tensor:
        """The group's keys (0) or values (1), ``[rows, kv_heads, keys, head_dim]``."""
        if group.places is None:
            size, stride = (1, self._kv_heads, group.keys, self._dim), (0, self._dim, self._key_stride, 1)
            return memory.as_strided(size, stride, memory.storage_offset() + group.start * self._key_stride)
        gathered = self._gather(memory, group.places, which)
        return gathered.view(group.rows, group.keys, self._kv_heads, self._dim).transpose(1, 2)

    def _gather(self, memory: torch.Tensor, places: torch.Tensor, which: int) -> torch.Tensor:
        """``memory[places]``. On CPU into memory that is kept: the system takes large blocks back after each use, and
        faulting them in again costs several times the copy."""
        if self._scratch is None:
            return memory.index_select(0, places)
        scratch = self._scratch[which]
        if len(scratch) < len(places) or scratch.dtype != memory.dtype:
            with torch.inference_mode(False):  # so that it can be written to in either mode
                scratch = self._scratch[which] = memory.new_empty(len(places), *memory.shape[1:])
        return torch.index_select(memory, 0, places, out=scratch[: len(places)])
