"""Finding stop strings in text that arrives in pieces: one pass, each character looked at once."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopHit(NamedTuple):
    """A stop string was found: it is ``text``, and ends after ``end`` characters of the piece that was fed."""

    text: str
    end: int


class StopFinder:
    """An Aho-Corasick automaton (Aho and Corasick, 1975) over the stop strings.

    ``pending`` is the length of the longest suffix of the text so far that may become a stop string. Where two stop
    strings overlap, the one that ends first is found, and of those that end together the longest; so the answer does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._hit: list[str | None] = [None]
        self._fail = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        self._first = re.compile("[" + "".join(re.escape(char) for char in self._edges[0]) + "]")
        self._state = 0

    @property
    def pending(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, text: str) -> StopHit | None:
        """Look at the next piece, up to the end of the first stop string in it; what follows has not been looked at."""
        index = 0
        while index < len(text):
            if self._state == 0:  # most text cannot start a stop string: skip it at the speed of re
                start = self._first.search(text, index)
                if start is None:
                    return None
                index = start.start()
            self._advance(text[index])
            index += 1
            hit = self._hit[self._state]
            if hit is not None:
                return StopHit(hit, index)
        return None

    def _advance(self, char: str) -> None:
        state = self._state
        while state and char not in self._edges[state]:
            state = self._fail[state]
        self._state = self._edges[state].get(char, 0)

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._edges[node]:
                self._edges[node][char] = len(self._edges)
                self._edges.append({})
                self._depth.append(self._depth[node] + 1)
                self._hit.append(None)
                self._fail.append(0)
            node = self._edges[node][char]
        self._hit[node] = stop

    def _link(self) -> None:
        """Breadth first: the fail link of a node is the longest proper suffix that is a node as well."""
        queue = deque(self._edges[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._edges[node].items():
                fallback = self._fail[node]
                while fallback and char not in self._edges[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._edges[fallback].get(char, 0)
                if self._hit[child] is None:
                    self._hit[child] = self._hit[self._fail[child]]
                queue.append(child)
