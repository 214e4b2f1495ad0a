"""Simulate how often the intervals of `dovetail ab` keep their promises: coverage, false alarms, power.

    python benchmarks/experiment_coverage.py            # everything, about ten minutes on one core
    python benchmarks/experiment_coverage.py --reps 200

A simulated machine drifts (a line and an AR(1) process), runs differ, requests differ, and B may gain more on some
requests than on others. The method of dovetail.experiment.stats is compared with the methods from which it was chosen.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from dovetail.experiment.resample import draw, resampled, statistic
from dovetail.experiment.samples import METRICS, BlockSamples, Floats, Ints, Metric, Sample
from dovetail.experiment.stats import compare, decide_metrics, measure
from dovetail.experiment.verdict import Rules

MEAN = next(metric for metric in METRICS if metric.name == "e2e_mean")
MEDIAN = next(metric for metric in METRICS if metric.name == "ttft_p50")
P99 = next(metric for metric in METRICS if metric.name == "ttft_p99")


@dataclass(frozen=True)
class World:
    """Describe the simulated noise; all standard deviations are of logarithms.

    ``uneven`` is how much B's gain differs between clusters of requests. ``run`` and ``jitter`` are the noise of a run
    and of a request in a run. ``drift`` is the change of the machine from one run to the next.
    """

    name: str
    effect: float = 0.0
    uneven: float = 0.0
    run: float = 0.02
    jitter: float = 0.1
    drift: float = 0.01
    memory: float = 0.8
    clusters: int = 25
    size: int = 4

    @property
    def requests(self) -> int:
        return self.clusters * self.size

    @property
    def owner(self) -> Ints:
        """Return the cluster of each request."""
        return np.repeat(np.arange(self.clusters), self.size)

    def truth(self, metric: Metric) -> float:
        """Return the log ratio over all possible requests.

        Gains are independent of the latencies: a mean gains half their variance, a quantile next to nothing.
        """
        return self.effect + (self.uneven**2 / 2 if metric.kind == "mean" else 0.0)

    def blocks(self, rng: np.random.Generator) -> Iterator[BlockSamples]:
        """Yield blocks in the order ABBA, of one workload."""
        base = 0.5 * rng.standard_normal(self.requests) + 0.3 * rng.standard_normal(self.clusters)[self.owner]
        gain = self.effect + self.uneven * rng.standard_normal(self.clusters)[self.owner]
        machine, wander, at = 0.0, 0.0, 0
        owners = np.arange(self.requests)
        while True:
            runs: dict[str, list[Sample]] = {"a": [], "b": []}
            for arm in "abba":
                wander = self.memory * wander + self.drift * rng.standard_normal()
                machine, at = wander + self.drift * at / 10, at + 1
                noise = self.run * rng.standard_normal() + self.jitter * rng.standard_normal(self.requests)
                runs[arm].append(Sample(np.exp(base + machine + noise + (gain if arm == "b" else 0)), owners))
            yield BlockSamples(tuple(runs["a"]), tuple(runs["b"]))

    def take(self, count: int, rng: np.random.Generator) -> list[BlockSamples]:
        """Return the first blocks of an experiment."""
        source = self.blocks(rng)
        return [next(source) for _ in range(count)]


Interval = tuple[float, float]


def chosen(
    metric: Metric, blocks: list[BlockSamples], world: World, peeking: bool = False, resamples: int = 400
) -> Interval:
    """Return the interval of the log ratio that an experiment reports."""
    (c,) = compare([(metric, blocks)], world.owner, (metric.name,), Rules(peeking=peeking), resamples)
    return (math.log(c.low) if c.low else -math.inf), (math.log(c.high) if c.high else math.inf)


def _ratios(metric: Metric, blocks: list[BlockSamples]) -> Floats:
    def log(runs: tuple[Sample, ...]) -> float:
        return float(np.mean([math.log(statistic(metric, run)) for run in runs]))

    return np.array([log(block.b) - log(block.a) for block in blocks])


def blocks_only(metric: Metric, blocks: list[BlockSamples], world: World) -> Interval:
    """Return Student's t interval over blocks, which treats the requests as the whole population."""
    d = _ratios(metric, blocks)
    reach = stats.t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / math.sqrt(len(d))
    return d.mean() - reach, d.mean() + reach


def _nested(metric: Metric, blocks: list[BlockSamples], world: World, resamples: int = 400) -> tuple[Floats, Floats]:
    """Resample blocks, and in each of them its own clusters. Return the values [resamples, blocks drawn], and which
    blocks were drawn."""

    def log(runs: tuple[Sample, ...], weights: np.ndarray) -> Floats:
        return np.mean([np.log(resampled(metric, run, weights)) for run in runs], axis=0)

    columns = []
    for seed, block in enumerate(blocks):
        weights = draw(world.owner, resamples, seed)
        columns.append(log(block.b, weights) - log(block.a, weights))
    rng = np.random.default_rng(99)
    drawn = rng.integers(len(blocks), size=(resamples, len(blocks)))
    return np.take_along_axis(np.stack(columns, axis=1), drawn, axis=1), drawn


