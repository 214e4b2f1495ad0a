"""Define languages whose prefixes are known byte by byte, as the reference of grammar backends.

Regular languages are expressions with derivatives (Brzozowski 1964): what may follow a byte is again an expression, and
it is ``None`` exactly if nothing may follow. Nothing here parses a regex, so the reference shares no interpretation of
regexes with a backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


class Language(ABC):
    """Represent a state, which is the set of texts that may follow. Immutable and hashable."""

    @property
    @abstractmethod
    def ends(self) -> bool:
        """Return true if the text may end here."""

    @abstractmethod
    def after(self, byte: int) -> Language | None:
        """Return what may follow this byte, or None if no text continues with it."""


def follow(state: Language | None, data: bytes) -> Language | None:
    """Return what may follow ``data``, or None if no text begins with it."""
    for byte in data:
        state = state and state.after(byte)
    return state


@dataclass(frozen=True, slots=True)
class Bytes(Language):
    """Match one byte out of a set, or the empty text if ``options`` is None."""

    options: frozenset[int] | None

    @property
    def ends(self) -> bool:
        return self.options is None

    def after(self, byte: int) -> Language | None:
        return EMPTY if self.options is not None and byte in self.options else None


EMPTY = Bytes(None)


@dataclass(frozen=True, slots=True)
class Then(Language):
    """Match a text of ``first``, then a text of ``second``."""

    first: Language
    second: Language

    @property
    def ends(self) -> bool:
        return self.first.ends and self.second.ends

    def after(self, byte: int) -> Language | None:
        here = self.first.after(byte)
        there = self.second.after(byte) if self.first.ends else None
        return _either(here and _then(here, self.second), there)


@dataclass(frozen=True, slots=True)
class Either(Language):
    """Match a text of any option."""

    options: frozenset[Language]

    @property
    def ends(self) -> bool:
        return any(option.ends for option in self.options)

    def after(self, byte: int) -> Language | None:
        return _either(*(option.after(byte) for option in self.options))


@dataclass(frozen=True, slots=True)
class Star(Language):
    """Match any number of texts of one language."""

    part: Language

    @property
    def ends(self) -> bool:
        return True

    def after(self, byte: int) -> Language | None:
        rest = self.part.after(byte)
        return rest and _then(rest, self)


@dataclass(frozen=True, slots=True)
class Nested(Language):
    """Match ``opening * n + middle + closing * n`` for every n of at least 0, which is not a regular language."""

    opening: bytes
    middle: bytes
    closing: bytes
    depth: int = 0
    rest: bytes | None = None

    @property
    def ends(self) -> bool:
        return self.rest == b""

    def after(self, byte: int) -> Language | None:
        if self.rest is None and byte == self.opening[0]:
            return Nested(self.opening, self.middle, self.closing, self.depth + 1)
        rest = self.middle + self.closing * self.depth if self.rest is None else self.rest
        return Nested(self.opening, self.middle, self.closing, 0, rest[1:]) if rest[:1] == bytes([byte]) else None


def _then(first: Language, second: Language) -> Language:
    return second if first == EMPTY else Then(first, second)


def _either(*options: Language | None) -> Language | None:
    left = frozenset(option for option in options if option is not None)
    return (next(iter(left)) if len(left) == 1 else Either(left)) if left else None


def seq(*parts: Language | str) -> Language:
    """Return the concatenation of the parts."""
    whole: Language = EMPTY
    for part in reversed(parts):
        whole = _then(text(part) if isinstance(part, str) else part, whole)
    return whole


def text(value: str) -> Language:
    """Return the language of only this text, in UTF-8."""
    whole: Language = EMPTY
    for byte in reversed(value.encode()):
        whole = _then(Bytes(frozenset({byte})), whole)
    return whole


def any_of(*parts: Language | str) -> Language:
    """Return the union of the parts."""
    whole = _either(*(text(part) if isinstance(part, str) else part for part in parts))
    assert whole is not None
    return whole


def maybe(part: Language | str) -> Language:
    """Return the part or the empty text."""
    return any_of(part, EMPTY)


def chars(spans: str) -> Language:
    """Return one ASCII character out of spans: ``"az09"`` is a to z and 0 to 9."""
    pairs = zip(spans[::2], spans[1::2], strict=True)
    return Bytes(frozenset(code for low, high in pairs for code in range(ord(low), ord(high) + 1)))


def times(part: Language, low: int, high: int) -> Language:
    """Return ``low`` to ``high`` repetitions of the part."""
    whole: Language = EMPTY
    for index in range(high):
        whole = _then(part, whole) if index >= high - low else any_of(_then(part, whole), EMPTY)
    return whole


def _span(low: int, high: int) -> Language:
    return Bytes(frozenset(range(low, high + 1)))


def any_char(but: str = "") -> Language:
    """Return one character of valid UTF-8 (RFC 3629, no surrogates) that is not one of the ASCII characters of ``but``."""
    tail = _span(0x80, 0xBF)
    return any_of(
        Bytes(frozenset(range(0x80)) - frozenset(but.encode())),
        seq(_span(0xC2, 0xDF), tail),
        seq(_span(0xE0, 0xE0), _span(0xA0, 0xBF), tail),
        seq(any_of(_span(0xE1, 0xEC), _span(0xEE, 0xEF)), tail, tail),
        seq(_span(0xED, 0xED), _span(0x80, 0x9F), tail),
        seq(_span(0xF0, 0xF0), _span(0x90, 0xBF), tail, tail),
        seq(_span(0xF1, 0xF3), tail, tail, tail),
        seq(_span(0xF4, 0xF4), _span(0x80, 0x8F), tail, tail),
    )
