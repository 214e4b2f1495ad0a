"""After which n-grams a draft has come to nothing."""

from __future__ import annotations

_MOST = 2


class Doubts:
    """A mark for each n-gram after which a draft was made, or would have been: one more for a first token that came true, one
    less for another, from 0 to 2. Drafts are made where it is not 0, as branch predictors do it.

    Two generations of at most ``limit`` marks each bound the memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._recent: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}

    def mark(self, key: bytes, start: int) -> int:
        """The mark of ``key``; ``start`` if there is none yet."""
        mark = self._recent.get(key)
        return self._older.get(key, start) if mark is None else mark

    def settle(self, key: bytes, start: int, right: bool) -> None:
        """What came of a draft after ``key``."""
        mark = self.mark(key, start)
        if len(self._recent) >= self._limit:
            self._older, self._recent = self._recent, {}
        self._recent[key] = min(mark + 1, _MOST) if right else max(mark - 1, 0)
