"""What captured steps of every kind have in common: which sizes there are, when they are captured, how arrays reach them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from dovetail.engine.device import lost_device
from dovetail.engine.inputs import Inputs, pack, unpack
from dovetail.types import PageUpdates

if TYPE_CHECKING:
    from dovetail.engine.inputs import Array

log = logging.getLogger(__name__)

TURNS = 4
"""Pinned buffers used in turns: under overlap two steps are in flight, and a buffer must not change before it is read."""

ROOM_FOR_PAGES = 1 << 20
"""Bytes for new entries of the page table in the buffer of a step; more of them travel by a copy of their own."""

NEEDED_BEFORE_CAPTURE = 8
"""Steps of one size that are launched kernel by kernel before the size is captured: a capture costs as much as a hundred
steps lose, and sizes that are met in passing are not worth it."""

WARM_UPS = 2

NO_UPDATES = PageUpdates(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((1, 0), np.int32))

K = TypeVar("K")


def ladder(most: int) -> list[int]:
    """Counts of rows, or tokens, to capture, up to ``most`` itself: doubled up to 16, then in steps that shrink to an eighth."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1 << 14, 64)]
    return [size for size in sizes if size < most] + [most]


class Captures(Protocol[K]):
    """What captures graphs by key. Keys whose capture failed are ``refused``, and not missing."""

    refused: set[K]

    def missing(self) -> Iterator[K]: ...
    def is_captured(self, key: K, /) -> bool: ...
    def capture(self, key: K, /) -> object: ...


def try_capture(graphs: Captures[K], key: K) -> bool:
    """Capture ``key``. If that fails, as it does without memory for it, steps of that kind are launched kernel by kernel from
    now on: the failure is logged. Raises only where the device is lost."""
    try:
        graphs.capture(key)
    except Exception as error:
        if lost_device(error):
            raise
        log.exception("%s could not be captured, and will be launched kernel by kernel", key)
        graphs.refused.add(key)
        return False
    return True


class CaptureOnDemand(Generic[K]):
    """Capture keys of ``graphs`` that have been needed often enough for that to pay."""

    def __init__(self, graphs: Captures[K]) -> None:
        self._graphs = graphs
        self._needed: Counter[K] = Counter()

    def is_ready(self, key: K) -> bool:
        """Return True if ``key`` is captured. Captures it if this is the ``NEEDED_BEFORE_CAPTURE``-th call for it or a later one,
        unless that has failed before."""
        graphs = self._graphs
        if graphs.is_captured(key):
            return True
        self._needed[key] += 1
        return self._needed[key] >= NEEDED_BEFORE_CAPTURE and key not in graphs.refused and try_capture(graphs, key)


def capture_next(graphs: Captures[K]) -> bool:
    """Capture one of those that are missing. False if none is."""
    for key in graphs.missing():
        try_capture(graphs, key)
        return True
    return False


def capture_all(graphs: Captures[K], what: str) -> None:
    """Capture all that is missing, with a progress bar."""
    for key in track(list(graphs.missing()), f"capturing {what}", console=Console(stderr=True)):
        graphs.capture(key)


class Recorder:
    """Captures whole graphs, all of them into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Run ``step`` to compile and allocate what it needs, then capture it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    step()
        finally:
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            result = step()
        return graph, result

    def wait(self) -> None:
        """Wait for all that the current stream has been given."""
        torch.cuda.current_stream(self._device).synchronize()


class Staging:
    """A device buffer of fixed address that one copy a step fills. It has room for ``size`` bytes, and for new pages."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size + ROOM_FOR_PAGES
        self.buffer = torch.zeros(self.size, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(self.size, dtype=torch.uint8, pin_memory=True) for _ in range(TURNS)]
        self._read = [torch.cuda.Event() for _ in range(TURNS)]
        self._turn = 0

    def send(self, packed: np.ndarray) -> None:
        """Copy ``packed`` to the start of the buffer, in the order of the current stream."""
        turn = self._turn = (self._turn + 1) % TURNS
        self._read[turn].synchronize()
        size = len(packed)
        self._pinned[turn].numpy()[:size] = packed
        self.buffer[:size].copy_(self._pinned[turn][:size], non_blocking=True)
        self._read[turn].record()

    def send_step(self, inputs: Inputs, arrays: Sequence[Array], updates: PageUpdates) -> None:
        """Copy ``arrays`` to the start of the buffer, and bring the device's page table up to date."""
        entries = inputs.entries_of(updates)
        packed = pack([*arrays, *entries])
        if len(packed) > self.size:
            inputs.upload(updates=updates)
            packed, entries = pack(arrays), ()
        self.send(packed)
        if entries:
            places, pages = unpack(self.buffer, [*arrays, *entries])[-2:]
            inputs.pages.view(-1).index_copy_(0, places, pages)
