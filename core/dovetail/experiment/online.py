"""The running comparison of the arms of a server's experiment (``server.online``): blocks of time, by the statistics of ``ab``.

A block is a stretch of time in which every side has enough outputs, so that load and machine were the same for both. Keys (users)
are resampled in all blocks alike, as the same user stays with an arm and the arms have not the same users; with few keys
intervals are wide for that reason. Intervals hold at every look; a dashboard is looked at all the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.experiment.result import Comparison
from dovetail.experiment.samples import Block, Metric, Sample
from dovetail.experiment.stats import compare
from dovetail.experiment.verdict import Rules
from dovetail.server.arm_log import Latency
from dovetail.server.online import Row, Side

METRICS = (Metric("ttft", "TTFT, mean", "ms", "lower", "mean"), Metric("tpot", "TPOT, mean", "ms", "lower", "mean"))
TICK_SECONDS = 10.0
ENOUGH = 16
"""Outputs of each side in a block."""
RESAMPLES = 200


def judge(control: Side, others: Sequence[Side]) -> list[Row]:
    """Each of ``others`` against ``control``, false alarms bounded over all of them together. No rows without a block."""
    rules = Rules(alpha=0.05 / max(len(others), 1))
    return [row for other in others for row in _rows(control, other, rules)]


def _rows(control: Side, other: Side, rules: Rules) -> list[Row]:
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
    """Stretches of whole ticks, as short as they can be with ``ENOUGH`` outputs of two tokens or more on both sides. What is left
    at the end waits for more."""
    spans: list[Span] = []
    left: list[Latency] = []
    right: list[Latency] = []
    by_tick = _by_tick(a), _by_tick(b)
    for tick in sorted(by_tick[0].keys() | by_tick[1].keys())[:-1]:  # the last may not be over
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


def _blocks(metric: Metric, spans: Sequence[Span]) -> list[Block]:
    blocks: list[Block] = []
    at = 0
    for a, b in spans:
        blocks.append(Block((_sample(metric, a, at),), (_sample(metric, b, at + len(a)),)))
        at += len(a) + len(b)
    return blocks


def _sample(metric: Metric, latencies: Sequence[Latency], first: int) -> Sample:
    """``first`` is the place of the first of them among all outputs."""
    values = [latency.ttft if metric.name == "ttft" else latency.tpot for latency in latencies]
    owned = [(first + i, value) for i, value in enumerate(values) if value is not None]
    return Sample(
        np.array([value for _, value in owned], dtype=np.float64), np.array([i for i, _ in owned], dtype=np.int64)
    )


def _row(control: str, arm: str, c: Comparison) -> Row:
    return Row(control, arm, c.label, c.unit, c.a, c.b, c.ratio, c.low, c.high, c.verdict, c.blocks, c.note)
