"""Compute with fewer threads on a CPU while other processes need its cores.

OpenMP divides a product equally among its threads, and each waits for the last one. If another process takes the core of one
thread, all threads wait, and keep their cores busy meanwhile (``waiting_threads``). Two engines with as many threads as there are
cores each lose most of their speed in this way. With half of the threads they lose little.

Linux counts for each thread how long it was ready and waited for a core, and for each core how long it was idle. By these times
``ThreadCount`` chooses the number of threads again and again while the engine works.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

WINDOW = 0.05
"""The seconds of work after which the number of threads is chosen again. Linux counts idle time in units of 0.01 s."""
PAUSE = 0.02
"""The seconds without work after which a new window begins. Cores that were idle because there was no work are not free for more threads."""
FORGOTTEN = 1.0
"""The seconds without work after which an engine begins with all threads again. What other processes needed before says little then."""
WAITING = 0.4
"""If this many threads or more wait for a core on average, the number of threads is reduced. Threads of an engine that is alone wait a
little, too, because the process that serves its requests needs a core now and then."""
IDLE = 0.75
"""If this many cores or more are idle on average, threads are added."""
HELD = 0.3
"""Added threads that stay this long (seconds) count as useful. If some are removed earlier, the time until threads are added again doubles."""
SHORTEST, LONGEST = 0.05, 6.4
"""After some threads were removed, none are added for this many seconds, at least and at most."""


class ThreadCount:
    """Choose the number of threads, between 1 and ``most``, by what was observed with the number before."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.forget()

    def forget(self) -> None:
        """Begin with ``most`` threads again, as if nothing had been observed."""
        self.number = self.most
        self._added, self._delay, self._next = float("-inf"), SHORTEST, float("-inf")

    def observe(self, now: float, waiting: float, idle: float) -> None:
        """Choose ``number`` at the time ``now`` (seconds). On average since the last call, ``waiting`` threads of this process were
        ready and had no core, and ``idle`` cores had nothing to do."""
        if waiting >= WAITING:
            if self.number > 1:
                self._delay = min(LONGEST, 2 * self._delay) if now - self._added < HELD else SHORTEST
                self._next = now + self._delay
                self.number = max(1, self.number - max(1, round(waiting)))
        elif idle >= IDLE and self.number < self.most and now >= self._next:
            self.number = min(self.most, self.number + max(1, int(idle / 2)))
            self._added = now


class CoreTimes(Protocol):
    """Read times in seconds, of which only differences mean anything."""

    def waited(self) -> Mapping[str, float]:
        """Return for each thread of this process how long it was ready and waited for a core."""
        ...

    def idle(self) -> float:
        """Return how long the cores on which this process may run were idle, together."""
        ...


class LinuxCoreTimes:
    """Read the times that Linux counts."""

    def __init__(self) -> None:
        """Raises ``OSError`` if the system does not count these times."""
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            if not int(file.read().split()[0]):
                raise OSError("this Linux does not count how long threads wait for a core")
        if not self.idle():
            raise OSError("/proc/stat does not list the cores of this process")

    def waited(self) -> Mapping[str, float]:
        """See ``CoreTimes``."""
        times = {}
        for thread in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
                    times[thread] = int(file.read().split()[1]) / 1e9
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended
                continue
        return times

    def idle(self) -> float:
        """See ``CoreTimes``."""
        cores = {b"cpu%d" % core for core in os.sched_getaffinity(0)}
        ticks = 0
        with open("/proc/stat", "rb") as file:
            for line in file:
                name, *fields = line.split()
                if not name.startswith(b"cpu"):
                    break
                if name in cores:
                    ticks += int(fields[3]) + int(fields[4])  # the second number: idle while a disk is waited for
        return ticks / os.sysconf("SC_CLK_TCK")


@functools.cache
def _setters() -> Sequence[Callable[[int], object]]:
    """Return the functions of torch's OpenMP and, if it has that, MKL that set the number of threads of the thread that calls them.
    Raises ``OSError`` if there are none."""
    library, names = ctypes.PyDLL(torch._C.__file__), ["omp_set_num_threads"]
    if torch.backends.mkl.is_available():
        names.append("MKL_Set_Num_Threads_Local")
    try:
        return [getattr(library, name) for name in names]
    except AttributeError as error:
        raise OSError(f"this torch cannot set the number of threads of one thread: {error}") from None


