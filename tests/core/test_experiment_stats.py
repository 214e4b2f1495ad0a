"""Test the statistics of experiments: what they promise, by simulation, and their parts against independent
references.

.venv/bin/python -m pytest tests/core/test_experiment_stats.py
"""

import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from dovetail.bench.metrics import SLO, goodput, throughput
from dovetail.bench.records import Measurement
from dovetail.experiment.resample import draw, resampled, statistic
from dovetail.experiment.samples import METRICS, PRIMARY, BlockSamples, Sample, clusters, metrics, sample
from dovetail.experiment.sequential import PRIOR, log_evidence, p_value, radius
from dovetail.experiment.stats import compare
from dovetail.experiment.verdict import Estimate, Rules, blocks_needed, decide, holm, stop_reason

BY_NAME = {metric.name: metric for metric in METRICS}
FIXED = Rules(peeking=False)


@pytest.fixture(scope="module")
def sim():
    """Import the simulated machine and the methods that were compared on it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    try:
        import experiment_coverage
    finally:
        sys.path.pop(0)
    return experiment_coverage


# what is promised


def test_looking_after_each_block_raises_no_false_alarm(sim):
    rng = np.random.default_rng(3)
    ends = [sim.peek(sim.WORLDS[1], sim.MEAN, 10, rng, Rules())[0] for _ in range(200)]
    assert ends.count("faster") + ends.count("slower") <= 0.05 * len(ends)


def test_looking_after_each_block_with_students_t_would():
    alarms = {peeking: _alarms_of_pure_noise(peeking) for peeking in (True, False)}
    assert alarms[True] <= 0.05
    assert alarms[False] > 0.15


def _alarms_of_pure_noise(peeking: bool, experiments: int = 1000, blocks: int = 30) -> float:
    noise = np.random.default_rng(5).standard_normal((experiments, blocks))
    counts = np.arange(2, blocks + 1)
    t = np.stack([math.sqrt(n) * noise[:, :n].mean(axis=1) / noise[:, :n].std(axis=1, ddof=1) for n in counts], axis=1)
    bounds = np.array([radius(n - 1, 0.05, peeking) for n in counts])
    return float((np.abs(t) > bounds).any(axis=1).mean())


def test_a_tenth_is_found(sim):
    rng = np.random.default_rng(4)
    for effect, verdict in ((math.log(1.1), "slower"), (-math.log(1.1), "faster")):
        world = replace(sim.WORLDS[1], effect=effect)
        ends = [sim.peek(world, sim.MEAN, 12, rng, Rules())[0] for _ in range(30)]
        assert ends.count(verdict) >= 29


@pytest.mark.parametrize("world", range(4))
def test_intervals_hold_the_truth(sim, world):
    share, _ = sim.coverage(sim.WORLDS[world], sim.MEAN, 8, 150, "chosen", seed=world)
    assert share >= 0.93


def test_intervals_that_know_blocks_alone_do_not(sim):
    share, _ = sim.coverage(sim.WORLDS[3], sim.MEAN, 8, 100, "blocks only")
    assert share < 0.8


def test_five_per_cent_are_not_called_equivalent(sim):
    world, rng = replace(sim.WORLDS[1], effect=math.log(1.05)), np.random.default_rng(6)
    ends = [sim.peek(world, sim.MEAN, 12, rng, Rules(delta=0.02))[0] for _ in range(60)]
    assert "equivalent" not in ends


def test_the_same_is_called_equivalent_on_a_quiet_machine(sim):
    world, rng = replace(sim.WORLDS[1], run=0.004, jitter=0.02, drift=0.002), np.random.default_rng(7)
    ends = [sim.peek(world, sim.MEAN, 12, rng, Rules(delta=0.02))[0] for _ in range(20)]
    assert ends.count("equivalent") == 20


def test_the_noise_floor_is_the_smallest_effect_that_is_found(sim):
    world, rng = sim.WORLDS[1], np.random.default_rng(8)
    blocks = world.take(400, rng)
    (c,) = compare([(sim.MEAN, blocks)], world.owner, ("e2e_mean",), FIXED, resamples=20)
    assert c.noise_floor == pytest.approx(math.sqrt(c.high / c.low) - 1, rel=0.15)


# parts against references


def test_the_martingale_is_the_bayes_factor_of_the_t_statistic():
    for n, t in ((4, 2.5), (8, 0.3), (8, 4.0), (20, -3.0)):
        df = n - 1

        def under(effect: float, t: float = t, df: int = df, n: int = n) -> float:
            return stats.nct.pdf(t, df, effect * math.sqrt(n)) * stats.norm.pdf(effect, scale=math.sqrt(PRIOR))

        marginal = integrate.quad(under, -12, 12, limit=400, points=[t / math.sqrt(n)])[0]
        assert math.exp(log_evidence(t, df)) == pytest.approx(marginal / stats.t.pdf(t, df), rel=1e-4)


@given(st.integers(4, 60), st.sampled_from([0.001, 0.05, 0.1]))
def test_at_the_bound_p_is_alpha(blocks, alpha):
    for peeking in (True, False):
        bound = radius(blocks - 1, alpha, peeking)
        if math.isfinite(bound):
            assert p_value(bound, blocks - 1, peeking) == pytest.approx(alpha)
            assert p_value(-bound * 1.01, blocks - 1, peeking) < alpha
    assert radius(blocks - 1, alpha, True) > radius(blocks - 1, alpha, False)


def test_one_block_bounds_nothing():
    assert radius(0, 0.05, False) == math.inf
    assert p_value(100.0, 0, False) == 1.0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.02]) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert holm([0.001, 0.9]) == pytest.approx([0.002, 0.9])
    assert holm([]) == []


@given(
    st.lists(st.integers(0, 4), min_size=3, max_size=12),
    st.sampled_from(["mean", "quantile", "rate"]),
    st.integers(0, 9999),
)
@settings(max_examples=60)
def test_resampled_statistics_are_those_of_repeated_requests(times, kind, seed):
    if not any(times):
        return
    rng = np.random.default_rng(seed)
    owners, values = rng.integers(len(times), size=60), rng.lognormal(size=60)
    repeated = np.repeat(values, np.array(times)[owners])
    if not len(repeated):
        return
    metric = {"mean": BY_NAME["e2e_mean"], "quantile": BY_NAME["itl_p99"], "rate": BY_NAME["throughput"]}[kind]
    found = resampled(metric, Sample(values, owners, 4.0), np.array([times], dtype=np.float32))[0]
    expected = {
        "mean": repeated.mean(),
        "quantile": np.quantile(repeated, 0.99, method="inverted_cdf"),
        "rate": repeated.sum() / 4.0 * len(times) / sum(times),
    }[kind]
    assert found == pytest.approx(expected, rel=1e-5)


def test_clusters_are_drawn_whole_and_as_often_as_they_should():
    owner = np.array([0, 0, 1, 2, 2, 2])
    weights = draw(owner, 4000, 1)
    for cluster in range(3):
        drawn = weights[:, owner == cluster]
        assert (drawn == drawn[:, :1]).all()
    assert (weights[:, [0, 2, 3]].sum(axis=1) == 2).all()  # one block fewer than there are
    assert weights.mean(axis=0) == pytest.approx(2 / 3, abs=0.05)
    assert (
        draw(np.zeros(5, dtype=np.int64), 50, 1).sum(axis=1) == 4
    ).all()  # one cluster: requests are resampled one by one


# verdicts


def _block(rng, effect=0.0, requests=20, drift=0.0) -> BlockSamples:
    base, owners = rng.lognormal(0, 0.3, requests), np.arange(requests)

    def run(at: int, gain: float) -> Sample:
        return Sample(base * math.exp(gain + drift * at + 0.01 * rng.standard_normal()), owners)

    return BlockSamples((run(0, 0), run(3, 0)), (run(1, effect), run(2, effect)))


@given(st.integers(0, 10_000), st.floats(-0.2, 0.2), st.sampled_from(["e2e_mean", "ttft_p50", "throughput"]))
@settings(max_examples=30)
def test_arms_exchanged_and_units_changed_the_verdict_is_the_same(seed, effect, name):
    blocks = [_block(np.random.default_rng(seed + k), effect) for k in range(6)]
    exchanged = [BlockSamples(block.b, block.a) for block in blocks]
    scaled = [
        BlockSamples(*(tuple(replace(r, values=r.values * 1000) for r in arm) for arm in (k.a, k.b))) for k in blocks
    ]
    one, other, thousand = (
        compare([(BY_NAME[name], given)], np.arange(20), (name,), Rules(), 100)[0]
        for given in (blocks, exchanged, scaled)
    )
    mirror = {"faster": "slower", "slower": "faster"}
    assert other.verdict == mirror.get(one.verdict, one.verdict)
    assert other.ratio == pytest.approx(1 / one.ratio)
    assert other.low == pytest.approx(1 / one.high, rel=1e-3)
    assert (thousand.verdict, thousand.ratio) == (one.verdict, pytest.approx(one.ratio))


def test_a_higher_rate_is_faster_and_a_higher_latency_slower():
    blocks = [_block(np.random.default_rng(k), 0.2) for k in range(8)]
    assert {n: compare([(BY_NAME[n], blocks)], np.arange(20), (n,), Rules(), 100)[0].verdict for n in PRIMARY} == {
        "ttft_p50": "slower",
        "tpot_mean": "slower",
        "throughput": "faster",
    }


def test_linear_drift_cancels_in_each_block():
    blocks = [_block(np.random.default_rng(k), 0.1, drift=0.5) for k in range(6)]
    (c,) = compare([(BY_NAME["e2e_mean"], blocks)], np.arange(20), ("e2e_mean",), Rules(), 100)
    assert c.ratio == pytest.approx(math.exp(0.1), rel=0.01)
    assert c.verdict == "slower"


@given(st.floats(-0.2, 0.2), st.floats(1e-6, 1e-2), st.floats(0, 1e-4), st.integers(4, 12), st.booleans())
def test_the_number_of_blocks_settles_it_and_one_fewer_would_not(ratio, variance, requests, blocks, peeking):
    rules = Rules(peeking=peeking)
    estimate = Estimate(ratio, variance, requests, blocks, blocks - 1, lasting=requests)

    def verdict(n: int) -> str:
        later = Estimate(ratio, variance, requests, n, n - 1, lasting=requests)
        return decide(later, later.p(peeking), "lower", rules)

    if verdict(blocks) != "inconclusive":
        return
    needed = blocks_needed(estimate, rules, 1)
    if needed is None:
        assert verdict(9_000) == "inconclusive"
    else:
        assert verdict(needed) != "inconclusive"
        assert verdict(max(blocks, int(needed * 0.95) - 1)) == "inconclusive"


def test_the_primary_metrics_pay_for_each_other_alone():
    blocks = [_block(np.random.default_rng(k), 0.03) for k in range(8)]
    every = [(metric, blocks) for metric in METRICS]
    found = {c.metric: c for c in compare(every, np.arange(20), ("ttft_p50", "e2e_mean"), FIXED, 100)}
    assert found["ttft_p50"].p_adjusted <= 2 * max(found[n].p for n in ("ttft_p50", "e2e_mean"))
    assert found["ttft_p99"].p_adjusted >= 8 * min(c.p for c in found.values())


def test_without_a_value_there_is_no_ratio_and_a_reason():
    empty = Sample(np.zeros(0), np.zeros(0, dtype=np.int64))
    blocks = [BlockSamples((empty,), (empty,))] * 4
    (c,) = compare([(BY_NAME["ttft_p50"], blocks)], np.arange(3), ("ttft_p50",), Rules())
    assert (c.ratio, c.verdict) == (None, "inconclusive")
    assert "without a value" in c.note
    assert compare([(BY_NAME["ttft_p50"], [])], np.arange(3), ("ttft_p50",), Rules())[0].blocks == 0


def test_when_an_experiment_ends():
    def at(blocks: int, effect: float):
        every = [_block(np.random.default_rng(k), effect) for k in range(blocks)]
        return compare([(BY_NAME["e2e_mean"], every)], np.arange(20), ("e2e_mean",), Rules(), 100)

    assert "settled after 8 blocks" in (stop_reason(at(8, 0.5), ("e2e_mean",), 20) or "")
    assert stop_reason(at(3, 0.01), ("e2e_mean",), 20) is None
    assert "blocks have run; not settled" in (stop_reason(at(3, 0.01), ("e2e_mean",), 3) or "")


def test_eight_blocks_of_a_hundred_requests_take_less_than_a_second():
    rng, owners = np.random.default_rng(0), np.repeat(np.arange(100), 64)

    def arm() -> tuple[Sample, Sample]:
        return Sample(rng.lognormal(size=6400), owners), Sample(rng.lognormal(size=6400), owners)

    blocks = [BlockSamples(arm(), arm()) for _ in range(8)]
    begun = time.thread_time()
    compare([(BY_NAME["itl_p99"], blocks)], np.arange(100), ("itl_p99",), Rules(), resamples=2000)
    assert time.thread_time() - begun < 1.0


# from measurements


def _call(number: int, ok: bool = True) -> Measurement:
    times = tuple(number + 0.1 + 0.05 * k for k in range(4 + number))
    return Measurement(
        id=f"c{number}", group=f"g{number // 2}", ok=ok, due=number, sent=number, end=times[-1] + 0.01,
        token_times=times, output_tokens=len(times),
    )  # fmt: skip


def test_samples_are_the_numbers_that_benchmarks_report():
    calls = [_call(0), _call(1), _call(2, ok=False), _call(3)]
    place, slo = {m.id: k for k, m in enumerate(calls)}, SLO(e2e_ms=300)
    found = {metric.name: sample(metric, calls, place, slo) for metric in metrics(slo)}
    assert found["ttft_p50"].values == pytest.approx([100, 100, 100])
    assert found["ttft_p50"].owners.tolist() == [0, 1, 3]
    assert found["itl_p99"].owners.tolist() == [0] * 3 + [1] * 4 + [3] * 6
    assert statistic(BY_NAME["itl_p50"], found["itl_p50"]) == pytest.approx(50)
    assert statistic(BY_NAME["throughput"], found["throughput"]) == pytest.approx(throughput(calls))
    assert statistic(BY_NAME["goodput"], found["goodput"]) == pytest.approx(goodput(calls, slo).rate)
    assert "goodput" not in {metric.name for metric in metrics(None)}
    assert clusters([(m.id, m.group) for m in calls]).tolist() == [0, 0, 1, 1]
