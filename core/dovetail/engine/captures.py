"""Provide what all kinds of captured steps share: the choice of sizes, the time of their capture, and the copies that
bring arrays to them."""

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
"""The number of pinned buffers, which are used in turns. Under overlap two steps are in flight, and a buffer must not
change before the device has read it."""

UPDATE_BYTES = 1 << 20
"""The number of bytes in a step's buffer for new entries of the page table. If the entries need more, a separate copy
sends them."""

NEEDED_BEFORE_CAPTURE = 8
"""The number of times that a size must be needed before it is captured. Until then its steps are launched kernel by
kernel. A capture takes as long as about a hundred replays save, so capturing a size that occurs only a few times does
not pay."""

WARM_UPS = 2

NO_UPDATES = PageUpdates(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((1, 0), np.int32))

K = TypeVar("K")


def ladder(most: int) -> list[int]:
    """Return the numbers of rows or tokens to capture, up to and including ``most``. They double up to 8. Above 8 they
    are 8 apart up to 64, 16 apart up to 128, 32 apart up to 256, and then 64 apart."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1 << 14, 64)]
    return [size for size in sizes if size < most] + [most]


class Captures(Protocol[K]):
    """Capture graphs by key. Keys whose capture failed are in ``refused``, and ``missing`` does not return them."""

    refused: set[K]

    def missing(self) -> Iterator[K]: ...
    def is_captured(self, key: K, /) -> bool: ...
    def capture(self, key: K, /) -> object: ...


def try_capture(graphs: Captures[K], key: K) -> bool:
    """Capture ``key``, and return True if that succeeds. If it fails, for example because memory is short, log the
    error and add the key to ``refused``: its steps are launched kernel by kernel from then on. Raises only if the
    device is lost."""
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
    """Capture a key of ``graphs`` once it has been needed ``NEEDED_BEFORE_CAPTURE`` times."""

    def __init__(self, graphs: Captures[K]) -> None:
        self._graphs = graphs
        self._needed: Counter[K] = Counter()

    def is_ready(self, key: K) -> bool:
        """Return True if ``key`` is captured. From the ``NEEDED_BEFORE_CAPTURE``-th call for a key on, capture it
        first, unless its capture has failed before."""
        graphs = self._graphs
        if graphs.is_captured(key):
            return True
        self._needed[key] += 1
        return self._needed[key] >= NEEDED_BEFORE_CAPTURE and key not in graphs.refused and try_capture(graphs, key)


def capture_next(graphs: Captures[K]) -> bool:
    """Try to capture one missing key. Return False if none is missing."""
    for key in graphs.missing():
        try_capture(graphs, key)
        return True
    return False


def capture_all(graphs: Captures[K], what: str) -> None:
    """Capture all missing keys, and show a progress bar. Raises what a failed capture raises."""
    for key in track(list(graphs.missing()), f"capturing {what}", console=Console(stderr=True)):
        graphs.capture(key)


class GraphRecorder:
    """Capture whole steps as graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Run ``step`` a few times, so that everything that it needs is compiled and allocated, and then capture it.
        Return the graph and the result of the captured run."""
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
        """Wait for all work of the current stream."""
        torch.cuda.current_stream(self._device).synchronize()


class Staging:
    """Hold a device buffer of fixed address, which one copy fills in each step. It holds ``size`` bytes, and
    ``UPDATE_BYTES`` for new entries of the page table."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size + UPDATE_BYTES
        self.buffer = torch.zeros(self.size, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(self.size, dtype=torch.uint8, pin_memory=True) for _ in range(TURNS)]
        self._read = [torch.cuda.Event() for _ in range(TURNS)]
        self._turn = 0

    def send(self, packed: np.ndarray) -> None:
        """Copy ``packed`` to the start of the buffer, on the current stream. The host waits until the device has read
        the pinned buffer whose turn it is."""
        turn = self._turn = (self._turn + 1) % TURNS
        self._read[turn].synchronize()
        size = len(packed)
        self._pinned[turn].numpy()[:size] = packed
        self.buffer[:size].copy_(self._pinned[turn][:size], non_blocking=True)
        self._read[turn].record()

    def send_step(self, inputs: Inputs, arrays: Sequence[Array], updates: PageUpdates) -> None:
        """Copy ``arrays`` to the start of the buffer, and write ``updates`` into the device's page table."""
        entries = inputs.entries_of(updates)
        packed = pack([*arrays, *entries])
        if len(packed) > self.size:
            inputs.upload(updates=updates)
            packed, entries = pack(arrays), ()
        self.send(packed)
        if entries:
            places, pages = unpack(self.buffer, [*arrays, *entries])[-2:]
            inputs.pages.view(-1).index_copy_(0, places, pages)
