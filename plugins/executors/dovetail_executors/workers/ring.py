"""Pass messages from one process to one or several others through shared memory.

    word 0           number of messages that the writer has published
    words 8 + 8 i    of reader i: number of messages that it has taken, 1 while it is about to block, number of messages
                     that it has finished, number of plans that it has finished
    then             SLOTS slots; message n is in slot n % SLOTS: its kind, tag, length and bytes
    then             the bytes of one message that is longer than a slot

The writer waits while a reader has not taken the message that was in the slot before. A message that is longer than a
slot is written behind the slots, for which the writer waits until every reader has taken the one before it.

A reader that finds no message spins for a while, then sets its word and blocks in ``poll`` on a pipe. The writer
publishes a message, and wakes the readers whose word is set. Between the two accesses of each side stands a full memory
barrier, so that one of them sees what the other has written. Loads and stores otherwise keep their order, which the
probe of ``workers`` checks by the name of the processor.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from dovetail_executors.workers.memory import AnonymousMemory

SLOTS = 16
SLOT_BYTES = 1 << 16
_WORDS = 4096  # bytes of the words before the slots
_HEAD = struct.Struct("<qqq")  # kind, tag, length
_LONG = _WORDS + SLOTS * SLOT_BYTES

_barrier = threading.Lock()


def memory_barrier() -> None:
    """Let no load or store pass this point. Taking a lock does this on x86-64, where it is one locked instruction."""
    with _barrier:
        pass


class RingMessage(NamedTuple):
    """Hold a message that was taken: its number (from 1), its kind, its tag (a number of the sender's), and its
    bytes."""

    number: int
    kind: int
    tag: int
    data: bytearray


def create_ring() -> AnonymousMemory:
    """Return the memory of a ring without messages."""
    return AnonymousMemory.create(_LONG)


def _taken(reader: int) -> int:
    return 8 + 8 * reader


class RingWriter:
    """Publish messages for ``readers`` processes. ``wakes [readers]`` are the pipes on which they block."""

    def __init__(self, memory: AnonymousMemory, wakes: Sequence[int]) -> None:
        self._memory, self._wakes = memory, wakes
        self._words = memory.view[:_WORDS].cast("q")
        self._slots = memory.view
        self._readers = range(len(wakes))
        self._long = 0  # number of the last message behind the slots; one higher if that was interrupted

    @property
    def published(self) -> int:
        """Return the number of messages that were published."""
        return self._words[0]

    def put(self, kind: int, tag: int, data: bytes, wait: Callable[[], None]) -> int:
        """Publish a message and return its number. ``wait`` is called again and again while a reader has no place for
        it; it raises if this takes too long. After an exception or an interrupt ``published`` says whether the message
        was published."""
        number = self.published + 1
        length = len(data)
        if length <= SLOT_BYTES - _HEAD.size:
            self._wait_for(number - SLOTS, wait)
            start = _WORDS + number % SLOTS * SLOT_BYTES
            _HEAD.pack_into(self._slots, start, kind, tag, length)
            self._slots[start + _HEAD.size : start + _HEAD.size + length] = data
        else:
            self._wait_for(max(number - SLOTS, min(self._long, self.published)), wait)
            self._memory.grow(_LONG + length)
            start = _WORDS + number % SLOTS * SLOT_BYTES
            _HEAD.pack_into(self._slots, start, kind, tag, length)
            self._memory.view[_LONG : _LONG + length] = data
            self._long = number
        self._words[0] = number
        memory_barrier()
        for reader in self._readers:
            if self._words[_taken(reader) + 1]:
                wake(self._wakes[reader])
        return number

    def _wait_for(self, number: int, wait: Callable[[], None]) -> None:
        """Wait until every reader has taken message ``number``."""
        for reader in self._readers:
            while self._words[_taken(reader)] < number:
                wait()

    def finished(self, reader: int) -> int:
        """Return the number of messages that a reader has finished."""
        return self._words[_taken(reader) + 2]

    def plans(self, reader: int) -> int:
        """Return the number of the last plan that a reader has finished."""
        return self._words[_taken(reader) + 3]


class RingReader:
    """Take the messages of a ring, as its reader number ``reader``."""

    def __init__(self, memory: AnonymousMemory, reader: int = 0) -> None:
        self._memory = memory
        self._words = memory.view[:_WORDS].cast("q")
        self._slots = memory.view
        self._place = _taken(reader)
        self.number = self._words[self._place]

    @property
    def waiting(self) -> bool:
        """Return True if there is a message to take."""
        return self._words[0] > self.number

    def take(self) -> RingMessage | None:
        """Return the next message, or None if there is none."""
        if self._words[0] <= self.number:
            return None
        number = self.number + 1
        start = _WORDS + number % SLOTS * SLOT_BYTES
        kind, tag, length = _HEAD.unpack_from(self._slots, start)
        if length <= SLOT_BYTES - _HEAD.size:
            data = bytearray(self._slots[start + _HEAD.size : start + _HEAD.size + length])
        else:
            self._memory.map(_fitting(_LONG + length))
            data = bytearray(self._memory.view[_LONG : _LONG + length])
        self._words[self._place] = self.number = number
        return RingMessage(number, kind, tag, data)

    def finish(self) -> None:
        """State that the message that was taken last is finished."""
        self._words[self._place + 2] = self.number

    def finish_plan(self, number: int) -> None:
        """State that the plan ``number`` is finished."""
        self._words[self._place + 3] = number

    def announce(self, blocks: bool) -> None:
        """State whether this reader is about to block. The caller must look for messages once more in between."""
        self._words[self._place + 1] = int(blocks)
        memory_barrier()


def _fitting(size: int) -> int:
    return 1 << (size - 1).bit_length()


def wake(pipe: int) -> None:
    """Wake the process that blocks on the other end of ``pipe``. It may have ended."""
    with suppress(BlockingIOError, BrokenPipeError):  # it has enough to read, or has ended, which is noticed elsewhere
        os.write(pipe, b"\0")


def drain(pipe: int) -> bool:
    """Read everything from a pipe that does not block. Return False if its other end is closed."""
    try:
        while True:
            data = os.read(pipe, 4096)
            if not data:
                return False
            if len(data) < 4096:
                return True
    except BlockingIOError:
        return True


def spin(ready: Callable[[], bool], seconds: float) -> bool:
    """Call ``ready`` again and again for ``seconds``, and return True as soon as it does. Other threads may run in
    between."""
    end = time.perf_counter() + seconds
    while not ready():
        if time.perf_counter() >= end:
            return False
        time.sleep(0)
    return True
