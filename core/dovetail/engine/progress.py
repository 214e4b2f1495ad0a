"""Show the progress of a long operation: with a bar on a terminal, otherwise with log lines. One log line reports the
end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Advance = Callable[[int], None]
"""A function that is called with the number of bytes since the last call, by one thread at a time."""

LOG_SECONDS = 5.0
"""The seconds between two log lines of a progress that is not shown on a terminal."""

MIB, GIB = 1 << 20, 1 << 30

log = logging.getLogger(__name__)


@contextmanager
def bytes_progress(what: str, total: int, console: Console | None = None, *, shown: bool = True) -> Iterator[Advance]:
    """Show the progress of the operation ``what``, which moves ``total`` bytes; without ``shown``, only in the log.
    Yields the function to which the caller must report the bytes."""
    console = console or Console(stderr=True)
    start = time.perf_counter()
    with _bar(what, total, console) if shown and console.is_terminal else _lines(what, total) as advance:
        yield advance
    seconds = time.perf_counter() - start
    log.info("%s: %s in %.1f s (%.1f GiB/s)", what, size_text(total), seconds, total / GIB / max(seconds, 1e-9))


@contextmanager
def _bar(what: str, total: int, console: Console) -> Iterator[Advance]:
    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _lines(what: str, total: int) -> Iterator[Advance]:
    done, logged = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, logged
        done += count
        if time.monotonic() - logged >= LOG_SECONDS:
            logged = time.monotonic()
            log.info("%s: %s of %s", what, size_text(done), size_text(total))

    yield advance


def size_text(count: int) -> str:
    """Return a size as text: ``15.0 GiB``, or in MiB below 1 GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
