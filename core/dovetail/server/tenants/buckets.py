"""Token buckets: so much a minute, and no more than that at once."""

from __future__ import annotations

_DUST = 1e-6
"""Less than this is an error of rounding."""


class TokenBucket:
    """Holds at most ``per_minute``, and is filled at that rate. It begins full.

    What is taken may be given back in part, and more than was taken may be charged: the level may fall below zero, and
    nothing can be taken until it has risen again. Times are seconds of a clock that the caller reads; one that goes back does
    no harm: nothing is filled until it is where it was.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = float(per_minute)
        self._level = self.capacity
        self._at = now

    def level(self, now: float) -> float:
        """What it holds."""
        if now > self._at:
            self._level = min(self.capacity, self._level + (now - self._at) * self.capacity / 60)
            self._at = now
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` could be taken; 0.0 if it can be now. It must not exceed the capacity."""
        assert amount <= self.capacity, "this can never be taken"
        missing = amount - self.level(now)
        return missing * 60 / self.capacity if missing > _DUST else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take out, whether it is there or not; a negative amount is given back, as far as there is room."""
        self._level = min(self.capacity, self.level(now) - amount)

    def resize(self, per_minute: int, now: float) -> None:
        """Another rate from now on. What was used stays used: the level keeps its distance to full."""
        used = self.capacity - self.level(now)
        self.capacity = float(per_minute)
        self._level = self.capacity - used
