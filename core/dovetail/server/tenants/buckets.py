"""Implement token buckets: an amount per minute, which is also the largest amount at once."""

from __future__ import annotations

_ROUNDING = 1e-6
"""A missing amount below this is a rounding error."""


class TokenBucket:
    """Hold at most ``per_minute`` and fill at that rate, starting full.

    An amount that was taken may be given back in part, and more may be charged later: the level may fall below zero, and
    nothing can be taken until it has risen again. Times are seconds of a clock that the caller reads. If that clock goes back,
    the bucket is not filled until the clock has reached its former time.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = float(per_minute)
        self._level = self.capacity
        self._at = now

    def level(self, now: float) -> float:
        """Return the level at ``now``."""
        if now > self._at:
            self._level = min(self.capacity, self._level + (now - self._at) * self.capacity / 60)
            self._at = now
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until ``amount`` can be taken, or 0.0 if it can be taken now. ``amount`` must not exceed the capacity."""
        assert amount <= self.capacity, "this amount can never be taken"
        missing = amount - self.level(now)
        return missing * 60 / self.capacity if missing > _ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take ``amount`` whatever the level. A negative amount is given back, up to the capacity."""
        self._level = min(self.capacity, self.level(now) - amount)

    def resize(self, per_minute: int, now: float) -> None:
        """Change the rate. The amount in use stays in use: the distance of the level to the capacity does not change."""
        used = self.capacity - self.level(now)
        self.capacity = float(per_minute)
        self._level = self.capacity - used
