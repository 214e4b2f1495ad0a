"""Draw random values that are the same on every machine and in every Python version.

Every draw is computed from ``Random.random()``, whose sequence Python promises to keep, with arithmetic that IEEE 754
defines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Draw values from a stream that is separate for each (seed, names): draws from one stream do not affect the
    others."""

    def __init__(self, seed: int, *names: str | int) -> None:
        self._next = Random(" ".join(str(part) for part in (seed, *names))).random

    def unit(self) -> float:
        """Draw a number from [0, 1)."""
        return self._next()

    def below(self, bound: int) -> int:
        """Draw an integer from 0 to ``bound - 1``."""
        return int(self._next() * bound)

    def count(self, of: int | tuple[int, int]) -> int:
        """Return a fixed number, or draw one from [low, high]."""
        return of if isinstance(of, int) else of[0] + self.below(of[1] - of[0] + 1)

    def seconds(self, of: float | tuple[float, float]) -> float:
        """Return a fixed time, or draw one from [low, high]; it is rounded to whole microseconds."""
        return round(of[0] + self._next() * (of[1] - of[0]) if isinstance(of, tuple) else of, 6)

    def choice(self, items: Sequence[T]) -> T:
        """Draw one of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Draw ``count`` different items in random order."""
        return self.shuffled(items)[:count]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return all items in random order (Fisher and Yates)."""
        mixed = list(items)
        for i in range(len(mixed) - 1, 0, -1):
            j = self.below(i + 1)
            mixed[i], mixed[j] = mixed[j], mixed[i]
        return mixed

    def exponential(self) -> float:
        """Draw from the exponential distribution with mean 1."""
        return -math.log(1.0 - self._next())

    def gamma(self, shape: float) -> float:
        """Draw from the gamma distribution with mean ``shape``: Marsaglia and Tsang, A Simple Method for Generating
        Gamma Variables (2000)."""
        if shape < 1:
            return self.gamma(shape + 1) * (1.0 - self._next()) ** (1 / shape)
        d = shape - 1 / 3
        c = 1 / math.sqrt(9 * d)
        while True:
            x = self._normal()
            v = (1 + c * x) ** 3
            if v > 0 and math.log(1.0 - self._next()) < 0.5 * x * x + d - d * v + d * math.log(v):
                return d * v

    def _normal(self) -> float:
        """Draw from the standard normal distribution (Box and Muller)."""
        return math.sqrt(2 * self.exponential()) * math.cos(2 * math.pi * self._next())
