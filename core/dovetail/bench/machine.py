"""Describe the machine in records."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dovetail.bench.records import MachineFacts

_PACKAGES = ("dovetail", "torch", "triton", "flashinfer-python", "flash-attn", "flash-attn-3", "llguidance", "xgrammar")


def machine_facts(device: str) -> MachineFacts:
    """Describe this machine. ``device`` is the device of the engine, as far as it is known."""
    return MachineFacts(
        host_cpu=_cpu_name(),
        cpus=os.cpu_count() or 1,
        memory_gib=round(_memory_bytes() / 2**30, 1),
        device=device,
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: found for name in _PACKAGES if (found := _version(name))},
    )


def peak_memory(pid: int) -> int | None:
    """Return the sum of the peak memory, in bytes, of a process and of its descendants that are still running.

    Return None if the system does not report it (it is read from /proc).
    """
    peaks = [_peak(process) for process in process_tree(pid)]
    return sum(peaks) or None


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and its descendants, whichever of a process's threads started them."""
    found = [pid]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the process has ended in the meantime
                found += [int(word) for word in children.read_text().split()]
    return found


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    if not status.is_file():
        return 0
    lines = (line.split() for line in status.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words and words[0] == "VmHWM:"), 0)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
