"""Expose the server's measurements under the names, labels and histogram buckets of vLLM or SGLang (``metrics.compat``).

The tables are data: each row names a metric of the other server and the metric of this server that has the same value. The
names are those of vLLM 0.11 and later (its V1 engine) and of SGLang 0.5. What this server does not measure has no row; docs/operations.md
lists it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from dovetail.interfaces.api import Prompt
    from dovetail.server.output_times import OutputTimes


class SameValue(NamedTuple):
    """Name a gauge or counter of another server. Its value is the sum of the samples ``own`` of this server, times the tokens of a
    page if ``in_pages`` is set. With ``label``, it has one sample for each value of the only label of ``own``, under that name; with
    ``value``, only the samples with that value count. A counter's name ends with ``_total``."""

    name: str
    own: str
    in_pages: bool = False
    label: str = ""
    value: str = ""


class SameMeasure(NamedTuple):
    """Name a histogram of another server, and what it measures: ``own`` is a histogram of this server, or a measure that only these
    histograms have (``MEASURES``). Without ``buckets`` these are 1, 2, 5, 10, ... up to the context length."""

    name: str
    own: str
    buckets: Sequence[float] = ()


MEASURES: Mapping[str, str] = {
    "inference_seconds": "Time from the admission of a request to its last token.",
    "prompt_tokens": "Prompt tokens of an output.",
    "generated_tokens": "Tokens of an output.",
    "most_generated_tokens": "Tokens of the longest output of a request.",
    "computed_tokens": "Prompt tokens of an output that were not cached.",
    "max_tokens": "Tokens that a request may generate, if it limits them.",
    "n": "Outputs that a request asks for with each prompt.",
}
"""What only histograms of other servers measure, with the text of their help."""


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_SECONDS = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_TTFT = _bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
_GAPS = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_LATENCIES = _bounds("0.1 0.2 0.4 0.6 0.8 1 2 4 6 8 10 20 40 60 80 100 200 400")
_QUEUED = (0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, *range(30, 101, 10))
_QUEUED_LONG = (*range(200, 1001, 100), 1200, 1400, 1600, 1800, 2000, 2500, 3000)
_ITL = _bounds("0.002 0.004 0.006 0.008 0.01 0.015 0.02 0.025 0.03 0.035 0.04 0.06 0.08 0.1 0.2 0.4 0.6 0.8 1 2 4 6 8")

VALUES: Mapping[str, Sequence[SameValue]] = {
    "vllm": (
        SameValue("vllm:num_requests_running", "dovetail_requests_running"),
        SameValue("vllm:num_requests_waiting", "dovetail_requests_waiting"),
        SameValue("vllm:kv_cache_usage_perc", "dovetail_kv_usage"),
        SameValue("vllm:gpu_cache_usage_perc", "dovetail_kv_usage"),
        SameValue("vllm:prefix_cache_queries_total", "dovetail_prompt_tokens_total"),
        SameValue("vllm:prefix_cache_hits_total", "dovetail_cached_prompt_tokens_total"),
        SameValue("vllm:prompt_tokens_total", "dovetail_prompt_tokens_total"),
        SameValue("vllm:prompt_tokens_cached_total", "dovetail_cached_prompt_tokens_total"),
        SameValue("vllm:generation_tokens_total", "dovetail_generated_tokens_total"),
        SameValue("vllm:num_preemptions_total", "dovetail_retractions_total"),
        SameValue("vllm:request_success_total", "dovetail_outputs_finished_total", label="finished_reason"),
        SameValue("vllm:spec_decode_num_drafts_total", "dovetail_verify_steps_total"),
        SameValue("vllm:spec_decode_num_draft_tokens_total", "dovetail_drafted_tokens_total"),
        SameValue("vllm:spec_decode_num_accepted_tokens_total", "dovetail_accepted_tokens_total"),
    ),
    "sglang": (
        SameValue("sglang:num_running_reqs", "dovetail_requests_running"),
        SameValue("sglang:num_queue_reqs", "dovetail_requests_waiting"),
        SameValue("sglang:num_grammar_queue_reqs", "dovetail_requests_compiling"),
        SameValue("sglang:token_usage", "dovetail_kv_usage"),
        SameValue("sglang:full_token_usage", "dovetail_kv_usage"),
        SameValue("sglang:num_used_tokens", "dovetail_kv_pages_used", in_pages=True),
        SameValue("sglang:kv_used_tokens", "dovetail_kv_pages_used", in_pages=True),
        SameValue("sglang:max_total_num_tokens", "dovetail_kv_pages_total", in_pages=True),
        SameValue("sglang:num_pages", "dovetail_kv_pages_total"),
        SameValue("sglang:cache_hit_rate", "dovetail_prefix_hit_rate"),
        SameValue("sglang:spec_accept_length", "dovetail_spec_acceptance_length"),
        SameValue("sglang:spec_accept_rate", "dovetail_spec_acceptance_rate"),
        SameValue("sglang:num_retracted_requests_total", "dovetail_retractions_total"),
        SameValue("sglang:prompt_tokens_total", "dovetail_prompt_tokens_total"),
        SameValue("sglang:generation_tokens_total", "dovetail_generated_tokens_total"),
        SameValue("sglang:cached_tokens_total", "dovetail_cached_prompt_tokens_total"),
        SameValue("sglang:num_requests_total", "dovetail_outputs_finished_total"),
        SameValue("sglang:num_aborted_requests_total", "dovetail_outputs_finished_total", value="abort"),
        SameValue("sglang:num_so_requests_total", "dovetail_grammar_requests_total"),
        SameValue("sglang:spec_verify_calls_total", "dovetail_verify_steps_total"),
    ),
}

