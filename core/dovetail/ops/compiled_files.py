"""Find compiled files in the caches of Triton and FlashInfer that were cut, for example by a full disk. Loading one could
end the process with SIGBUS; without it, the kernel is compiled again."""

from __future__ import annotations

import importlib.util
import logging
import os
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dovetail.ops.triton.kernel_cache import cache_directory

log = logging.getLogger(__name__)

_SETTLED_SECONDS = 30.0
"""Leave files alone that were written less than this time ago: another process may still write them."""


def remove_cut_kernels() -> None:
    """Remove cut files from the caches of Triton and FlashInfer, and log them."""
    files = [*cache_directory().glob("*/*.so"), *cache_directory().glob("*/*.cubin")]
    if importlib.util.find_spec("flashinfer"):
        base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
        files += (base / ".cache" / "flashinfer").glob("*/*/cached_ops/*/*.so")
    for file in remove_cut(files):
        log.warning("%s was cut, for example by a full disk; it is removed, and its kernel is compiled again", file)


def remove_cut(files: Iterable[Path]) -> list[Path]:
    """Remove those of ``files`` that are no whole ELF files, and return them. Files that cannot be read or removed stay."""
    removed: list[Path] = []
    for file in files:
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > _SETTLED_SECONDS and not is_whole(file):
                file.unlink()
                removed.append(file)
    return removed


def is_whole(file: Path) -> bool:
    """Return True if ``file`` is a 64-bit ELF file, and as long as its headers say (System V ABI, chapter 4). Its content
    is not checked. Raises ``OSError``."""
    with file.open("rb") as content:
        size = os.fstat(content.fileno()).st_size
        head = content.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            return False
        segments, sections = struct.unpack_from("<QQ", head, 32)
        segment_size, num_segments, section_size, num_sections = struct.unpack_from("<HHHH", head, 54)
        ends = [segments + segment_size * num_segments, sections + section_size * num_sections]
        if max(ends) > size or (num_segments and segment_size < 56):
            return False
        content.seek(segments)
        table = content.read(segment_size * num_segments)
        for start in range(0, len(table), segment_size):
            offset, _, _, length = struct.unpack_from("<QQQQ", table, start + 8)
            ends.append(offset + length)
    return max(ends) <= size
