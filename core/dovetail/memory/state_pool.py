"""Hold the states of layers that keep a state for each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.store import SLOT_ALIGNMENT, StateStore
from dovetail.memory.page_format import export_parts, import_parts, layout_of

if TYPE_CHECKING:
    from dovetail.interfaces.cache import CacheGroup
    from dovetail.interfaces.mixer_shapes import StateShape
    from dovetail.interfaces.store import PageLayout


class StatePool(StateStore):
    """Hold the states of a state group as they are. All states of a slot are together, so that a copy is one operation,
    whatever the number of layers."""

    def __init__(self, group: CacheGroup, memory: torch.Tensor, dtype: torch.dtype) -> None:
        """``memory`` (uint8 ``[num_slots, stride]``) has at least ``bytes_per_slot`` bytes for each slot. ``dtype`` is that
        of the model."""
        self.group, self.num_slots, self.device = group, len(memory), memory.device
        self._words = memory.view(torch.int64)
        self._kinds: dict[int, torch.Tensor] = {}  # by the index of a state in ``group.states``, of all layers
        start = 0
        # large numbers first, so that all are aligned
        for index, kind in sorted(enumerate(group.states), key=lambda each: -dtype_of(each[1], dtype).itemsize):
            named, numbers = dtype_of(kind, dtype), torch.Size(kind.shape).numel()
            size = group.num_layers * numbers * named.itemsize
            own = memory[:, start : start + size].view(named)
            self._kinds[index] = own.unflatten(1, (group.num_layers, *kind.shape))
            start += size
        states = range(len(group.states))
        self._parts = [self._kinds[each] for each in states]  # each [num_slots, num_layers, *shape]
        self.memory = tuple(tuple(self._kinds[each][:, layer] for each in states) for layer in range(group.num_layers))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``StateStore.copy``."""
        self._words.index_copy_(0, target, self._words.index_select(0, source))

    @property
    def layout(self) -> PageLayout:
        """See ``StateStore.layout``. A slot consists of each state of ``group.states``, of all layers."""
        return layout_of("states", 1, self._parts)

    def export_slots(self, slots: Sequence[int]) -> bytes:
        """See ``StateStore.export_slots``. The format is that of exported pages, of which a slot is one."""
        return export_parts(self.layout, self._parts, slots)

    def import_slots(self, data: bytes, slots: Sequence[int]) -> None:
        """See ``StateStore.import_slots``."""
        import_parts(self.layout, self._parts, data, slots)

    def fill(self, value: float, slots: Sequence[int] | slice = slice(None)) -> None:
        """See ``StateStore.fill``."""
        for states in self._kinds.values():
            states[slots] = value


def bytes_per_slot(group: CacheGroup, dtype: torch.dtype) -> int:
    """Return the bytes of a slot of a state group: the states of all layers for one request, or one snapshot of them.
    ``dtype`` is that of the model."""
    one = sum(torch.Size(state.shape).numel() * dtype_of(state, dtype).itemsize for state in group.states)
    return -(-group.num_layers * one // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def dtype_of(state: StateShape, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a state in a model of ``dtype``."""
    return dtype if state.dtype is None else getattr(torch, state.dtype)
