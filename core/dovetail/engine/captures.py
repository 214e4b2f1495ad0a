"""Provide what all kinds of captured steps share: the choice of sizes, the time of their capture, and the copies that
bring arrays to them."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from dovetail.engine.device import lost_device
from dovetail.engine.inputs import Inputs, pack, unpack
from dovetail.errors import RankLostError
from dovetail.garbage import pause, resume
from dovetail.interfaces.mesh import SINGLE, Mesh
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

NEEDED_BEFORE_CAPTURE = 2
"""The number of times that a size must be needed before it is captured. Until then its steps run in a larger graph that
is captured already, or are launched kernel by kernel. The host captures a step in about the time in which it launches
two steps kernel by kernel."""

STEPS_BETWEEN_CAPTURES = 4
"""The number of steps from one capture to the next while requests are running, so that a batch whose size changes in
every step is not delayed in every step. Counted in steps, not in seconds: all ranks of a group decide alike."""

LAUNCH_BOUND_ROWS = 128
"""Up to about this number of rows, the time of a replayed step hardly depends on the number of rows, and is shorter than
the time in which the host launches the step kernel by kernel."""

WARM_UPS = 2
"""The number of times that the first step of a recorder runs before it is captured. Later steps run once."""

NO_UPDATES = PageUpdates(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros((1, 0), np.int32))

K = TypeVar("K")


def ladder(most: int) -> list[int]:
    """Return the numbers of rows or tokens to capture, up to and including ``most``. They double up to 8. Above 8 they
    are 8 apart up to 64, 16 apart up to 128, 32 apart up to 256, and then 64 apart."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 1 << 14, 64)]
    return [size for size in sizes if size < most] + [most]


