"""Test TTFT, TPOT, ITL, throughput and goodput against values computed by hand.

Run: python -m pytest -q tests/core/test_bench_metrics.py
"""

from __future__ import annotations

import pytest

from dovetail.bench.measurement_warnings import warning_texts
from dovetail.bench.metrics import SLO, e2e, goodput, itl, parse_slo, span, summarize, throughput, tpot, ttft, values
from dovetail.bench.records import ClientLag, MachineFacts, Measurement, RunRecord, read_record, write_json
from dovetail.errors import ConfigError

MACHINE = MachineFacts(host_cpu="x", cpus=1, memory_gib=1, device="cpu", platform="Linux", python="3.11")


def measured(name="a", *, due=0.0, sent=None, times=(), end=None, tokens=None, **more):
    end = end if end is not None else (times[-1] if times else due)
    count = len(times) if tokens is None else tokens
    sent = due if sent is None else sent
    fields = {"group": name, "ok": True, "output_tokens": count, **more}
    return Measurement(id=name, due=due, sent=sent, end=end, token_times=times, **fields)


PLAIN = measured("plain", due=1.0, sent=1.5, times=(2.0, 2.25, 2.5, 3.5), end=3.75)
DRAFTS = measured("drafts", due=0.0, times=(1.0, 1.6, 1.6, 1.6, 2.0))
ONE = measured("one", due=0.0, times=(0.5,))
NONE = measured("none", due=0.0, end=0.25)
FAILED = measured("failed", due=0.0, end=4.0, ok=False, error="HTTP 503: full")


def record(*measurements, lag=None):
    return RunRecord(
        kind="serve",
        workload="w",
        workload_hash="h",
        machine=MACHINE,
        started="2026-01-01T00:00:00+00:00",
        seconds=span(measurements),
        measurements=measurements,
        lag=lag,
        counters_before={"steps": 3, "x": 1},
        counters_after={"steps": 10},
    )


def test_latencies_count_from_when_a_call_was_due():
    assert (ttft(PLAIN), e2e(PLAIN)) == (1.0, 2.75)
    assert tpot(PLAIN) == (3.5 - 2.0) / 3
    assert itl(PLAIN) == [0.25, 0.25, 1.0]


def test_tokens_that_came_together_share_the_gap_before_them():
    assert itl(DRAFTS) == pytest.approx([0.2, 0.2, 0.2, 0.4])
    assert sum(itl(DRAFTS)) / len(itl(DRAFTS)) == pytest.approx(tpot(DRAFTS)) == 0.25
    together_at_first = measured(times=(1.0, 1.0, 1.5))
    assert itl(together_at_first) == [0.5]


def test_what_an_output_of_one_token_or_none_has():
    assert (ttft(ONE), tpot(ONE), itl(ONE)) == (0.5, None, [])
    assert (ttft(NONE), tpot(NONE), itl(NONE), e2e(NONE)) == (None, None, [], 0.25)


def test_the_count_of_the_usage_counts_where_events_hold_more_than_a_token():
    events = measured(times=(1.0, 2.0, 3.0), tokens=9)
    assert tpot(events) == 2.0 / 8
    assert itl(events) == [1.0, 1.0]


def test_values_go_with_their_groups_and_leave_failures_out():
    every = [PLAIN, ONE, NONE, FAILED]
    assert values(every, "ttft") == [("plain", 1.0), ("one", 0.5)]
    assert values(every, "e2e") == [("plain", 2.75), ("one", 0.5), ("none", 0.25)]
    assert values(every, "itl") == [("plain", gap) for gap in (0.25, 0.25, 1.0)]


def test_throughput_is_over_the_whole_span_with_failures():
    every = [PLAIN, DRAFTS, FAILED]
    assert span(every) == 4.0
    assert throughput(every) == 9 / 4
    assert (span([]), throughput([])) == (0.0, 0.0)


def test_goodput():
    every = [PLAIN, DRAFTS, ONE, FAILED]
    for slo, good in (
        (SLO(ttft_ms=1000), 3),
        (SLO(ttft_ms=999), 1),
        (SLO(ttft_ms=1000, tpot_ms=300), 2),  # an output of one token has no TPOT
        (SLO(tpot_ms=250), 2),
        (SLO(e2e_ms=2749), 2),
        (SLO(), 3),
    ):
        found = goodput(every, slo)
        assert (found.good, found.share, found.rate) == (good, good / 4, good / 4.0), slo


