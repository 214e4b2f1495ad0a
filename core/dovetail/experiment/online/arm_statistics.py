"""Compare the arms of a server's experiment while it runs: divide time into blocks and apply the statistics of ``dovetail ab``.

A block is an interval of time in which both sides have enough outputs, so that load and machine are the same for both. Keys
(users) are resampled together over all blocks, because a user stays with one arm and the arms serve different users; with few
keys the confidence intervals are wide for that reason. The intervals are valid at every look, because a dashboard is read again
and again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.experiment.online.comparison import ComparisonRow, Side
from dovetail.experiment.online.log import Latency
from dovetail.experiment.result import Comparison
from dovetail.experiment.samples import BlockSamples, Metric, Sample
from dovetail.experiment.stats import compare
from dovetail.experiment.verdict import Rules

METRICS = (Metric("ttft", "TTFT, mean", "ms", "lower", "mean"), Metric("tpot", "TPOT, mean", "ms", "lower", "mean"))
TICK_SECONDS = 10.0
ENOUGH = 16
"""The number of outputs with a TPOT that each side needs in a block."""
RESAMPLES = 200


def compare_arms(control: Side, others: Sequence[Side]) -> list[ComparisonRow]:
    """Compare each of ``others`` with ``control``. The false alarm rate is bounded over all comparisons together. A side without a
    complete block has no rows."""
    rules = Rules(alpha=0.05 / max(len(others), 1))
    return [row for other in others for row in _rows(control, other, rules)]


def _rows(control: Side, other: Side, rules: Rules) -> list[ComparisonRow]:
    spans = blocks_of(control[1], other[1])
    if not spans:
        return []
    keys = [latency.key for a, b in spans for latency in (*a, *b)]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    clusters = np.array([number[key] for key in keys], dtype=np.int64)
    found = compare(
        [(metric, _blocks(metric, spans)) for metric in METRICS],
        clusters,
        tuple(metric.name for metric in METRICS),
        rules,
        RESAMPLES,
    )
    return [_row(control[0], other[0], c) for c in found]


Span = tuple[Sequence[Latency], Sequence[Latency]]


def blocks_of(a: Sequence[Latency], b: Sequence[Latency]) -> list[Span]:
    """Divide the outputs into blocks of whole ticks. Each block is as short as possible with at least ``ENOUGH`` outputs of two
    or more tokens on both sides. Outputs after the last complete block are left out."""
    spans: list[Span] = []
    left: list[Latency] = []
    right: list[Latency] = []
    by_tick = _by_tick(a), _by_tick(b)
    for tick in sorted(by_tick[0].keys() | by_tick[1].keys())[:-1]:  # the last tick may still be in progress
        left += by_tick[0].get(tick, ())
        right += by_tick[1].get(tick, ())
        if min(_timed(left), _timed(right)) >= ENOUGH:
            spans.append((left, right))
            left, right = [], []
    return spans


def _by_tick(latencies: Sequence[Latency]) -> dict[int, list[Latency]]:
    ticks: dict[int, list[Latency]] = {}
    for latency in latencies:
        ticks.setdefault(int(latency.at // TICK_SECONDS), []).append(latency)
    return ticks


def _timed(latencies: Sequence[Latency]) -> int:
    return sum(latency.tpot is not None for latency in latencies)


def _blocks(metric: Metric, spans: Sequence[Span]) -> list[BlockSamples]:
    blocks: list[BlockSamples] = []
    at = 0
    for a, b in spans:
        blocks.append(BlockSamples((_sample(metric, a, at),), (_sample(metric, b, at + len(a)),)))
        at += len(a) + len(b)
    return blocks


def _sample(metric: Metric, latencies: Sequence[Latency], first: int) -> Sample:
    """Return the values of a metric. ``first`` is the index of the first latency among all outputs."""
    values = [latency.ttft if metric.name == "ttft" else latency.tpot for latency in latencies]
    owned = [(first + i, value) for i, value in enumerate(values) if value is not None]
    return Sample(
        np.array([value for _, value in owned], dtype=np.float64), np.array([i for i, _ in owned], dtype=np.int64)
    )


def _row(control: str, arm: str, c: Comparison) -> ComparisonRow:
    return ComparisonRow(control, arm, c.label, c.unit, c.a, c.b, c.ratio, c.low, c.high, c.verdict, c.blocks, c.note)
