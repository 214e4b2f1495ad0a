"""Share memory between processes without a name that could be left behind."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class AnonymousMemory:
    """Map memory that other processes map too. It has no entry in a file system: the kernel frees it when the last
    process that has it open ends, in whatever way.

    A child process gets the descriptor ``fd`` when it is started. The memory can grow; views of it stay valid.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._map = mmap.mmap(fd, size)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> AnonymousMemory:
        """Return new memory of ``size`` bytes, which are zeros. Untouched pages take no memory."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("dovetail")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, size)
        return cls(fd, size)

    def grow(self, size: int) -> None:
        """Enlarge the memory to at least ``size`` bytes."""
        if size > self.size:
            size = 1 << (size - 1).bit_length()
            os.ftruncate(self.fd, size)
            self.map(size)

    def map(self, size: int) -> None:
        """Map ``size`` bytes, to which another process has enlarged the memory."""
        if size > self.size:
            mapping = mmap.mmap(self.fd, size)
            self.bytes, self.view = np.frombuffer(mapping, np.uint8), memoryview(mapping)
            self._map, self.size = mapping, size  # last: an interrupt before this has no effect

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped while there are views of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
