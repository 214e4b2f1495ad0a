"""Watch the memory of a server's processes under load, each by itself and all together."""

from __future__ import annotations

import asyncio
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.bench.machine import process_tree

MIB = 1 << 20
MOST_GROWTH_MIB = 16.0
LEAST_SAMPLES = 3
_ROLES = {
    "constraints.worker": "grammar compiler",
    "resource_tracker": "resource tracker",
    "multiprocessing.spawn": "engine",
}


@dataclass
class Memory:
    """Hold the resident MiB of a process and all its descendants by name, one number per sample: 0 while a process does
    not exist.

    ``together`` is their sum, which also grows if a process that was started late, or is started again, grows.
    """

    processes: dict[str, list[float]] = field(default_factory=dict)
    together: list[float] = field(default_factory=list)

    async def watch(self, pid: int, after: float) -> None:
        """Sample once per second, beginning after ``after`` seconds, until cancelled."""
        await asyncio.sleep(after)
        while True:
            self.add({_name(each, pid): _resident(each) for each in process_tree(pid)})
            await asyncio.sleep(1.0)

    def add(self, sample: dict[str, float]) -> None:
        """Add one sample of all processes."""
        for name in sample.keys() - self.processes.keys():
            self.processes[name] = [0.0] * len(self.together)
        self.together.append(sum(sample.values()))
        for name, values in self.processes.items():
            values.append(sample.get(name, 0.0))

    def faults(self) -> list[str]:
        """Return what has grown too much: any of the processes, or all together."""
        if len(self.together) < LEAST_SAMPLES:
            return [f"memory was sampled {len(self.together)} times, which is too few; increase --seconds"]
        series = {**self.processes, "all processes together": self.together}
        grown = {name: growth(values) for name, values in series.items()}
        return [f"memory grew by {mib:.1f} MiB: {name}" for name, mib in grown.items() if mib > MOST_GROWTH_MIB]

    def report(self) -> dict[str, Any]:
        """Return the MiB at the beginning and the end, the maximum, and the growth."""
        series = {"together": self.together, **self.processes}
        return {name: _summary(values) for name, values in series.items() if values}


def growth(samples: Sequence[float]) -> float:
    """Return by how much the last third is above both earlier thirds, medians each. Memory that is returned and
    taken again is not growth."""
    third = len(samples) // 3
    if not third:
        return 0.0
    first, second, last = (
        statistics.median(part) for part in (samples[:third], samples[third : 2 * third], samples[2 * third :])
    )
    return last - max(first, second)


def _summary(values: Sequence[float]) -> dict[str, float]:
    numbers = {"first": values[0], "last": values[-1], "most": max(values), "growth": growth(values)}
    return {name: round(number, 1) for name, number in numbers.items()}


def _name(pid: int, server: int) -> str:
    if pid == server:
        return f"server {pid}"
    command = _read(Path(f"/proc/{pid}/cmdline"))
    return f"{next((role for part, role in _ROLES.items() if part in command), 'other')} {pid}"


def _resident(pid: int) -> float:
    words = _read(Path(f"/proc/{pid}/statm")).split()
    return int(words[1]) * resource.getpagesize() / MIB if words else 0.0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended in the meantime
        return ""
