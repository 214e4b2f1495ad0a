"""Estimate whether B is faster than A: log ratios of blocks, their uncertainty, and a verdict for each metric.

The unit is a block: runs of both arms close in time, in the order ABBA, so that a machine that drifts slows both equally. Each
block gives one number: the log of B's metric over A's. Two effects make the mean of these numbers uncertain, and both are measured:

- Blocks differ. This is the variance of the blocks' log ratios.
- The requests are a sample of all possible requests. Clusters of requests (a chat, a shared prefix) are resampled, the same way in
  all blocks of both arms. The covariance of the blocks under these resamples is due to the choice of requests. The rest of their
  variance is noise, which the variance between blocks already includes.

The interval is the mean, plus or minus a quantile of Student's t times the square root of the sum of both variances, with degrees
of freedom by Satterthwaite. If the experiment looks after every block, the quantile is the always-valid one of ``sequential``.

Coverage at nominal 0.95, measured by benchmarks/experiment_coverage.py (300 experiments each, of 100 requests in 25 clusters;
fixed number of blocks; in brackets the interval's median width; machines with a linear drift and AR(1) noise between runs):

                                        here           blocks only    percentile     BCa            percentile-t
    steady machine, mean, 4 blocks      0.957 (7.2 %)  0.933 (6.4 %)  0.997 (6.8 %)  0.990 (7.0 %)  0.997 (21 %)
    drifting machine, mean, 4 blocks    0.970 (7.3 %)  0.967 (7.3 %)  0.940 (4.8 %)  0.943 (4.9 %)  1.000 (20 %)
    drifting machine, mean, 8 blocks    0.953 (3.9 %)  0.950 (3.9 %)  0.953 (3.6 %)  0.937 (3.6 %)  0.960 (4.6 %)
    drifting machine, mean, 20 blocks   0.963 (2.4 %)  0.957 (2.3 %)  0.973 (2.5 %)  0.970 (2.5 %)  0.973 (2.5 %)
    drifting machine, p99, 8 blocks     0.963 (13 %)   0.947 (12 %)   0.997 (14 %)   0.870 (13 %)   0.857 (16 %)
    drifts much, mean, 8 blocks         0.950 (5.1 %)  0.940 (5.0 %)  0.917 (4.4 %)  0.903 (4.4 %)  0.957 (5.7 %)
    B gains unevenly, mean, 8 blocks    0.967 (15 %)   0.443 (3.9 %)  0.720 (6.9 %)  0.723 (6.9 %)  0.623 (5.7 %)
    B gains unevenly, mean, 20 blocks   0.953 (13 %)   0.237 (2.3 %)  0.500 (4.5 %)  0.493 (4.5 %)  0.320 (3.0 %)
    B gains unevenly, p99, 8 blocks     0.893 (32 %)   0.470 (12 %)   0.680 (19 %)   0.547 (16 %)   0.530 (19 %)

The last three columns are bootstraps that resample blocks and, in each block, its requests. They count noise within blocks twice and
underestimate what the requests have in common, which neither BCa nor percentile-t corrects. The interval of the p99 of few requests
that gain unevenly is still too narrow: of a hundred requests one lies beyond the p99.

Looking after each of up to 20 blocks on the drifting machine: of 300 experiments of A against itself 0.7 % end with a false alarm.
Differences of 5 % and 10 % are found in all experiments, after 6 and 4 blocks (medians), and are never called equivalent within 2 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dovetail.experiment.resample import Weights, draw, resampled, statistic
from dovetail.experiment.result import Comparison
from dovetail.experiment.samples import BlockSamples, Floats, Ints, Metric
from dovetail.experiment.sequential import radius
from dovetail.experiment.verdict import MOST_BLOCKS, Estimate, Rules, blocks_needed, decide, holm
from dovetail.experiment.words import about


@dataclass(frozen=True, slots=True)
class MeasuredMetric:
    """Hold one metric over all blocks, before a verdict. ``a`` and ``b`` are geometric means. ``estimate`` is None if there is no ratio,
    and ``note`` gives the reason. ``run_var`` is the variance of a block's log ratio estimated from runs of the same arm (A/A)."""

    metric: Metric
    blocks: int
    a: float | None = None
    b: float | None = None
    estimate: Estimate | None = None
    run_var: float | None = None
    note: str = ""


