"""Find where each n-gram of a growing text occurred last."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.types import IntArray

TOKEN = 4
"""The number of bytes of a token."""


class NgramIndex:
    """Find the last occurrence of the end of a text, in constant time per token of text.

    The key of an n-gram is the bytes of its tokens. Two generations of at most ``memory`` positions each bound the
    memory.
    """

    def __init__(self, lengths: range, memory: int) -> None:
        """Build an empty index for n-grams of these ``lengths``."""
        self._lengths = lengths
        self._memory = memory
        self._recent: dict[bytes, int] = {}  # n-gram: the position after it
        self._older: dict[bytes, int] = {}
        self._turn = memory  # the position at which the next generation begins
        self._indexed = 0  # n-grams that end at or before this position are in the index

    def find(self, ngram: bytes) -> int | None:
        """Return the position after the last occurrence of ``ngram`` that ``extend`` has added, or None."""
        return self._recent.get(ngram) or self._older.get(ngram)

    def extend(self, text: IntArray) -> None:
        """Add the n-grams that end before the end of ``text``, except those that would be dropped at once.

        ``text`` must begin with the text of the last call.
        """
        end = len(text) - 1
        start = max(self._indexed, end - 2 * self._memory)
        while start < end:
            if start >= self._turn:
                self._older, self._recent, self._turn = self._recent, {}, start + self._memory
            stop = min(end, self._turn)
            self._recent.update(ngrams_of(text, self._lengths, start, stop))
            start = stop
        self._indexed = max(self._indexed, end)


def ngrams_of(text: IntArray, lengths: range, start: int, stop: int) -> Iterator[tuple[bytes, int]]:
    """Yield the n-grams of ``text`` that end at a position in ``(start, stop]``, of each length that fits, with that
    position."""
    base = max(0, start + 1 - lengths[-1])
    data = text[base:stop].tobytes()
    for n in lengths:
        first, width = max(start + 1, n), n * TOKEN
        ends = range((first - base) * TOKEN, len(data) + 1, TOKEN)
        yield from zip([data[i - width : i] for i in ends], range(first, stop + 1), strict=True)