def larger_sizes(sizes: Sequence[int], size: int) -> Iterator[int]:
    """Return the sizes of a ladder in which a step of ``size`` rows or tokens still runs faster than kernel by kernel:
    up to twice as large while the device would wait for the host, and a quarter larger above that."""
    most = max(size + size // 4, min(2 * size, LAUNCH_BOUND_ROWS))
    return (larger for larger in sizes if size < larger <= most)


class Captures(Protocol[K]):
    """Capture graphs by key. Keys whose capture failed are in ``refused``, and ``missing`` does not return them.
    ``larger`` returns the keys of graphs in which a step of the given key may run as well, the fastest first. ``seconds`` is
    the time that captures have taken."""

    refused: set[K]
    seconds: float

    @property
    def num_captured(self) -> int: ...
    def missing(self) -> Iterator[K]: ...
    def larger(self, key: K, /) -> Iterator[K]: ...
    def is_captured(self, key: K, /) -> bool: ...
    def capture(self, key: K, /) -> object: ...


def try_capture(graphs: Captures[K], key: K) -> bool:
    """Capture ``key``, and return True if that succeeds. If it fails, for example because memory is short, log the
    error and add the key to ``refused``: its steps are launched kernel by kernel from then on. Raises only if the
    device or another rank is lost."""
    try:
        graphs.capture(key)
    except Exception as error:
        if isinstance(error, RankLostError) or lost_device(error):
            raise
        log.exception("%s could not be captured, and will be launched kernel by kernel", key)
        graphs.refused.add(key)
        return False
    return True


class CaptureAgreement:
    """Check that all ranks of a mesh have captured the same steps. All of them try to capture the same steps, but on one
    rank a capture may fail, for example because memory is short."""

    def __init__(self, mesh: Mesh) -> None:
        self._tp = mesh.tp
        self._tried = 0

    def check(self, captures: Sequence[Captures[Any]]) -> None:
        """Compare the captures that have failed with those of the other ranks, if any were tried since the last call.
        Raises ``RankLostError`` if they differ: the ranks would then add up tensors of different numbers of rows."""
        refused = sum(len(graphs.refused) for graphs in captures)
        tried = refused + sum(graphs.num_captured for graphs in captures)
        if tried == self._tried:
            return
        self._tried = tried
        if self._tp.min(refused) != -self._tp.min(-refused):
            raise RankLostError(
                f"a step could not be captured on some of {self._tp.size} ranks (on rank {self._tp.rank}: {refused} steps), so that "
                "the ranks cannot run the same steps any more; the logs say why. If memory was short, set a lower "
                "memory.fraction or graphs.max_rows"
            )


class CaptureOnDemand(Generic[K]):
    """Capture a key of ``graphs`` once it has been needed ``needed`` times, and at most one key in
    ``STEPS_BETWEEN_CAPTURES`` steps."""

    def __init__(self, graphs: Captures[K], needed: int | None = None) -> None:
        """``needed`` is ``NEEDED_BEFORE_CAPTURE`` by default."""
        self._graphs = graphs
        self._least = needed
        self._needed: Counter[K] = Counter()
        self._calls = 0
        self._next_capture = 0  # the number of calls from which on another key may be captured

    def is_ready(self, key: K) -> bool:
        """Return True if ``key`` is captured. If it has been needed often enough, capture it first, unless its capture
        has failed before or another key was captured a few calls ago."""
        self._calls += 1
        return self._graphs.is_captured(key) or (self._is_due(key) and try_capture(self._graphs, key))

    def choose(self, key: K) -> K | None:
        """Return the key of the graph in which a step runs that fits ``key`` best: ``key`` itself if it is ready (see
        ``is_ready``), otherwise the best larger one that is captured, or None if there is none."""
        if self.is_ready(key):
            return key
        graphs = self._graphs
        return next((larger for larger in graphs.larger(key) if graphs.is_captured(larger)), None)

    def _is_due(self, key: K) -> bool:
        self._needed[key] += 1
        least = NEEDED_BEFORE_CAPTURE if self._least is None else self._least
        if self._needed[key] < least or key in self._graphs.refused or self._calls < self._next_capture:
            return False
        self._next_capture = self._calls + STEPS_BETWEEN_CAPTURES
        return True


def capture_all(graphs: Captures[K], what: str, mesh: Mesh = SINGLE, console: Console | None = None) -> None:
    """Try to capture all missing keys. Rank 0 of ``mesh`` shows a progress bar. Keys whose capture fails are logged and
    refused. Raises only if the device or another rank is lost."""
    console, keys = console or Console(stderr=True), list(graphs.missing())
    for key in track(keys, f"capturing {what}", console=console, disable=mesh.tp.rank > 0):
        try_capture(graphs, key)


class GraphRecorder:
    """Capture whole steps as graphs that share one pool of memory, on the stream that is current when the recorder is made, or
    on a new one if that is the default stream. All ranks of ``mesh`` record the same steps in the same order."""

    def __init__(self, device: torch.device, mesh: Mesh = SINGLE) -> None:
        self._tp = mesh.tp
        self._memory = torch.cuda.graph_pool_handle()
        # the first graph of each pool, without which torch would refuse to capture into the pool again once its other
        # graphs are gone, and those whose capture failed, which torch's allocators may still refer to
        self._kept: list[torch.cuda.CUDAGraph] = []
        self._is_new = True  # whether nothing was captured into the pool yet
        self._device = device
        # nothing can be captured on the default stream
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        self._stream = torch.cuda.Stream(device) if current == default else current
        self._warm = False  # whether something has run on the recorder's stream, which allocates its workspaces

    def record(
        self, step: Callable[[], torch.Tensor], load: Callable[[], object] | None = None, *, loaded: bool = False
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Run ``load`` (by default ``step``), so that everything that ``step`` needs is compiled and loaded, and then capture
        ``step``. Return the graph and the result of the captured run. With ``loaded``, everything is loaded already, and nothing
        runs before the capture. The host does not wait for the device, and memory that is free stays reserved, so that other
        steps are hardly delayed. If the capture fails, on this rank or on another, give free memory back to the device,
        run ``step``, and capture it once more: the collectives of ``step`` must run on all ranks or on none."""
        if not (loaded and self._warm):
            self.warm_up(load or step)
        captured = None
        try:
            captured = self._capture(step)
        except Exception as error:
            if lost_device(error):
                raise
            log.debug("a capture failed, and is repeated: %s", error)
        if self._tp.agree(captured is not None) and captured is not None:
            return captured
        captured = None  # frees what this rank has captured
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self.warm_up(step)
        return self._capture(step)

    def warm_up(self, step: Callable[[], object]) -> None:
        """Run ``step`` once. The first time, run it ``WARM_UPS`` times on the recorder's stream, because libraries
        allocate workspaces for each stream."""
        if self._warm:
            step()
            return
        with self.beside():
            for _ in range(WARM_UPS):
                step()
        self._warm = True

    def _capture(self, step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        with self.beside():
            graph = self.begin()
            try:
                result = step()
            except BaseException:
                self.abandon(graph)
                raise
            self.end(graph)
        return graph, result

    def begin(self) -> torch.cuda.CUDAGraph:
        """Begin to capture what is launched on the current stream, and return the graph. ``end`` or ``abandon`` must
        follow.

        ``torch.cuda.graph`` would wait for the device and return all unused memory to it before each capture, and the
        next steps would allocate that memory again.

        Until the capture ends, no garbage is collected: if pinned memory that earlier steps have read were freed now, torch would
        record an event on this stream, which would become part of the graph and could never be queried.
        """
        graph = torch.cuda.CUDAGraph()
        pause()
        try:
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        except BaseException:
            self.abandon(graph)
            raise
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.CUDAGraph | None:
        """End the capture of ``graph``, and return it. It can be replayed from now on. Return None if nothing was launched."""
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                graph.capture_end()
        except BaseException:
            self.abandon(graph)
            raise
        resume()
        if self._is_new:
            self._kept.append(graph)
            self._is_new = False
        # torch has no other way to say it
        return None if any("Graph is empty" in str(warning.message) for warning in found) else graph

    def abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture after an exception, which explains more than what is raised here. If the capture was not valid
        any more, torch does not end the use of its memory completely: later captures then use another pool, and earlier
        graphs keep theirs."""
        self._kept.append(graph)
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._memory)
            self._memory, self._is_new = torch.cuda.graph_pool_handle(), True
        finally:
            resume()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Make the recorder's stream the current one, after all earlier work of the current stream and before all later
        work."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

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
            inputs.all_pages.view(-1).index_copy_(0, places, pages)