def test_an_slo_as_it_is_written():
    assert parse_slo(["ttft:200", "tpot:20"]) == parse_slo(["ttft:200 tpot:20"]) == parse_slo(["tpot:20,ttft:200"])
    assert parse_slo(["e2e:1.5"]) == SLO(e2e_ms=1.5)
    assert str(SLO(ttft_ms=200, tpot_ms=20)) == "ttft:200 tpot:20"
    for words in (["ttft"], ["ttft:x"], ["ttft:0"], ["ttft:-3"], ["latency:3"], ["ttft:1", "ttft:2"], ["ttft:nan"]):
        with pytest.raises(ConfigError, match="allowed: ttft:MS"):
            parse_slo(words)
    with pytest.raises(ConfigError, match="no bound"):
        parse_slo([])


def test_a_summary():
    drafts = DRAFTS.model_copy(update={"accepted": 3, "drafted": 6, "verify_steps": 2, "prompt_tokens": 30})
    cached = PLAIN.model_copy(update={"cached_tokens": 5, "prompt_tokens": 10})
    summary = summarize(record(cached, drafts, ONE, FAILED, FAILED.model_copy(update={"id": "g"})), SLO(ttft_ms=999))
    assert (summary.calls, summary.completed, summary.failed) == (5, 3, 2)
    assert summary.failures == {"HTTP 503: full": 2}
    assert (summary.prompt_tokens, summary.output_tokens) == (40, 10)
    assert (summary.calls_per_second, summary.output_tokens_per_second) == (3 / 4, 10 / 4)
    assert summary.total_tokens_per_second == 50 / 4
    assert (summary.cached_share, summary.acceptance_length) == (0.5, 2.5)
    assert summary.ttft is not None
    assert (summary.ttft.mean, summary.ttft.p50, summary.ttft.max, summary.ttft.count) == (2.5 / 3, 1.0, 1.0, 3)
    assert summary.ttft.p90 == 1.0
    assert summary.goodput is not None
    assert summary.goodput.share == 1 / 5
    nothing = summarize(record(FAILED))
    assert (nothing.ttft, nothing.cached_share, nothing.acceptance_length, nothing.goodput) == (None, None, None, None)


def test_a_record_is_read_as_it_was_written(tmp_path):
    made = record(PLAIN, DRAFTS, FAILED, lag=ClientLag(loop_p99=0.001))
    write_json(made, tmp_path / "deep" / "run.json")
    assert read_record(tmp_path / "deep" / "run.json") == made
    assert (made.counter("steps"), made.counter("x"), made.counter("y")) == (7, None, None)
    (tmp_path / "other.json").write_text('{"schema_version": 2}')
    with pytest.raises(ConfigError, match="is not the record of a run"):
        read_record(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path / "absent.json")


def test_warnings():
    many = [measured(f"m{i}", times=(0.1, 0.12)) for i in range(100)]
    quiet = ClientLag(loop_p50=0.0001, loop_p99=0.001, send_p50=0.0001, send_p99=0.001, cpu_share=0.3)

    def of(lag, measurements=many):
        return warning_texts([(None, summarize(record(*measurements)), lag)])

    assert of(quiet) == of(None) == []
    assert "used 90% of a CPU" in of(quiet.model_copy(update={"cpu_share": 0.9}))[0]
    assert "woke up late by 0.1 ms (p99 3.0 ms)" in of(quiet.model_copy(update={"loop_p99": 0.003}))[0]
    assert "sent 20.0 ms (p99 20.0 ms) after" in of(quiet.model_copy(update={"send_p50": 0.02, "send_p99": 0.02}))[0]
    few, failed = of(quiet, [*many[:50], FAILED])[1], of(quiet, [*many, FAILED])[0]
    assert ("50 calls are too few" in few, "1 of 101 calls failed" in failed) == (True, True)
    runs = [(rate, summarize(record(*many[:9])), quiet) for rate in (1.0, 2.5)]
    assert warning_texts(runs) == ["fewer than 100 calls: too few for a 99th percentile (at 1, 2.5 calls/s)"]
