"""Find the processes that a process has started, and end those that outlive it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICK_SECONDS = 0.02


class RunningProcess(NamedTuple):
    """Identify a process. ``started`` distinguishes it from a later process with the same id."""

    pid: int
    started: str


def descendants(pid: int) -> list[RunningProcess]:
    """Return the processes that ``pid`` and its children have started and that still run. None are found on systems without
    /proc."""
    children: dict[int, list[RunningProcess]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        parent, found = _read(int(folder.name))
        if found is not None:
            children.setdefault(parent, []).append(found)
    known = [*children.get(pid, ())]
    for process in known:  # grows meanwhile
        known += children.get(process.pid, ())
    return known


def end_leftovers(processes: list[RunningProcess], seconds: float) -> None:
    """Wait up to ``seconds`` until ``processes`` have ended by themselves, and kill the others. Blocks."""
    deadline = time.monotonic() + seconds
    while (processes := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(_TICK_SECONDS)
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _runs(process: RunningProcess) -> bool:
    return _read(process.pid)[1] == process


def _read(pid: int) -> tuple[int, RunningProcess | None]:
    """Return the parent of a process and its identity; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0, None
    state, parent, *rest = text.rpartition(")")[2].split()
    return int(parent), None if state == "Z" else RunningProcess(pid, rest[17])
