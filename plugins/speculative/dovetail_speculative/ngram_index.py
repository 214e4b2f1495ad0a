"""Where each n-gram of a growing text occurred last."""

from __future__ import annotations

import numpy as np

from dovetail.types import IntArray

_PRIME = 0x9E3779B97F4A7C15  # odd, so that no power of it vanishes modulo 2**64
_MASK = (1 << 64) - 1
_BULK = 64  # from this many new tokens on, numpy beats a loop


class NgramIndex:
    """Finds the last occurrence of a text's own end, in constant time per token of text.

    The n-gram of length n that ends at ``end`` has the key  sum of (token[end - i] + 1) * PRIME ** i for i = 1 .. n,
    modulo 2 ** 64, so that one pass backwards gives the keys of all lengths. Equal keys of other tokens are told apart
    by comparing the tokens. Two generations of at most ``memory`` positions each bound the memory.
    """

    def __init__(self, min_ngram: int, max_ngram: int, memory: int) -> None:
        self._lengths = range(min_ngram, max_ngram + 1)
        self._weights = [pow(_PRIME, i, 1 << 64) for i in range(max_ngram + 1)]
        self._memory = memory
        self._recent: dict[int, int] = {}  # key: the position after the n-gram
        self._older: dict[int, int] = {}
        self._turn = memory  # where the next generation begins
        self._indexed = 0  # n-grams that end at or before this position are known

    def find(self, text: IntArray) -> int | None:
        """The position after the last earlier occurrence of the longest n-gram that ends ``text``; None if there is
        none. ``text`` must begin with what it was at the last call."""
        end = len(text)
        self._extend(text, end - 1)
        keys = self._keys(text[max(0, end - self._lengths[-1]) :].tolist())
        for n, key in zip(reversed(self._lengths[: len(keys)]), reversed(keys), strict=True):
            at = self._recent.get(key) or self._older.get(key)
            if at is not None and np.array_equal(text[at - n : at], text[end - n :]):
                return at
        return None

    def _extend(self, text: IntArray, end: int) -> None:
        """Learn the n-grams that end at or before ``end``, but for those that would be forgotten at once."""
        start = max(self._indexed, end - 2 * self._memory)
        while start < end:
            if start >= self._turn:
                self._older, self._recent, self._turn = self._recent, {}, start + self._memory
            stop = min(end, self._turn)
            learn = self._learn_bulk if stop - start >= _BULK else self._learn
            learn(text, start, stop)
            start = stop
        self._indexed = max(self._indexed, end)

    def _learn(self, text: IntArray, start: int, stop: int) -> None:
        longest = self._lengths[-1]
        begin = max(0, start + 1 - longest)
        tokens = text[begin:stop].tolist()
        for end in range(start + 1, stop + 1):
            for key in self._keys(tokens[max(0, end - longest - begin) : end - begin]):
                self._recent[key] = end

    def _learn_bulk(self, text: IntArray, start: int, stop: int) -> None:
        ends = np.arange(start + 1, stop + 1)
        keys = np.zeros(len(ends), dtype=np.uint64)
        values = text[:stop].astype(np.uint64) + np.uint64(1)
        for n in range(1, self._lengths[-1] + 1):
            first = max(0, n - ends[0])  # shorter texts have no n-gram
            keys[first:] += values[ends[first:] - n] * np.uint64(self._weights[n])
            if n in self._lengths:
                self._recent.update(zip(keys[first:].tolist(), ends[first:].tolist(), strict=True))

    def _keys(self, tokens: list[int]) -> list[int]:
        """Keys of the n-grams that end ``tokens``, of each length that fits, shortest first."""
        keys, key = [], 0
        for n, token in enumerate(reversed(tokens), 1):
            key = (key + (token + 1) * self._weights[n]) & _MASK
            if n in self._lengths:
                keys.append(key)
        return keys
