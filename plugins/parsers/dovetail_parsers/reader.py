"""Reading text that arrives in pieces: a parser is written as if it had all of it, and stops where the text does.

A reader's ``read`` is a generator. ``yield from self.next()`` is the next character, "" at the end; what is read is kept until
``accept`` or ``say``, so that a parse that fails gives its characters back.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, str, T]
"""A part of a parse that ends in a ``T``."""

END = ""
"""The character after the last."""

SPACE = frozenset(" \t\r\n")


class MalformedError(Exception):
    """The text cannot be what was expected; raised and caught within one parse."""


class TextReader(ABC):
    """Runs ``read`` over the text. Subclasses tell what they find as they find it."""

    def __init__(self) -> None:
        self._back: list[str] = []  # characters to be read again, last first
        self._kept: list[str] = []  # characters read since the last accept
        self._ended = False
        self._copying: tuple[re.Pattern[str], Callable[[str], None]] | None = None  # text that copy_until says unread
        self._run = self._start()
        next(self._run)

    def push(self, text: str) -> None:
        """More text."""
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
        """No more text."""
        self._ended = True
        for _ in self._run:
            pass

    def _start(self) -> Reading[None]:
        yield from self.read()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read to the end."""

    def next(self) -> Reading[str]:
        """The next character."""
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
        """The last character will be read again; at the end there is none to give back."""
        if self._kept:
            self._back.append(self._kept.pop())

    def accept(self) -> str:
        """What was read since the last time stays read; returns it."""
        text = "".join(self._kept)
        self._kept.clear()
        return text

    def give_back(self) -> None:
        """What was read since the last ``accept`` will be read again."""
        self._back.extend(reversed(self._kept))
        self._kept.clear()

    def first_of_kept(self) -> str:
        """Keep the first of the characters kept as read, return it, and give the others back."""
        kept = self.accept()
        self._back.extend(reversed(kept[1:]))
        return kept[:1]

    def peek(self) -> Reading[str]:
        """The next character, which stays unread."""
        char = yield from self.next()
        if char != END:
            self.unread()
        return char

    def space(self) -> Reading[str]:
        """Skip whitespace; returns the first character after it."""
        char = yield from self.next()
        while char != END and char in SPACE:
            char = yield from self.next()
        return char

    def skip_space(self) -> Reading[None]:
        """Skip whitespace; the first character after it stays unread."""
        if (yield from self.space()) != END:
            self.unread()

    def expect(self, text: str) -> Reading[None]:
        """Read exactly ``text``. Raises ``MalformedError`` at the first character that differs, which stays unread."""
        for wanted in text:
            yield from self.one_of(wanted)

    def one_of(self, chars: Collection[str]) -> Reading[str]:
        """One of these characters. Raises ``MalformedError``, with the character unread, for any other."""
        char = yield from self.next()
        if char not in chars or char == END:
            if char != END:
                self.unread()
            raise MalformedError(f"expected one of {sorted(chars)}, not {char!r}")
        return char

    def until(self, mark: str, limit: int) -> Reading[str]:
        """The text before ``mark``, which is read too. Raises ``MalformedError`` if it is longer than ``limit``."""
        text = ""
        while not text.endswith(mark):
            char = yield from self.next()
            if char == END or len(text) > limit + len(mark):
                raise MalformedError(f"expected {mark!r}")
            text += char
        return text.removesuffix(mark)

    def copy_until(self, emit: Callable[[str], None], *marks: str) -> Reading[str]:
        """Say text up to the first of ``marks``, which stays kept; "" at the end of the text, the only one without marks."""
        self.accept()
        finder = Finder(marks)
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


class Finder:
    """Looks for the first of a few marks, a character at a time; ``held`` characters may be the beginning of one."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._tail = ""

    def feed(self, char: str) -> str | None:
        """The mark that ``char`` ends, if it does."""
        self._tail += char
        for mark in self._marks:
            if self._tail.endswith(mark):
                return mark
        held = max((_overlap(self._tail, mark) for mark in self._marks), default=0)
        self._tail = self._tail[len(self._tail) - held :]
        return None

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a mark."""
        return len(self._tail)


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of ``text`` with which ``mark`` begins."""
    return next((n for n in range(min(len(text), len(mark)), 0, -1) if mark.startswith(text[-n:])), 0)
