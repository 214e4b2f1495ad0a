"""Find regular expressions in text that arrives in pieces, in time that is linear in the text whatever the expression.

An expression becomes a nondeterministic automaton with one state for each character that it names (Glushkov, "The
abstract theory of automata", 1961), and sets of states are the bits of an integer. Nothing backtracks.
"""

from __future__ import annotations

import functools
import re
import re._constants as sre  # pyright: ignore[reportMissingImports]
import re._parser as sre_parser  # pyright: ignore[reportMissingImports]
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

MAX_POSITIONS = 256
"""Limit the characters that the expressions of one request may name, with repetitions written out: ``(ab){3}`` names
six."""

_KEPT_STEPS = 1024
_KEPT_CHARS = 1024
_BEGIN = ""  # stands before the first character of the text; ``^`` matches it

_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    sre.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    sre.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}
_REFUSED = {
    sre.ASSERT: "look-ahead and look-behind",
    sre.ASSERT_NOT: "look-ahead and look-behind",
    sre.GROUPREF: "references to groups",
    sre.GROUPREF_EXISTS: "references to groups",
    sre.ATOMIC_GROUP: "atomic groups",
    sre.POSSESSIVE_REPEAT: "possessive repetitions",
}


class StopRegexError(ValueError):
    """Say why an expression cannot be a stop."""


class _Part(NamedTuple):
    """Describe the automaton of a part of an expression: whether the part matches the empty text, and the positions
    with which its matches may begin and end, as bits."""

    empty: bool
    first: int
    last: int


_EMPTY = _Part(True, 0, 0)