def percentile(metric: Metric, blocks: list[BlockSamples], world: World) -> Interval:
    """Return the percentile interval of the nested bootstrap."""
    low, high = np.quantile(_nested(metric, blocks, world)[0].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def bca(metric: Metric, blocks: list[BlockSamples], world: World) -> Interval:
    """Return the same interval, bias-corrected and accelerated (jackknife over blocks)."""
    means, d = _nested(metric, blocks, world)[0].mean(axis=1), _ratios(metric, blocks)
    z0 = stats.norm.ppf(np.clip((means < d.mean()).mean(), 0.002, 0.998))
    pulls = d - d.mean()
    speed = (pulls**3).sum() / (6 * (pulls**2).sum() ** 1.5)
    ends = [z0 + (z0 + z) / (1 - speed * (z0 + z)) for z in stats.norm.ppf((0.025, 0.975))]
    low, high = np.quantile(means, stats.norm.cdf(ends))
    return float(low), float(high)


def percentile_t(metric: Metric, blocks: list[BlockSamples], world: World) -> Interval:
    """Return the same interval, studentised by the variance between the drawn blocks."""
    rows, d = _nested(metric, blocks, world)[0], _ratios(metric, blocks)
    t = (rows.mean(axis=1) - d.mean()) / np.maximum(rows.std(axis=1, ddof=1), 1e-9)
    low, high = np.quantile(t, (0.025, 0.975)) * d.std(ddof=1)
    return d.mean() - high, d.mean() - low


METHODS: dict[str, Callable[[Metric, list[BlockSamples], World], Interval]] = {
    "chosen": chosen,
    "blocks only": blocks_only,
    "percentile": percentile,
    "BCa": bca,
    "percentile-t": percentile_t,
}
WORLDS = (
    World("steady machine", run=0.0, jitter=0.2, drift=0.0),
    World("runs differ, machine drifts"),
    World("drifts much", drift=0.03, memory=0.9),
    World("B gains unevenly", effect=0.05, uneven=0.15),
)


def coverage(world: World, metric: Metric, count: int, reps: int, method: str, seed: int = 0) -> tuple[float, float]:
    """Return the share of experiments of ``count`` blocks whose interval contains the truth, and the intervals'
    median width."""
    rng, truth = np.random.default_rng(seed), world.truth(metric)
    ends = np.array([METHODS[method](metric, world.take(count, rng), world) for _ in range(reps)])
    return float(np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1]))), float(np.median(ends[:, 1] - ends[:, 0]))


def peek(world: World, metric: Metric, most: int, rng: np.random.Generator, rules: Rules) -> tuple[str, int]:
    """Run one experiment that checks after each block and stops when it has a verdict. Return the verdict and the
    number of blocks."""
    weights, blocks, source = draw(world.owner, 200, 0), list[BlockSamples](), world.blocks(rng)
    while len(blocks) < most:
        blocks.append(next(source))
        (c,) = decide_metrics([measure(metric, blocks, weights, world.owner)], (metric.name,), rules)
        if c.verdict != "inconclusive":
            return c.verdict, len(blocks)
    return "inconclusive", most


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=500)
    reps = parser.parse_args().reps
    print(f"coverage of nominal 0.95, and median width in %, over {reps} experiments of {WORLDS[0].requests} requests")
    print(f"{'world':28} {'metric':10} {'blocks':>6} " + "".join(f"{name:>16}" for name in METHODS))
    for world in WORLDS:
        for metric, count in ((MEAN, 4), (MEAN, 8), (MEAN, 20), (MEDIAN, 8), (P99, 8)):
            cells = (coverage(world, metric, count, reps, method) for method in METHODS)
            row = "".join(f"{share:10.3f} {width:5.1%}" for share, width in cells)
            print(f"{world.name:28} {metric.name:10} {count:6} {row}", flush=True)
    print("\nchecking after each of at most 20 blocks, delta 2 %: verdicts in %, and blocks used (median)")
    for effect in (0.0, 0.02, 0.05, 0.1):
        world, rng = replace(WORLDS[1], effect=math.log1p(effect)), np.random.default_rng(1)
        ends = [peek(world, MEAN, 20, rng, Rules()) for _ in range(reps)]
        names = [name for name, _ in ends]
        shares = "".join(
            f"{v} {names.count(v) / reps:6.1%}  " for v in ("faster", "slower", "equivalent", "inconclusive")
        )
        print(f"B slower by {effect:4.0%}   {shares} {np.median([used for _, used in ends]):.0f} blocks", flush=True)


if __name__ == "__main__":
    main()