def set_own_threads(number: int) -> None:
    """Set the number of threads with which torch computes for the calling thread. ``torch.set_num_threads`` also sets that of all
    threads that use torch for the first time after it, which would keep it. Raises ``OSError`` if this torch
    cannot do that."""
    for setter in _setters():
        setter(number)


class AdaptiveThreads:
    """Let torch compute with the threads that a ``ThreadCount`` chooses, and at most its own number, while the context is entered.

    It is entered for each part of a step, and always by the same thread, because OpenMP has a number for each thread. Contexts may
    be nested. If times cannot be read, the number stays for that window, and the first such error is logged.
    """

    def __init__(self, count: ThreadCount, times: CoreTimes) -> None:
        self._count, self._times = count, times
        self._before: list[int | None] = []  # None: the number was not changed
        self._left = self._start = float("-inf")
        self._waited: Mapping[str, float] = {}
        self._idle: float | None = None
        self._failed = False

    def __str__(self) -> str:
        return f"{self._count.most}, fewer while other processes need the cores"

    def __enter__(self) -> None:
        now = time.monotonic()
        if now - self._start >= WINDOW or now - self._left > PAUSE:
            self._observe(now)
        before, count = None, self._count
        if count.number < count.most:  # otherwise the thread has all, or fewer in a context around this one
            before = torch.get_num_threads()
            set_own_threads(min(count.number, before))
        self._before.append(before)

    def __exit__(self, *error: object) -> None:
        before = self._before.pop()
        if before is not None:
            set_own_threads(before)
        self._left = time.monotonic()

    def _observe(self, now: float) -> None:
        """Begin a window after a pause, or choose the number of threads if a window ends at ``now``."""
        pause = 0.0 if self._before else now - self._left
        if pause > FORGOTTEN:
            self._count.forget()
        try:
            if pause > PAUSE:
                self._begin(now, self._times.waited())
            elif now - self._start >= WINDOW:
                self._choose(now)
        except OSError as error:  # for example, no file can be opened
            self._skip(now, error)

    def _choose(self, now: float) -> None:
        """Choose the number of threads by the window that ends at ``now``, and begin the next one."""
        seconds, waited = now - self._start, self._times.waited()
        total = sum(until_now - self._waited.get(thread, until_now) for thread, until_now in waited.items())
        idle = 0.0 if self._idle is None else self._times.idle() - self._idle
        self._count.observe(now, total / seconds, idle / seconds)
        self._begin(now, waited)

    def _begin(self, now: float, waited: Mapping[str, float]) -> None:
        """Begin a window. The time of idle cores, which takes long to read with many cores, is only needed to add threads."""
        self._start, self._waited = now, waited
        self._idle = self._times.idle() if self._count.number < self._count.most else None

    def _skip(self, now: float, error: OSError) -> None:
        """Begin a window in which nothing is observed, so that the number of threads stays."""
        self._start, self._waited, self._idle = now, {}, None
        if not self._failed:
            log.warning(
                "the number of threads, now %d, stays while the times of the cores cannot be read: %s",
                self._count.number,
                error,
            )
        self._failed = True


def adaptive_threads(threads: int | None, device: torch.device, ranks: int) -> AdaptiveThreads | None:
    """Return the context for the work of an engine on ``device``, or None if it always has the same number of threads: if the config
    gives ``threads``, on CUDA, with one thread, if the system does not count the times that are needed, if this torch cannot set the
    number of threads of one thread, and if there are several ``ranks``, which must round alike to choose the same tokens."""
    most = torch.get_num_threads()
    if threads is not None or device.type != "cpu" or ranks > 1 or most == 1:
        return None
    try:
        set_own_threads(most)
        return AdaptiveThreads(ThreadCount(most), LinuxCoreTimes())
    except OSError as error:
        log.info("always %d threads, also while other processes need the cores: %s", most, error)
        return None