def compare(
    metrics: Sequence[tuple[Metric, Sequence[BlockSamples]]],
    clusters: Ints,
    primary: Sequence[str],
    rules: Rules,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[Comparison, ...]:
    """Return a verdict for each metric, given its blocks. ``clusters`` [requests] holds the cluster number of each request.

    For ``primary`` metrics the false alarm rate is bounded over all primary metrics together; for other metrics it is bounded over all
    metrics. The result is deterministic for a seed.
    """
    weights = draw(clusters, resamples, seed)
    measured = [measure(metric, blocks, weights, clusters) for metric, blocks in metrics]
    return decide_metrics(measured, primary, rules)


def measure(metric: Metric, blocks: Sequence[BlockSamples], weights: Weights, clusters: Ints) -> MeasuredMetric:
    """Return the mean log ratio of a metric and its variance."""
    a = np.array([[statistic(metric, run) for run in block.a] for block in blocks])
    b = np.array([[statistic(metric, run) for run in block.b] for block in blocks])
    for name, values in (("A", a), ("B", b)):
        if not len(blocks) or not np.all(values > 0):  # nan too
            return MeasuredMetric(metric, len(blocks), note=f"{name} has runs without a value, so there is no ratio")
    ratios, groups = np.log(b).mean(axis=1) - np.log(a).mean(axis=1), len(np.unique(clusters))
    return MeasuredMetric(
        metric,
        len(blocks),
        a=float(np.exp(np.log(a).mean())),
        b=float(np.exp(np.log(b).mean())),
        estimate=_estimate(ratios, _shared(metric, blocks, weights, groups), groups),
        run_var=_run_variance(np.log(a), np.log(b)),
    )


def decide_metrics(measured: Sequence[MeasuredMetric], primary: Sequence[str], rules: Rules) -> tuple[Comparison, ...]:
    """Correct for the number of metrics and decide each metric."""
    known = [m for m in measured if m.estimate is not None]
    first = [m for m in known if m.metric.name in primary]
    adjusted = _adjusted(known, rules) | _adjusted(first, rules)
    return tuple(
        _comparison(m, adjusted.get(m.metric.name, 1.0), len(first if m in first else known), rules) for m in measured
    )


def _estimate(ratios: Floats, shared: SharedVariance, clusters: int) -> Estimate:
    blocks = len(ratios)
    block_var = float(ratios.var(ddof=1)) if blocks > 1 else 0.0
    between = block_var / blocks
    parts = between**2 / max(blocks - 1, 1) + shared.variance**2 / max(clusters - 1, 1)
    df = min((between + shared.variance) ** 2 / parts if parts else math.inf, blocks - 1)
    return Estimate(float(ratios.mean()), block_var, shared.variance, blocks, df, shared.lasting)


class SharedVariance(NamedTuple):
    """Hold the variance of the mean log ratio that is due to the choice of requests, and the part of it that exceeds chance (``lasting``)."""

    variance: float
    lasting: float


def _shared(metric: Metric, blocks: Sequence[BlockSamples], weights: Weights, clusters: int) -> SharedVariance:
    """Return the mean covariance of two blocks under the same resamples. Noise within blocks causes some covariance by chance: twice its
    standard error under independence does not count as lasting."""
    count = len(blocks)
    if count < 2 or weights.shape[1] < 2:
        return SharedVariance(0.0, 0.0)
    logs = np.stack([_log_ratio(metric, block, weights) for block in blocks])  # [blocks, resamples]
    own = float(logs.var(axis=1).mean())
    covariance = (count * float(logs.mean(axis=0).var()) - own) / (count - 1)
    chance = own * math.sqrt(2 / (clusters * count * (count - 1)))
    return SharedVariance(max(covariance, 0.0), max(covariance - 2 * chance, 0.0))


def _log_ratio(metric: Metric, block: BlockSamples, weights: Weights) -> Floats:
    a = np.mean([np.log(resampled(metric, run, weights)) for run in block.a], axis=0)
    return np.mean([np.log(resampled(metric, run, weights)) for run in block.b], axis=0) - a


def _run_variance(a: Floats, b: Floats) -> float | None:
    """Return the variance that a block's log ratio would have if both arms were the same. It is estimated from the first and last run
    of each arm in a block, whose difference has twice the variance of one run. None without a second run or block."""
    if len(a) < 2 or a.shape[1] < 2 or b.shape[1] < 2:
        return None
    of_a_run = sum(float((arm[:, -1] - arm[:, 0]).var(ddof=1)) / 2 for arm in (a, b)) / 2
    return of_a_run * (1 / a.shape[1] + 1 / b.shape[1])


def _adjusted(measured: Sequence[MeasuredMetric], rules: Rules) -> dict[str, float]:
    raw = [m.estimate.p(rules.peeking) for m in measured if m.estimate is not None]
    return dict(zip((m.metric.name for m in measured), holm(raw), strict=True))


def _comparison(measured: MeasuredMetric, p_adjusted: float, family: int, rules: Rules) -> Comparison:
    metric, estimate = measured.metric, measured.estimate
    unknown = Comparison(
        metric=metric.name, label=metric.label, unit=metric.unit, better=metric.better, blocks=measured.blocks,
        a=measured.a, b=measured.b, ratio=None, low=None, high=None, p=1.0, p_adjusted=1.0,
        verdict="inconclusive", note=measured.note,
    )  # fmt: skip
    if estimate is None:
        return unknown
    low, high = (math.exp(bound) for bound in estimate.bounds(rules.alpha, rules.peeking))
    verdict = decide(estimate, p_adjusted, metric.better, rules)
    needed = blocks_needed(estimate, rules, family) if verdict == "inconclusive" and estimate.blocks > 1 else None
    return unknown.model_copy(
        update={
            "ratio": math.exp(estimate.log_ratio),
            "low": low or None,
            "high": high if math.isfinite(high) else None,
            "p": estimate.p(rules.peeking),
            "p_adjusted": p_adjusted,
            "verdict": verdict,
            "blocks_needed": needed,
            "noise_floor": _floor(measured, rules),
            "note": _advice(verdict, needed, estimate),
        }
    )


def _floor(measured: MeasuredMetric, rules: Rules) -> float | None:
    """Return the smallest relative difference that these blocks can distinguish from noise, estimated from the noise between runs of
    one arm."""
    if measured.run_var is None:
        return None
    reach = radius(measured.blocks - 1, rules.alpha, rules.peeking) * math.sqrt(measured.run_var / measured.blocks)
    return math.expm1(reach) if reach < 10 else None


def _advice(verdict: str, needed: int | None, estimate: Estimate) -> str:
    if verdict != "inconclusive":
        return ""
    if estimate.blocks < 2:
        return "one block does not show how large the noise is; at least four blocks are needed"
    if needed is not None:
        return f"needs about {about(needed)} blocks"
    if estimate.lasting > 0:
        return "more blocks would not settle it, because the requests differ in what they gain; more requests would"
    return f"not even {MOST_BLOCKS} blocks would settle it"
