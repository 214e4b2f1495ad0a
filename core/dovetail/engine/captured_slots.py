"""Keep the adapter slots of the rows of captured decode steps in memory of fixed address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.ops.adapter_weights import AdapterCount, TokenSlots
from dovetail.ops.low_rank import (
    FEW_SLOTS,
    SEVERAL_SLOTS,
    SMALL_TILE,
    kernel_count,
    most_tiles,
    packed_tiles,
    unpacked_tiles,
)
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from dovetail.types import IntArray

_MOST_SLOTS = {
    AdapterCount.NONE: 0,
    AdapterCount.ONE: 1,
    AdapterCount.FEW: FEW_SLOTS,
    AdapterCount.SEVERAL: SEVERAL_SLOTS,
}
"""The largest number of adapters in steps of each count."""


class CapturedSlots:
    """Hold the slots of up to ``max_rows`` rows, for layers that have ``slots`` slots. Captured kernels read them, and ``send`` writes those
    of the step that is replayed next. Not thread-safe."""

    def __init__(self, max_rows: int, slots: int, device: torch.device) -> None:
        self._slots, self._most_rows, self._most_tiles = slots, max_rows, most_tiles(max_rows, slots)
        self._packed = torch.zeros(2 + 4 * max_rows + 3 * self._most_tiles, dtype=torch.int32, device=device)
        self._sent = (0, -1)  # ``rows_version`` and number of rows of what ``_packed`` holds

    def of_rows(self, rows: int, count: AdapterCount) -> TokenSlots | None:
        """Return the slots of the first ``rows`` rows for a step that is captured, or None if ``count`` is none. ``count`` says how many
        adapters the step may have. No row has an adapter until ``send`` is called."""
        self._packed.zero_()  # no tile has tokens: those of an earlier step may be beyond these rows
        self._sent = (0, -1)
        if not count:
            return None
        count = kernel_count(count, rows)
        slots = min(self._slots, _MOST_SLOTS.get(count, self._slots))
        most = most_tiles(rows, slots)
        tiles = unpacked_tiles(self._packed, SMALL_TILE, self._most_rows, rows, most, count=count)
        return TokenSlots(rows, (), tiles)

    def is_sent(self, version: int, rows: int) -> bool:
        """Return True if the memory holds the slots of a step of ``rows`` rows with this ``Batch.rows_version``, which is not 0."""
        return version != 0 and self._sent == (version, rows)

    def send(self, slots: IntArray, version: int, rows: int) -> None:
        """Send the slots of the adapters of rows (``[at most max_rows]``, 0 stands for no adapter), which are those of a step of ``rows``
        rows with this ``Batch.rows_version``. Does not wait for the device."""
        packed = packed_tiles(slots.astype("int32") - 1, SMALL_TILE, self._most_rows, self._most_tiles)
        self._packed.copy_(to_device(packed, self._packed.device), non_blocking=True)
        self._sent = version, rows
