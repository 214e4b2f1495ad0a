"""Turn the records of runs into the parts of a finished experiment: comparisons, rows of blocks, distributions and other numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.bench.metrics import SLO, values
from dovetail.bench.records import RunRecord, Workload
from dovetail.experiment.resample import statistic
from dovetail.experiment.result import (
    Better,
    BlockRow,
    Comparison,
    DistributionRecord,
    Look,
    SideBySide,
    WorkloadSummary,
)
from dovetail.experiment.samples import BlockSamples, Metric, clusters, metrics, sample
from dovetail.experiment.stats import compare
from dovetail.experiment.verdict import Rules

MOST_POINTS = 200
"""The largest number of values in a stored distribution."""
DISTRIBUTIONS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "End to end"}


@dataclass(frozen=True, slots=True)
class RunBlock:
    """Hold the runs of one block in the order in which they ran (``order``: ABBA). The block started ``at`` seconds into the
    experiment."""

    index: int
    order: str
    at: float
    runs: tuple[RunRecord, ...]

    def of(self, arm: str) -> list[RunRecord]:
        """Return the runs of an arm, ``a`` or ``b``."""
        return [run for run in self.runs if run.arm == arm]


@dataclass(frozen=True, slots=True)
class CompletedBlocks:
    """Hold the blocks that are complete, and what is needed to evaluate them."""

    trace: Workload
    slo: SLO | None
    primary: tuple[str, ...]
    rules: Rules
    resamples: int
    seed: int
    blocks: list[RunBlock]

    def comparisons(self) -> tuple[Comparison, ...]:
        """Compare every metric over the blocks so far."""
        place = {call.id: i for i, call in enumerate(self.trace.calls)}

        def block_of(metric: Metric, block: RunBlock) -> BlockSamples:
            a, b = (tuple(sample(metric, r.measurements, place, self.slo) for r in block.of(arm)) for arm in "ab")
            return BlockSamples(a, b)

        found = [(metric, [block_of(metric, block) for block in self.blocks]) for metric in metrics(self.slo)]
        groups = clusters([(call.id, call.group) for call in self.trace.calls])
        return compare(found, groups, self.primary, self.rules, self.resamples, self.seed)

    def rows(self) -> tuple[BlockRow, ...]:
        """Return each block's values: the geometric mean over the runs of an arm. Metrics without a value are left out."""
        return tuple(
            BlockRow(index=b.index, order=b.order, at=b.at, a=self._values(b.of("a")), b=self._values(b.of("b")))
            for b in self.blocks
        )

    def _values(self, runs: Sequence[RunRecord]) -> dict[str, float]:
        place = {call.id: i for i, call in enumerate(self.trace.calls)}
        found: dict[str, float] = {}
        for metric in metrics(self.slo):
            numbers = [statistic(metric, sample(metric, run.measurements, place, self.slo)) for run in runs]
            if all(number > 0 for number in numbers):
                found[metric.name] = statistics.geometric_mean(numbers)
        return found

    def distributions(self) -> tuple[DistributionRecord, ...]:
        """Return the distributions over every request of all runs, and for ITL over every gap."""
        return tuple(
            DistributionRecord(
                metric=name, label=label, unit="ms", a=self._thinned(name, "a"), b=self._thinned(name, "b")
            )
            for name, label in DISTRIBUTIONS.items()
            if self.blocks
        )

    def _thinned(self, name: str, arm: str) -> tuple[float, ...]:
        runs = [run for block in self.blocks for run in block.of(arm)]
        found = np.sort([1e3 * value for run in runs for _, value in values(run.measurements, name)])
        if len(found) > MOST_POINTS:
            found = np.quantile(found, np.linspace(0, 1, MOST_POINTS))
        return tuple(map(float, found))

    def side_by_side(self) -> tuple[SideBySide, ...]:
        """Return the numbers that are reported as medians over the runs. No verdict depends on them."""
        return tuple(
            SideBySide(label=label, unit=unit, a=a, b=b, better=better)
            for label, unit, better, of_run in _SIDE_BY_SIDE
            for a, b in [(self._median("a", of_run), self._median("b", of_run))]
            if a is not None or b is not None
        )

    def _median(self, arm: str, of_run: Callable[[RunRecord], float | None]) -> float | None:
        found = [of_run(run) for block in self.blocks for run in block.of(arm)]
        known = [value for value in found if value is not None]
        return statistics.median(known) if known else None

    def failures(self) -> dict[str, int]:
        """Return the number of failed calls of each arm."""
        runs = [run for block in self.blocks for run in block.runs]
        return {arm: sum(not m.ok for run in runs if run.arm == arm for m in run.measurements) for arm in "ab"}


def looks(comparisons: Iterable[Comparison], primary: Sequence[str]) -> Iterator[Look]:
    """Yield the present estimate of each primary metric."""
    for c in comparisons:
        if c.metric in primary and c.ratio is not None:
            yield Look(metric=c.metric, blocks=c.blocks, ratio=c.ratio, low=c.low, high=c.high)


def summary(trace: Workload, arrivals: str) -> WorkloadSummary:
    """Return the summary of the workload that both arms ran."""
    count = max(len(trace.calls), 1)
    described = trace.description.get("workload", {})
    return WorkloadSummary(
        name=trace.name,
        description=", ".join(f"{key} {value}" for key, value in described.items() if key != "kind"),
        requests=len(trace.calls),
        clusters=len({call.group for call in trace.calls}),
        prompt_tokens=sum(len(call.token_ids or ()) for call in trace.calls) / count,
        output_tokens=sum(call.max_tokens for call in trace.calls) / count,
        arrivals=arrivals,
        seed=trace.seed,
        content_hash=trace.content_hash,
    )


def _acceptance(run: RunRecord) -> float | None:
    steps = sum(m.verify_steps or 0 for m in run.measurements)
    return 1 + sum(m.accepted or 0 for m in run.measurements) / steps if steps else None


def _hit_rate(run: RunRecord) -> float | None:
    cached, prompts = run.counter("cached_tokens"), run.counter("prompt_tokens")
    return 100 * cached / prompts if cached is not None and prompts else None


def _mask_time(run: RunRecord) -> float | None:
    seconds, tokens = run.counter("mask_seconds"), run.counter("generated_tokens")
    return 1e6 * seconds / tokens if seconds and tokens else None


def _gib(size: int | None) -> float | None:
    return size / 2**30 if size else None


_SIDE_BY_SIDE: tuple[tuple[str, str, Better | None, Callable[[RunRecord], float | None]], ...] = (
    ("Start-up, process to ready", "s", "lower", lambda run: run.startup_seconds),
    ("Peak host memory", "GiB", "lower", lambda run: _gib(run.peak_memory_bytes)),
    ("Peak device memory", "GiB", "lower", lambda run: _gib(run.peak_device_bytes)),
    ("Acceptance length", "tokens", "higher", _acceptance),
    ("Prompt tokens found in the prefix cache", "%", "higher", _hit_rate),
    ("Grammar masks, per output token", "µs", "lower", _mask_time),
    ("Engine steps", "steps", None, lambda run: run.counter("steps")),
)