HISTOGRAMS: Mapping[str, Sequence[SameMeasure]] = {
    "vllm": (
        SameMeasure("vllm:time_to_first_token_seconds", "time_to_first_token_seconds", _TTFT),
        SameMeasure("vllm:inter_token_latency_seconds", "inter_token_latency_seconds", _GAPS),
        SameMeasure("vllm:request_time_per_output_token_seconds", "time_per_output_token_seconds", _GAPS),
        SameMeasure("vllm:e2e_request_latency_seconds", "e2e_request_latency_seconds", _SECONDS),
        SameMeasure("vllm:request_queue_time_seconds", "request_queue_seconds", _SECONDS),
        SameMeasure("vllm:request_prefill_time_seconds", "request_prefill_seconds", _SECONDS),
        SameMeasure("vllm:request_decode_time_seconds", "request_decode_seconds", _SECONDS),
        SameMeasure("vllm:request_inference_time_seconds", "inference_seconds", _SECONDS),
        SameMeasure("vllm:request_prompt_tokens", "prompt_tokens"),
        SameMeasure("vllm:request_generation_tokens", "generated_tokens"),
        SameMeasure("vllm:request_max_num_generation_tokens", "most_generated_tokens"),
        SameMeasure("vllm:request_prefill_kv_computed_tokens", "computed_tokens"),
        SameMeasure("vllm:request_params_max_tokens", "max_tokens"),
        SameMeasure("vllm:request_params_n", "n", (1, 2, 5, 10, 20)),
    ),
    "sglang": (
        SameMeasure("sglang:time_to_first_token_seconds", "time_to_first_token_seconds", _LATENCIES),
        SameMeasure("sglang:inter_token_latency_seconds", "inter_token_latency_seconds", _ITL),
        SameMeasure(
            "sglang:e2e_request_latency_seconds",
            "e2e_request_latency_seconds",
            (*_LATENCIES, 600, 1200, 1800, 2400),
        ),
        SameMeasure("sglang:queue_time_seconds", "request_queue_seconds", (*_QUEUED, *_QUEUED_LONG)),
    ),
}

_FRONT = re.compile(
    r"sglang:(time_to|inter_token|e2e|prompt_|generation_|cached_|spec_verify|num_(aborted_|so_)?requests_)"
)
"""SGLang's metrics that its frontend measures. The others have the labels of the process that schedules."""


