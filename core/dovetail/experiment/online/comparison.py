"""Define what the running comparison of the arms takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.experiment.online.log import Latency


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """Hold one line of the comparison: a metric of ``arm`` (``b``) against the same metric of ``control`` (``a``). ``low`` and ``high``
    bound the ratio b / a. Numbers are None where there is not enough data."""

    control: str
    arm: str
    metric: str
    unit: str
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str
    blocks: int
    note: str


Side = tuple[str, Sequence[Latency]]
"""The name of an arm and the latencies of its outputs."""

CompareArms = Callable[[Side, Sequence[Side]], list[ComparisonRow]]
"""A function that compares the control with each of the other sides. The server calls it on a thread."""
