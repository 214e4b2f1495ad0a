"""Remember after which n-grams drafts were right."""

from __future__ import annotations

_MAX = 2


class NgramConfidence:
    """Count for each n-gram whether drafts after it were right, like the saturating counters of branch predictors.

    A counter is between 0 and 2. It rises by one when the first token of a draft after the n-gram was right, or would
    have been, and falls by one when it was wrong. Drafts are made only where it is not 0.

    Two generations of at most ``limit`` counters each bound the memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._recent: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}

    def counter(self, key: bytes, start: int) -> int:
        """Return the counter of ``key``, or ``start`` if there is none yet."""
        value = self._recent.get(key)
        return self._older.get(key, start) if value is None else value

    def update(self, key: bytes, start: int, right: bool) -> None:
        """Record whether the first token of a draft after ``key`` was right. ``start`` is as in ``counter``."""
        value = self.counter(key, start)
        if len(self._recent) >= self._limit:
            self._older, self._recent = self._recent, {}
        self._recent[key] = min(value + 1, _MAX) if right else max(value - 1, 0)