def labels_of(name: str, model: str) -> dict[str, str]:
    """Return the labels that the server that defines the metric ``name`` gives it."""
    if name.startswith("vllm:"):
        return {"model_name": model, "engine": "0"}
    front = _FRONT.match(name)
    return {"model_name": model, **({} if front else {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"})}


class CompatMetrics(Collector):
    """Measure under the names of ``server`` ("vllm" or "sglang")."""

    def __init__(
        self,
        server: str,
        model: str,
        info: Mapping[str, Any],
        own: Callable[[], Iterable[Metric]],
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``info`` is the engine's, ``own`` returns the gauges and counters of this server. The metrics are added to ``registry``."""
        self._server, self._model, self._own = server, model, own
        self._page_size: int = info.get("page_size", 1)
        self._context_len: int = info["context_len"]
        self._rate = _Rate(clock)
        self._info = {
            "block_size": str(self._page_size),
            "num_gpu_blocks": str(info.get("num_pages", 0) * info.get("num_pools", 1)),
            "engine": "0",
        }
        self._histograms = {row.own: self._histogram(row, self._context_len, registry) for row in HISTOGRAMS[server]}
        registry.register(self)

    def _histogram(self, row: SameMeasure, context_len: int, registry: CollectorRegistry) -> Histogram:
        labels = labels_of(row.name, self._model)
        buckets = row.buckets or tuple(
            m * 10**e for e in range(12) for m in (1, 2, 5) if m * 10**e <= max(context_len, 1)
        )
        text = MEASURES.get(row.own) or f"As dovetail_{row.own}."
        return Histogram(row.name, text, list(labels), buckets=buckets, registry=registry).labels(**labels)

    def beside(self, own: Histogram, name: str) -> Histogram | BothHistograms:
        """Return what observes for ``own``, the histogram of this server with this name, and for the other server's."""
        other = self._histograms.get(name)
        return own if other is None else BothHistograms(own, other)

    def observe(self, measure: str, value: float) -> None:
        """Record one of ``MEASURES``, if the other server has it."""
        if measure in self._histograms:
            self._histograms[measure].observe(value)

    def finished(self, times: OutputTimes) -> None:
        """Record an output that has finished."""
        self.observe("prompt_tokens", times.prompt_tokens)
        self.observe("computed_tokens", times.prompt_tokens - times.cached_tokens)
        self.observe("generated_tokens", times.tokens)
        if times.admitted:
            self.observe("inference_seconds", (times.last or times.end) - times.admitted)

    def closed(self, prompts: Iterable[Prompt], times: Iterable[OutputTimes]) -> None:
        """Record a request whose outputs have finished."""
        self.observe("most_generated_tokens", max((output.tokens for output in times), default=0))
        for prompt in prompts:
            self.observe("n", prompt.params.n)
            if prompt.params.max_new_tokens:
                self.observe("max_tokens", prompt.params.max_new_tokens)

    def describe(self) -> Iterable[Metric]:
        """Yield nothing: without this method the registry would call ``collect`` when it registers the metrics."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield gauges and counters."""
        own = {metric.name + "_total" * (metric.type == "counter"): metric for metric in self._own()}
        for row in VALUES[self._server]:
            yield self._same(row, own[row.own])
        if self._server == "vllm":
            yield _gauge("vllm:cache_config_info", "The KV cache.", self._info, 1)
        else:
            labels = labels_of("sglang:gen_throughput", self._model)
            (tokens,) = own["dovetail_generated_tokens_total"].samples
            rate = self._rate.of(tokens.value)
            yield _gauge("sglang:gen_throughput", "Tokens generated per second since the last scrape.", labels, rate)
            yield _gauge("sglang:page_size", "Tokens of a page.", labels, self._page_size)
            yield _gauge("sglang:context_len", "Tokens of the context.", labels, self._context_len)

    def _same(self, row: SameValue, own: Metric) -> Metric:
        labels = labels_of(row.name, self._model)
        family = CounterMetricFamily if row.name.endswith("_total") else GaugeMetricFamily
        metric = family(row.name, own.documentation, labels=[*labels, *([row.label] if row.label else [])])
        samples = [sample for sample in own.samples if sample.name == row.own]
        factor = self._page_size if row.in_pages else 1
        if row.label:
            for sample in samples:
                metric.add_metric([*labels.values(), *sample.labels.values()], sample.value * factor)
            return metric
        chosen = [sample.value for sample in samples if not row.value or row.value in sample.labels.values()]
        metric.add_metric([*labels.values()], sum(chosen) * factor)
        return metric


class BothHistograms:
    """Observe for two histograms."""

    def __init__(self, own: Histogram, other: Histogram) -> None:
        self._own, self._other = own, other

    def observe(self, amount: float) -> None:
        """See ``Histogram.observe``."""
        self._own.observe(amount)
        self._other.observe(amount)


class _Rate:
    """Measure how fast a total grows, between scrapes that are at least a second apart."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._time, self._total, self._rate = clock(), 0.0, 0.0

    def of(self, total: float) -> float:
        """Return the growth per second up to ``total``."""
        seconds = self._clock() - self._time
        if seconds >= 1:
            self._rate = max(total - self._total, 0.0) / seconds
            self._time, self._total = self._clock(), total
        return self._rate


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=[*labels])
    metric.add_metric([*labels.values()], value)
    return metric
