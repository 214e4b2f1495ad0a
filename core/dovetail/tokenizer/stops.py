"""Find stop strings and stop expressions in text that arrives in pieces, in one pass that reads each character once."""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dovetail.stop_regex import RegexFinder, stop_regexes


class StopHit(NamedTuple):
    """Describe a stop string that was found. ``text`` is the stop string, which ends after ``end`` characters of the
    piece that was fed."""

    text: str
    end: int


class StopFinder:
    """Find stop strings; a piece costs O(new characters).

    If stop strings overlap, the one that ends first is found; of stop strings that end at the same character, the
    longest. The result therefore does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _automaton(tuple(stops))
        self._state = 0

    @property
    def pending(self) -> int:
        """Return the length of the longest suffix of the text so far that may be the beginning of a stop string."""
        return self._automaton.depth[self._state]

    def feed(self, text: str) -> StopHit | None:
        """Search the next piece up to the end of the first stop string in it, and return that stop string; None if
        there is none. The caller must feed the rest of the piece again."""
        automaton, state, index = self._automaton, self._state, 0
        while index < len(text):
            if state == 0:  # most text cannot start a stop string: re skips it faster
                start = automaton.first.search(text, index)
                if start is None:
                    break
                index = start.start()
            state = automaton.next(state, text[index])
            index += 1
            hit = automaton.hit[state]
            if hit is not None:
                self._state = state
                return StopHit(hit, index)
        self._state = state
        return None


class StopCutter:
    """Cut a text at its first stop string or match of a stop expression, and hold back what may be the beginning of
    one.

    ``matched`` is the stop string, or the expression, at which the text was cut, or None. With ``include``, the text
    keeps what has matched. What ends first is found; of those that end at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, regexes: Sequence[str] = ()) -> None:
        self._stops, self._patterns = tuple(stops), tuple(regexes)
        self._begin()
        self._include = include
        self._held: list[str] = []
        self._held_len = 0
        self.matched: str | None = None

    def _begin(self) -> None:
        self._finder = StopFinder(self._stops) if self._stops else None
        self._regexes = RegexFinder(stop_regexes(self._patterns)) if self._patterns else None

    def feed(self, text: str, may_stop: bool = True) -> str:
        """Add text and return the text that has become final. If ``may_stop`` is False, stop strings that end in
        ``text`` are ordinary text. Must not be called after a stop string has matched."""
        hit = self._find(text) if self._finder is not None else None
        if not may_stop:
            rest = text
            while hit is not None:
                rest = rest[hit.end :]
                hit = self._find(rest)
        end = self._regexes.feed(text, may_stop) if self._regexes is not None else None
        self._held.append(text)
        self._held_len += len(text)
        if hit is not None or end is not None:
            return self._cut(len(text), hit, end)
        final = self._held_len - self._pending
        if final <= 0:
            return ""
        whole = "".join(self._held)
        self._held, self._held_len = [whole[final:]], self._held_len - final
        return whole[:final]

    def _find(self, text: str) -> StopHit | None:
        return self._finder.feed(text) if self._finder is not None else None

    @property
    def _pending(self) -> int:
        strings = self._finder.pending if self._finder is not None else 0
        return max(strings, self._regexes.pending if self._regexes is not None else 0)

    def _cut(self, fed: int, hit: StopHit | None, end: int | None) -> str:
        """Return the final text. The last ``fed`` characters were searched: ``hit`` is the first stop string in them,
        ``end`` where the first match of an expression ends."""
        whole, before = "".join(self._held), self._held_len - fed
        self._held, self._held_len = [], 0
        found: list[tuple[int, int, str]] = []
        if hit is not None:
            found.append((-hit.end, len(hit.text), hit.text))
        if end is not None and self._regexes is not None:
            pattern, length = self._regexes.match(whole[: before + end])
            found.append((-end, length, pattern))
        negative, length, self.matched = max(found, key=lambda entry: entry[:2])
        last = before - negative
        return whole[:last] if self._include else whole[: last - length]

    def finish(self) -> str:
        """Return the text that was held back, because the text ends here or is interrupted. The next ``feed`` begins a
        new text; a stop string cannot begin in this text and end in the new one."""
        self._begin()
        held = "".join(self._held)
        self._held, self._held_len = [], 0
        return held


class _Automaton:
    """Match several strings as in Aho and Corasick, "Efficient string matching" (1975).

    States are prefixes of the stop strings; state 0 is the empty prefix.

    ``depth[s]`` is the length of state s, ``hit[s]`` the longest stop string that is a suffix of it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depth = [0]
        self.hit: list[str | None] = [None]
        self._edges: list[dict[str, int]] = [{}]
        self._fail = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        self.first = re.compile("[" + "".join(re.escape(char) for char in self._edges[0]) + "]")

    def next(self, state: int, char: str) -> int:
        """Return the longest suffix of the text that is a state, after one more character."""
        while state and char not in self._edges[state]:
            state = self._fail[state]
        return self._edges[state].get(char, 0)

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._edges[node]:
                self._edges[node][char] = len(self._edges)
                self._edges.append({})
                self.depth.append(self.depth[node] + 1)
                self.hit.append(None)
                self._fail.append(0)
            node = self._edges[node][char]
        self.hit[node] = stop

    def _link(self) -> None:
        """Set the fail link of every node, breadth first, to its longest proper suffix that is a node as well."""
        queue = deque(self._edges[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._edges[node].items():
                self._fail[child] = self.next(self._fail[node], char)
                if self.hit[child] is None:
                    self.hit[child] = self.hit[self._fail[child]]
                queue.append(child)


@functools.lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Return a shared automaton. The n outputs of a request have the same stop strings, and so do most requests of an
    application."""
    return _Automaton(stops)
