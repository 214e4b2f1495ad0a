"""How far something long has come: a bar on a terminal, log lines elsewhere, one log line at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Advance = Callable[[int], None]
"""Called with the bytes that have come since the last call; by one thread at a time."""

LOG_SECONDS = 5.0
"""Where there is no terminal, how often it is told."""

MIB, GIB = 1 << 20, 1 << 30

log = logging.getLogger(__name__)


@contextmanager
def bytes_progress(what: str, total: int, console: Console | None = None) -> Iterator[Advance]:
    """Show ``what`` moving ``total`` bytes. Yields the function that is told of them."""
    console = console or Console(stderr=True)
    start = time.perf_counter()
    with _bar(what, total, console) if console.is_terminal else _lines(what, total) as advance:
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
    done, told = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, told
        done += count
        if time.monotonic() - told >= LOG_SECONDS:
            told = time.monotonic()
            log.info("%s: %s of %s", what, size_text(done), size_text(total))

    yield advance


def size_text(count: int) -> str:
    """``15.0 GiB``, or MiB for little."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
