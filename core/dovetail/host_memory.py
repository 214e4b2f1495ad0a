"""Read how much memory this machine has, and how much of it this process may use."""

from __future__ import annotations

from pathlib import Path


def meminfo() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def memory_limit() -> int | None:
    """Return the limit that a container sets (cgroup v2 or v1), None if there is none."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def usable_memory() -> int | None:
    """Return the bytes of memory of this machine, or of the container if its limit is lower; None if that is not known."""
    known = [size for size in (meminfo().get("MemTotal"), memory_limit()) if size is not None]
    return min(known, default=None)