class StopRegexes:
    """Match several expressions at once. Immutable apart from its memory of earlier steps; see ``stop_regexes``.

    A state is a set of positions, as bits: those whose character was the last one of the text, in a match that is
    still possible or complete; of these, matches go on after the positions ``open``. ``start`` is the state before the
    first character, and ``longest`` the length of the longest match,
    or None if there is no limit.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises ``StopRegexError``."""
        self.patterns = tuple(patterns)
        self._tests: list[Callable[[str], bool] | None] = []  # None: the end of the text
        self._follow: list[int] = []
        parts, widths = zip(*[self._add(pattern) for pattern in patterns], strict=True)
        self._precede = _transposed(self._follow)
        ends = sum(1 << i for i, test in enumerate(self._tests) if test is None)
        self.open = sum(1 << i for i, follow in enumerate(self._follow) if follow & ~ends)
        self._first = functools.reduce(int.__or__, [part.first for part in parts])
        self._last = [self._closed(part.last) for part in parts]
        self._accepting = functools.reduce(int.__or__, self._last)
        self.longest: int | None = None if None in widths else max(width or 0 for width in widths)
        self._chars: dict[str, int] = {}
        self._steps: dict[tuple[int, int], int] = {}
        self.start = self._first & self._positions(_BEGIN)
        for pattern, part, last in zip(patterns, parts, self._last, strict=True):
            if part.empty or self.start & last:
                raise StopRegexError(f"{pattern!r:.80} matches the empty text, with which every output begins")

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        here = self._positions(char)
        found = self._steps.get((state, here))
        if found is None:
            found = (_union(self._follow, state) | self._first) & here
            if len(self._steps) >= _KEPT_STEPS:
                self._steps.clear()
            self._steps[state, here] = found
        return found

    def accepts(self, state: int) -> bool:
        """Return True if a match ends with the last character."""
        return bool(state & self._accepting)

    def match(self, state: int, text: str, whole: bool) -> tuple[str, int]:
        """Return the expression that matches at the end of ``text``, whose state is ``state``, and the length of its
        longest match there. If several match, take the one with the longest match. ``whole`` means that ``text``
        begins where the output begins."""
        ends = [(pattern, last) for pattern, last in zip(self.patterns, self._last, strict=True) if state & last]
        found = [(pattern, self._length(last, text, whole)) for pattern, last in ends]
        return max(found, key=lambda entry: entry[1])

    def _length(self, ends: int, text: str, whole: bool) -> int:
        """Return the length of the longest suffix of ``text`` that ends at a position of ``ends``."""
        longest, live = 0, ends
        for length, char in enumerate(reversed(text), 1):
            live &= self._positions(char)
            if live & self._first:
                longest = length
            live = _union(self._precede, live)
            if not live:
                return longest
        return len(text) if whole and live & self.start else longest

    # -- construction ------------------------------------------------------------------------------------------------

    def _add(self, pattern: str) -> tuple[_Part, int | None]:
        """Add the positions of an expression. Return its part, and the length of its longest match."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = sre_parser.parse(pattern)
            flags = parsed.state.flags
            if flags & re.MULTILINE:
                raise StopRegexError("the flag m cannot be used in a stop; write (^|\\n) for the beginning of a line")
            part = self._sequence(parsed, flags)
            longest = parsed.getwidth()[1]
        except RecursionError:
            raise StopRegexError(f"{pattern!r:.80} is nested too deeply") from None
        except (re.error, OverflowError) as error:
            raise StopRegexError(f"{pattern!r:.80} is no regular expression: {error}") from None
        return part, None if longest >= sre.MAXREPEAT else longest

    def _sequence(self, items: Iterable[Any], flags: int) -> _Part:
        part = _EMPTY
        for operator, argument in items:
            part = self._then(part, self._part(operator, argument, flags))
        return part

    def _then(self, a: _Part, b: _Part) -> _Part:
        for position in _bits(a.last):
            self._follow[position] |= b.first
        first = a.first | b.first if a.empty else a.first
        return _Part(a.empty and b.empty, first, a.last | b.last if b.empty else b.last)

    def _part(self, operator: Any, argument: Any, flags: int) -> _Part:
        if operator is sre.SUBPATTERN:
            _, added, removed, items = argument
            return self._sequence(items, (flags | added) & ~removed)
        if operator is sre.BRANCH:
            parts = [self._sequence(items, flags) for items in argument[1]]
            return functools.reduce(lambda a, b: _Part(a.empty or b.empty, a.first | b.first, a.last | b.last), parts)
        if operator is sre.MAX_REPEAT or operator is sre.MIN_REPEAT:
            low, high, items = argument
            return self._repeated(low, high, items, flags)
        if operator is sre.AT:
            return self._anchor(argument)
        if operator in _REFUSED:
            raise StopRegexError(f"{_REFUSED[operator]} cannot be used in a stop, because the text has not ended yet")
        return self._position(_test(operator, argument, flags))

    def _repeated(self, low: int, high: int, items: Any, flags: int) -> _Part:
        before = len(self._tests)
        part = self._sequence(items, flags) if high else _EMPTY
        if len(self._tests) == before:
            return _EMPTY
        unlimited = high >= sre.MAXREPEAT
        more = max(low, 1 if unlimited else high) - 1
        copies = [part, *(self._sequence(items, flags) for _ in range(more))]
        if unlimited:
            self._then(copies[-1], copies[-1])
        whole = _EMPTY
        for index, copy in enumerate(copies):
            whole = self._then(whole, copy._replace(empty=copy.empty or index >= low))
        return whole

    def _anchor(self, where: Any) -> _Part:
        if where in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            return self._position(lambda char: char == _BEGIN)
        if where in (sre.AT_END, sre.AT_END_STRING):
            return self._position(None)
        raise StopRegexError("\\b and \\B cannot be used in a stop, because the next character is not known yet")

    def _position(self, test: Callable[[str], bool] | None) -> _Part:
        if len(self._tests) >= MAX_POSITIONS:
            raise StopRegexError(
                f"the expressions name more than {MAX_POSITIONS} characters, with repetitions written out; make them "
                "shorter, or repeat without an upper limit (+ and *)"
            )
        self._tests.append(test)
        self._follow.append(0)
        bit = 1 << (len(self._tests) - 1)
        return _Part(False, bit, bit)

    def _closed(self, last: int) -> int:
        """Return the positions at which a match may end: of ``last``, those before an end of the text in place of it.
        The text of a stop ends where its match ends."""
        ends = sum(1 << i for i, test in enumerate(self._tests) if test is None)
        before = sum(1 << i for i, follow in enumerate(self._follow) if follow & ends & last)
        return last & ~ends | before

    def _positions(self, char: str) -> int:
        """Return the positions that ``char`` matches."""
        found = self._chars.get(char)
        if found is None:
            found = sum(1 << i for i, test in enumerate(self._tests) if test is not None and test(char))
            if len(self._chars) >= _KEPT_CHARS:
                self._chars.clear()
            self._chars[char] = found
        return found


class RegexFinder:
    """Find the first match of ``StopRegexes`` in text that arrives in pieces: the match that ends first."""

    def __init__(self, regexes: StopRegexes) -> None:
        self._regexes = regexes
        self._state = regexes.start
        self._length = 0  # characters so far
        self._live = 0  # characters since the last one after which no match could go on

    @property
    def pending(self) -> int:
        """Return the length of a suffix of the text so far that contains all beginnings of possible matches."""
        longest = self._regexes.longest
        return self._live if longest is None else min(self._live, longest - 1)

    def feed(self, text: str, may_stop: bool = True) -> int | None:
        """Search the next piece up to the end of the first match in it, and return the number of characters up to
        there; None if there is no match, or if ``may_stop`` is False."""
        regexes, state, live = self._regexes, self._state, self._live
        step, accepts, going_on, found = regexes.step, regexes.accepts, regexes.open, None
        for index, char in enumerate(text, 1):
            state = step(state, char)
            live = live + 1 if state & going_on else 0
            if may_stop and accepts(state):
                found = index
                break
        self._state, self._live = state, live
        self._length += len(text) if found is None else found
        return found

    def match(self, text: str) -> tuple[str, int]:
        """Return the expression that has matched, and the length of its match. ``text`` is the text up to the end of
        the match, from the first character that ``pending`` counted or an earlier one."""
        return self._regexes.match(self._state, text, len(text) >= self._length)


@functools.lru_cache(maxsize=32)
def stop_regexes(patterns: tuple[str, ...]) -> StopRegexes:
    """Return the automaton of these expressions, which requests share. Raises ``StopRegexError``."""
    return StopRegexes(patterns)


def _test(operator: Any, argument: Any, flags: int) -> Callable[[str], bool]:
    """Return a function that says whether a character matches."""
    if operator is sre.ANY:
        return bool if flags & re.DOTALL else lambda char: char not in ("\n", _BEGIN)
    matches = _listed(argument if operator is sre.IN else [(operator, argument)])
    if flags & re.ASCII and operator is sre.IN and any(kind is sre.CATEGORY for kind, _ in argument):
        raise StopRegexError("the flag a cannot be used in a stop; write the characters, as in [0-9]")
    if not flags & re.IGNORECASE:
        return lambda char: char != _BEGIN and matches(char)
    negated = operator is sre.NOT_LITERAL or (operator is sre.IN and argument[0][0] is sre.NEGATE)
    some = all if negated else any
    return lambda char: char != _BEGIN and some(matches(c) for c in {char, char.lower(), char.upper()} if len(c) == 1)


def _listed(items: Sequence[tuple[Any, Any]]) -> Callable[[str], bool]:
    """Return a function that says whether a character is one of ``items``."""
    negated = items[0][0] is sre.NEGATE
    literals = {chr(value) for kind, value in items if kind is sre.LITERAL}
    ranges = [value for kind, value in items if kind is sre.RANGE]
    categories = [_CATEGORIES[value] for kind, value in items if kind is sre.CATEGORY]
    if items[0][0] is sre.NOT_LITERAL:
        other = chr(items[0][1])
        return lambda char: char != other

    def among(char: str) -> bool:
        inside = char in literals or any(low <= ord(char) <= high for low, high in ranges)
        return (inside or any(test(char) for test in categories)) != negated

    return among


def _bits(value: int) -> Iterable[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def _union(rows: Sequence[int], chosen: int) -> int:
    """Return the union of the sets ``rows[i]`` for each i in the set ``chosen``."""
    found = 0
    for i in _bits(chosen):
        found |= rows[i]
    return found


def _transposed(rows: Sequence[int]) -> list[int]:
    found = [0] * len(rows)
    for i, row in enumerate(rows):
        for j in _bits(row):
            found[j] |= 1 << i
    return found
