"""Measure for how long an engine process has given no sign of life."""

from __future__ import annotations

_LONGEST_INTERVAL = 5.0


class Heartbeat:
    """Measure silence. The owner calls ``heard`` for every message of the engine and ``tick`` every ``interval`` seconds.

    Every message counts, and an engine that has nothing to send answers the owner's pings between two steps, so silence means
    that one step, or the whole process, stands still. Time in which the owner itself was stopped does not count.
    """

    def __init__(self, bound: float) -> None:
        """``bound`` is the silence in seconds that the owner must notice."""
        self.interval = min(_LONGEST_INTERVAL, bound / 4)
        self.silent = 0.0
        self._heard = True

    def heard(self) -> None:
        """Record a message."""
        self._heard = True
        self.silent = 0.0

    def tick(self, elapsed: float) -> bool:
        """Record that ``elapsed`` seconds have passed since the last tick. Return True if the engine should be pinged: it has
        answered everything before."""
        if self._heard:
            self._heard = False
            return True
        self.silent += min(elapsed, 2 * self.interval)
        return False
