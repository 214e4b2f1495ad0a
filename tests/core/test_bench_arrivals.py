"""Test when calls are due: the statistics of each arrival process.

Run: python -m pytest -q tests/core/test_bench_arrivals.py
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dovetail.bench.arrivals import offsets, with_arrivals
from dovetail.bench.draws import Draws
from dovetail.bench.specs import ArrivalTrace, Gamma, Poisson, parse_arrivals, parse_workload
from dovetail.bench.workloads import PromptVocabulary, make_workload
from dovetail.errors import ConfigError

COUNT = 20_000


def gaps(spec, seed=0):
    times = offsets(spec, COUNT, seed)
    assert times[0] == 0
    return np.diff(times)


def test_poisson_gaps_are_exponential():
    found = gaps(Poisson(rate=4))
    assert stats.kstest(found, stats.expon(scale=0.25).cdf).pvalue > 0.01
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.03
    per_second = np.bincount(np.floor(np.cumsum(found)).astype(int))[:-1]
    assert per_second.var() / per_second.mean() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_shape_and_the_rate(shape):
    draws = Draws(3, "shape")
    assert stats.kstest([draws.gamma(shape) for _ in range(COUNT)], stats.gamma(shape).cdf).pvalue > 0.01
    found = gaps(Gamma(rate=10, burstiness=shape), seed=3)
    assert found.mean() == pytest.approx(0.1, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(1 / np.sqrt(shape), rel=0.05)


def test_another_rate_stretches_the_same_gaps():
    slow, fast = (np.array(offsets(Gamma(rate=rate, burstiness=0.5), 500, 1)) for rate in (2, 8))
    assert np.allclose(slow, 4 * fast, atol=1e-5)
    assert offsets(Poisson(rate=2), 5, 1) != offsets(Poisson(rate=2), 5, 2)


def test_offsets_are_whole_microseconds():
    for time in offsets(Poisson(rate=1000), 200, 5):
        assert round(time * 1e6) / 1e6 == time


def test_a_trace_is_repeated_after_a_mean_gap(tmp_path):
    assert offsets(ArrivalTrace(offsets=(1.0, 2.0, 4.0)), 7) == [1.0, 2.0, 4.0, 5.5, 6.5, 8.5, 10.0]
    assert offsets(ArrivalTrace(offsets=(0.0, 2.0), speed=2), 3) == [0.0, 1.0, 2.0]
    assert offsets(ArrivalTrace(offsets=(3.0,)), 3) == [3.0, 4.0, 5.0]
    (tmp_path / "trace").write_text("0.5\n\n0.75\n")
    assert offsets(parse_arrivals(f"{{kind: trace, file: {tmp_path}/trace}}"), 2) == [0.5, 0.75]


def test_wrong_traces_are_named(tmp_path):
    (tmp_path / "trace").write_text("0.5\nsoon\n")
    (tmp_path / "empty").write_text("\n")
    for spec, message in (
        (ArrivalTrace(offsets=(2.0, 1.0)), "are not in ascending order"),
        (ArrivalTrace(file=tmp_path / "trace"), "line 2 is 'soon'"),
        (ArrivalTrace(file=tmp_path / "empty"), "has no offsets"),
        (ArrivalTrace(file=tmp_path / "absent"), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            offsets(spec, 3)
    with pytest.raises(ConfigError, match="offsets or a file; give exactly one"):
        parse_arrivals("trace")
    with pytest.raises(ConfigError, match="rate"):
        parse_arrivals("{kind: poisson, rate: 0}")


def test_only_calls_that_follow_no_other_arrive():
    chat = make_workload(parse_workload("{kind: chat, conversations: 5}"), 0, PromptVocabulary.of_size(50))
    timed = with_arrivals(chat, Poisson(rate=1), 4)
    assert [c.arrival for c in timed.calls if c.parent is None] == offsets(Poisson(rate=1), 5, 4)
    assert {c.arrival for c in timed.calls if c.parent is not None} == {0.0}
    assert timed.concurrency is None
    users = with_arrivals(timed, parse_arrivals("{kind: concurrency, limit: 3}"))
    assert users.concurrency == 3
    assert {c.arrival for c in users.calls} == {0.0}
    assert with_arrivals(timed, parse_arrivals("as_given")) is timed


def test_draws_of_counts_and_orders_are_even():
    draws = Draws(0, "even")
    counts = np.bincount([draws.count((3, 7)) for _ in range(5000)], minlength=8)[3:]
    assert stats.chisquare(counts).pvalue > 0.001
    firsts = np.bincount([draws.shuffled("abcd").index("a") for _ in range(4000)])
    assert stats.chisquare(firsts).pvalue > 0.001
    assert sorted(draws.sample(range(9), 9)) == list(range(9))
    assert (draws.count(5), draws.seconds(0.25)) == (5, 0.25)
