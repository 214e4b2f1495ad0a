"""Read text that arrives in pieces, with parsers that are written as if they had the whole text.

``TextReader.read`` is a generator that pauses where the text so far ends. ``yield from self.next()`` evaluates to the
next character, or to "" at the end of the text. Characters that were read are kept until ``accept`` is called, so that
a parse that fails can give them back.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]
"""Describe a part of a parse, a generator that returns a ``T``."""

END = ""
"""Stand for the end of the text, where ``next`` returns no character."""

SPACE = frozenset(" \t\r\n")


class MalformedError(Exception):
    """Raised when the text is not what the parse expects. Caught within the same parse."""


class TextReader(ABC):
    """Run ``read`` over the text. Subclasses implement ``read`` and emit each part of their result once it is
    certain."""

    def __init__(self) -> None:
        self._back: list[str] = []  # characters to read again, the next one last
        self._kept: list[str] = []  # characters that were read since the last accept
        self._ended = False
        # a pattern of text that copy_until emits without reading it character by character, and the function to call
        self._copying: tuple[re.Pattern[str], Callable[[str], None]] | None = None
        self._run = self._start()
        next(self._run)

    def push(self, text: str) -> None:
        """Add text and read it."""
        at = 0
        while at < len(text):
            if self._copying and not self._kept:
                plain, emit = self._copying
                run = plain.match(text, at)
                if run:
                    emit(run[0])
                    at = run.end()
                    continue
            self._run.send(text[at])
            at += 1

    def end(self) -> None:
        """End the text."""
        self._ended = True
        for _ in self._run:
            pass

    def _start(self) -> Reading[None]:
        yield from self.read()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read the text to its end."""

    def next(self) -> Reading[str]:
        """Read the next character, "" at the end of the text."""
        if self._back:
            char = self._back.pop()
        elif self._ended:
            return END
        else:
            char = yield
            if self._ended:
                return END
        self._kept.append(char)
        return char

    def unread(self) -> None:
        """Give the last character back, so that it is read again. Does nothing if no character is kept, as at the end
        of the text."""
        if self._kept:
            self._back.append(self._kept.pop())

    def accept(self) -> str:
        """Drop the kept characters, and return them as a text."""
        text = "".join(self._kept)
        self._kept.clear()
        return text

    def give_back(self) -> None:
        """Give all kept characters back, so that they are read again."""
        self._back.extend(reversed(self._kept))
        self._kept.clear()

    def first_of_kept(self) -> str:
        """Drop the first kept character and return it. Give the other kept characters back."""
        kept = self.accept()
        self._back.extend(reversed(kept[1:]))
        return kept[:1]

    def peek(self) -> Reading[str]:
        """Return the next character without reading it."""
        char = yield from self.next()
        if char != END:
            self.unread()
        return char

    def space(self) -> Reading[str]:
        """Skip whitespace, and read and return the first character after it."""
        char = yield from self.next()
        while char != END and char in SPACE:
            char = yield from self.next()
        return char

    def skip_space(self) -> Reading[None]:
        """Skip whitespace; the first character after it is not read."""
        if (yield from self.space()) != END:
            self.unread()

    def expect(self, text: str) -> Reading[None]:
        """Read exactly ``text``. Raises ``MalformedError`` at the first character that differs, which is not read."""
        for char in text:
            yield from self.one_of(char)

    def one_of(self, chars: Collection[str]) -> Reading[str]:
        """Read and return one of ``chars``. Raises ``MalformedError`` for any other character, which is not read."""
        char = yield from self.next()
        if char not in chars or char == END:
            if char != END:
                self.unread()
            raise MalformedError(f"expected one of {sorted(chars)}, not {char!r}")
        return char

    def until(self, mark: str, limit: int) -> Reading[str]:
        """Read the text before ``mark`` and the mark, and return the text. Raises ``MalformedError`` if it is longer
        than ``limit``."""
        text = ""
        while not text.endswith(mark):
            char = yield from self.next()
            if char == END or len(text) > limit + len(mark):
                raise MalformedError(f"expected {mark!r}")
            text += char
        return text.removesuffix(mark)

    def copy_until(self, emit: Callable[[str], None], *marks: str) -> Reading[str]:
        """Emit text up to the first of ``marks``, and return that mark; return "" at the end of the text. The
        characters of the mark stay kept. Without marks, the text is emitted to its end."""
        self.accept()
        finder = MarkFinder(marks)
        self._copying = _none_of(frozenset(mark[0] for mark in marks)), emit
        while True:
            char = yield from self.next()
            if char == END:
                emit(self.accept())
                return END
            found = finder.feed(char)
            done = len(self._kept) - (len(found) if found else finder.held)
            if done:
                emit("".join(self._kept[:done]))
                del self._kept[:done]
            if found:
                self._copying = None
                return found


@functools.cache
def _none_of(chars: frozenset[str]) -> re.Pattern[str]:
    return re.compile(f"[^{re.escape(''.join(sorted(chars)))}]+" if chars else r"(?s:.)+")


class MarkFinder:
    """Find the first of a few marks, one character at a time."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._tail = ""

    def feed(self, char: str) -> str | None:
        """Add a character, and return the mark that ends with it; None if there is none."""
        self._tail += char
        for mark in self._marks:
            if self._tail.endswith(mark):
                return mark
        held = max((overlap(self._tail, mark) for mark in self._marks), default=0)
        self._tail = self._tail[len(self._tail) - held :]
        return None

    @property
    def held(self) -> int:
        """Return the number of last characters that may be the beginning of a mark."""
        return len(self._tail)


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``mark``."""
    return next((n for n in range(min(len(text), len(mark)), 0, -1) if mark.startswith(text[-n:])), 0)
