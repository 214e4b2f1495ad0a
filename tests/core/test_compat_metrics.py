"""Test the metrics under the names of vLLM and SGLang: names, labels and buckets are theirs, values are those of our own metrics.

.venv/bin/python -m pytest -q tests/core/test_compat_metrics.py
"""

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from dovetail.interfaces.api import Prompt
from dovetail.messages import EngineStats, TokenOutput
from dovetail.sampling_params import SamplingParams
from dovetail.server import metrics as server_metrics
from dovetail.server.compat_metrics import HISTOGRAMS, MEASURES, VALUES
from dovetail.server.metrics import Metrics, RequestMetrics
from dovetail.types import FinishKind, FinishReason

SERVERS = ["vllm", "sglang"]
INFO = {"context_len": 120, "page_size": 16, "num_pages": 32, "num_pools": 2}
STATS = EngineStats(
    running=3,
    waiting=4,
    compiling=2,
    pages_total=64,
    pages_used=48,
    prompt_tokens=1000,
    cached_tokens=250,
    generated_tokens=777,
    retractions=5,
    drafted_tokens=40,
    accepted_tokens=30,
    verify_steps=10,
    grammar_requests={"a": 2, "b": 1},
)
VLLM = {"model_name": "m", "engine": "0"}
FRONT = {"model_name": "m"}
SCHEDULER = {"model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}


class Clock:
    """Replace ``time``, so that latencies are known."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(server_metrics, "time", clock)
    return clock


def measured(compat: str | None, clock: Clock) -> Metrics:
    """Return the metrics of a server that has served one request with two outputs."""
    metrics = Metrics({"version": "1"}, compat, "m", INFO)
    metrics.stats = STATS
    prompt = Prompt([1] * 30, SamplingParams(n=2, max_new_tokens=9))
    request = RequestMetrics(metrics, (prompt,))
    clock.now = 100.7
    request.observe([TokenOutput(rid, [1], None, 30, 1, 16, queue_seconds=0.2) for rid in "ab"])
    clock.now = 101.3
    request.observe([TokenOutput("a", [2, 3], FinishReason(FinishKind.STOP, 3), 30, 3, 16)])
    clock.now = 103.0
    request.observe([TokenOutput("b", [2], None, 30, 2, 16)])
    request.observe([TokenOutput("b", [], FinishReason(FinishKind.ABORT), 30, 2, 16)])
    request.close(finished=True)
    return metrics


def families(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def samples(families: dict[str, Metric]) -> dict[tuple[str, tuple], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families.values()
        for sample in family.samples
    }


def value(found: dict[tuple[str, tuple], float], name: str, labels: dict[str, str]) -> float:
    return found[name, tuple(sorted(labels.items()))]


# What the sources of vLLM 0.11 (vllm/v1/metrics/loggers.py) and SGLang 0.5 (srt/metrics/collector.py) define.
EXPECTED: list[tuple[str, str, dict[str, str], float]] = [
    ("vllm", "vllm:num_requests_running", VLLM, 3),
    ("vllm", "vllm:num_requests_waiting", VLLM, 4),
    ("vllm", "vllm:kv_cache_usage_perc", VLLM, 0.75),
    ("vllm", "vllm:prefix_cache_queries_total", VLLM, 1000),
    ("vllm", "vllm:prefix_cache_hits_total", VLLM, 250),
    ("vllm", "vllm:prompt_tokens_total", VLLM, 1000),
    ("vllm", "vllm:generation_tokens_total", VLLM, 777),
    ("vllm", "vllm:num_preemptions_total", VLLM, 5),
    ("vllm", "vllm:request_success_total", {**VLLM, "finished_reason": "stop"}, 1),
    ("vllm", "vllm:request_success_total", {**VLLM, "finished_reason": "abort"}, 1),
    ("vllm", "vllm:request_success_total", {**VLLM, "finished_reason": "length"}, 0),
    ("vllm", "vllm:spec_decode_num_drafts_total", VLLM, 10),
    ("vllm", "vllm:spec_decode_num_draft_tokens_total", VLLM, 40),
    ("vllm", "vllm:spec_decode_num_accepted_tokens_total", VLLM, 30),
    ("vllm", "vllm:cache_config_info", {"block_size": "16", "num_gpu_blocks": "64", "engine": "0"}, 1),
    ("vllm", "vllm:time_to_first_token_seconds_count", VLLM, 2),
    ("vllm", "vllm:time_to_first_token_seconds_bucket", {**VLLM, "le": "0.5"}, 0),
    ("vllm", "vllm:time_to_first_token_seconds_bucket", {**VLLM, "le": "0.75"}, 2),
    ("vllm", "vllm:inter_token_latency_seconds_count", VLLM, 3),
    ("vllm", "vllm:inter_token_latency_seconds_bucket", {**VLLM, "le": "0.4"}, 2),
    ("vllm", "vllm:request_time_per_output_token_seconds_bucket", {**VLLM, "le": "0.4"}, 1),
    ("vllm", "vllm:e2e_request_latency_seconds_bucket", {**VLLM, "le": "1.5"}, 1),
    ("vllm", "vllm:request_queue_time_seconds_bucket", {**VLLM, "le": "0.3"}, 2),
    ("vllm", "vllm:request_prefill_time_seconds_bucket", {**VLLM, "le": "0.3"}, 0),
    ("vllm", "vllm:request_prefill_time_seconds_bucket", {**VLLM, "le": "0.5"}, 2),
    ("vllm", "vllm:request_decode_time_seconds_bucket", {**VLLM, "le": "0.8"}, 1),
    ("vllm", "vllm:request_inference_time_seconds_bucket", {**VLLM, "le": "1.5"}, 1),
    ("vllm", "vllm:request_prompt_tokens_sum", VLLM, 60),
    ("vllm", "vllm:request_prompt_tokens_bucket", {**VLLM, "le": "20.0"}, 0),
    ("vllm", "vllm:request_prompt_tokens_bucket", {**VLLM, "le": "100.0"}, 2),
    ("vllm", "vllm:request_generation_tokens_sum", VLLM, 5),
    ("vllm", "vllm:request_max_num_generation_tokens_sum", VLLM, 3),
    ("vllm", "vllm:request_prefill_kv_computed_tokens_sum", VLLM, 28),
    ("vllm", "vllm:request_params_n_bucket", {**VLLM, "le": "2.0"}, 1),
    ("vllm", "vllm:request_params_max_tokens_sum", VLLM, 9),
    ("sglang", "sglang:num_running_reqs", SCHEDULER, 3),
    ("sglang", "sglang:num_queue_reqs", SCHEDULER, 4),
    ("sglang", "sglang:num_grammar_queue_reqs", SCHEDULER, 2),
    ("sglang", "sglang:context_len", SCHEDULER, 120),
    ("sglang", "sglang:token_usage", SCHEDULER, 0.75),
    ("sglang", "sglang:num_used_tokens", SCHEDULER, 48 * 16),
    ("sglang", "sglang:max_total_num_tokens", SCHEDULER, 64 * 16),
    ("sglang", "sglang:cache_hit_rate", SCHEDULER, 0.25),
    ("sglang", "sglang:gen_throughput", SCHEDULER, 0),
    ("sglang", "sglang:spec_accept_length", SCHEDULER, 4),
    ("sglang", "sglang:spec_accept_rate", SCHEDULER, 0.75),
    ("sglang", "sglang:num_retracted_requests_total", SCHEDULER, 5),
    ("sglang", "sglang:prompt_tokens_total", FRONT, 1000),
    ("sglang", "sglang:generation_tokens_total", FRONT, 777),
    ("sglang", "sglang:cached_tokens_total", FRONT, 250),
    ("sglang", "sglang:num_requests_total", FRONT, 2),
    ("sglang", "sglang:num_aborted_requests_total", FRONT, 1),
    ("sglang", "sglang:num_so_requests_total", FRONT, 3),
    ("sglang", "sglang:time_to_first_token_seconds_bucket", {**FRONT, "le": "0.6"}, 0),
    ("sglang", "sglang:time_to_first_token_seconds_bucket", {**FRONT, "le": "0.8"}, 2),
    ("sglang", "sglang:inter_token_latency_seconds_bucket", {**FRONT, "le": "0.4"}, 2),
    ("sglang", "sglang:e2e_request_latency_seconds_bucket", {**FRONT, "le": "2.0"}, 1),
    ("sglang", "sglang:queue_time_seconds_bucket", {**SCHEDULER, "le": "0.2"}, 2),
    ("sglang", "sglang:queue_time_seconds_bucket", {**SCHEDULER, "le": "3000.0"}, 2),
]


@pytest.mark.parametrize("server", SERVERS)
def test_names_labels_buckets_and_values(server: str, clock: Clock) -> None:
    found = samples(families(measured(server, clock)))
    for expected, name, labels, number in EXPECTED:
        if expected == server:
            assert value(found, name, labels) == pytest.approx(number), name


@pytest.mark.parametrize("server", SERVERS)
def test_everything_equals_our_own_metrics(server: str, clock: Clock) -> None:
    all_families = families(measured(server, clock))
    found = samples(all_families)
    totals: dict[str, float] = {}
    for (name, labels), number in found.items():
        if "le" not in dict(labels):
            totals[name] = totals.get(name, 0) + number
    for row in VALUES[server]:
        if not row.value:
            assert totals[row.name] == totals[row.own] * (INFO["page_size"] if row.in_pages else 1), row
    for row in HISTOGRAMS[server]:
        if row.own not in MEASURES:
            for part in ("sum", "count"):
                assert totals[f"{row.name}_{part}"] == pytest.approx(totals[f"dovetail_{row.own}_{part}"]), row
    prefixes = {"vllm": "sglang:", "sglang": "vllm:"}
    assert not [name for name in all_families if name.startswith(prefixes[server])]


@pytest.mark.parametrize("server", SERVERS)
def test_our_own_metrics_stay_as_they_are(server: str, clock: Clock) -> None:
    def own(metrics: Metrics) -> dict[Any, float]:
        found = samples(families(metrics))
        return {key: number for key, number in found.items() if not key[0].endswith("_created") and ":" not in key[0]}

    plain = own(measured(None, clock))
    clock.now = 100.0
    assert own(measured(server, clock)) == plain
    assert all(name.startswith("dovetail_") for name, _ in plain)


def test_throughput_is_measured_between_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.server import compat_metrics

    now = [50.0]
    metrics = Metrics({"version": "1"})
    own = metrics._numbers
    compat = compat_metrics.CompatMetrics("sglang", "m", INFO, own, metrics.registry, clock=lambda: now[0])

    def throughput(generated: int) -> float:
        metrics.stats = EngineStats(generated_tokens=generated)
        (found,) = [family for family in compat.collect() if family.name == "sglang:gen_throughput"]
        return found.samples[0].value

    now[0] = 60.0
    assert throughput(200) == 20
    now[0] = 60.5
    assert throughput(900) == 20  # less than a second later
    now[0] = 62.0
    assert throughput(1000) == 400
    now[0] = 64.0
    assert throughput(0) == 0  # another engine counts from 0


def test_the_page_lists_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    rows = set(re.findall(r"^\| `((?:vllm|sglang):[a-z0-9_]+)` \| (.*?) \|", page, re.M))
    for server in SERVERS:
        for row in VALUES[server]:
            assert any(name == row.name and f"`{row.own}`" in own for name, own in rows), row
        for row in HISTOGRAMS[server]:
            own = MEASURES.get(row.own) or f"`dovetail_{row.own}`"
            assert any(name == row.name and own in cell for name, cell in rows), row
