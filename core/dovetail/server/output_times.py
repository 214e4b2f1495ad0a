"""Hold when one output has reached its phases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OutputTimes:
    """Hold when one output has reached its phases, in seconds of ``time.perf_counter``; 0 for what has not happened.

    ``compiled`` is when its constraint was compiled, ``admitted`` when the scheduler admitted it first, ``first`` and ``last``
    when its first and its latest token arrived, and ``end`` when it finished.
    """

    arrival: float
    compiled: float = 0.0
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0
    end: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
