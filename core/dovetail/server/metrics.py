"""Collect what /metrics returns: latencies measured in the server, gauges and totals from the engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dovetail.interfaces.api import Acceptance, Prompt
from dovetail.messages import EngineStats, TokenOutput
from dovetail.server.compat_metrics import BothHistograms, CompatMetrics
from dovetail.server.output_times import OutputTimes
from dovetail.types import FinishKind

TTFT_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
PER_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
E2E_SECONDS = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)

GAUGES: Mapping[str, tuple[str, str]] = {
    "paused": ("paused", "1 while generation is paused, else 0."),
    "running": ("requests_running", "Requests that are running."),
    "waiting": ("requests_waiting", "Requests in the waiting queue."),
    "compiling": ("requests_compiling", "Requests in the waiting queue that wait for their constraint."),
    "pages_total": ("kv_pages_total", "Pages of the KV pool."),
    "pages_used": ("kv_pages_used", "Pages that running requests hold."),
    "pages_cached": ("kv_pages_cached", "Pages that the prefix cache holds."),
    "pages_pinned": ("kv_pages_pinned", "Pages of the prefix cache that groups and sessions pin."),
    "grammar_cached_bytes": ("grammar_cached_bytes", "Bytes of the compiled constraints in the cache."),
    "kernels": ("kernels", "Triton kernels that the engine was found to need."),
    "kernels_compiled": (
        "kernels_compiled",
        "Triton kernels of these that are compiled, or that will be compiled when they are first launched.",
    ),
    "graphs_captured": ("graphs_captured", "CUDA graphs that are captured."),
    "graphs_missing": (
        "graphs_missing",
        "CUDA graphs that will be captured when they are needed or the engine is idle.",
    ),
    "graphs_refused": ("graphs_refused", "CUDA graphs whose capture failed."),
    "adapters_known": ("adapters_known", "Adapters (LoRA) that requests may name."),
    "adapters_resident": ("adapters_resident", "Adapters on the device."),
    "adapters_running": ("adapters_running", "Adapters that running requests use."),
    "adapters_waiting": ("adapters_waiting", "Adapters that waiting requests need and that are not on the device."),
}
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens admitted."),
    "cached_tokens": ("cached_prompt_tokens", "Prompt tokens found in the prefix cache."),
    "generated_tokens": ("generated_tokens", "Tokens generated."),
    "steps": ("steps", "Engine steps."),
    "restarts": ("engine_restarts", "Times that the server has started its engine process again."),
    "retractions": ("retractions", "Requests sent back to the waiting queue because memory was short."),
    "drafted_tokens": ("drafted_tokens", "Draft tokens verified."),
    "accepted_tokens": ("accepted_tokens", "Draft tokens accepted."),
    "draft_steps": ("draft_steps", "Engine steps in which drafts were verified."),
    "verify_steps": ("verify_steps", "Requests with drafts, summed over the steps in which drafts were verified."),
    "drafter_errors": (
        "drafter_errors",
        "Times that the drafter raised or broke its contract. Requests continue without the drafts concerned.",
    ),
    "policy_errors": (
        "policy_errors",
        "Steps whose requests were admitted first come first served because the schedule policy failed.",
    ),
    "jumped_tokens": (
        "jumped_tokens",
        "Output tokens that a grammar forced and that needed no forward pass (jump-forward).",
    ),
    "pins_taken": ("pins_taken", "Prefixes that were pinned in the cache for groups and sessions."),
    "pins_dropped": (
        "pins_dropped",
        "Pins released because memory was short, and pins not taken because the limit was reached.",
    ),
    "pins_expired": ("pins_expired", "Pins released after scheduler.pin_seconds."),
    "grammar_compiles": ("grammar_compiles", "Compilations of constraints started."),
    "grammar_hits": ("grammar_hits", "Requests whose constraint was already compiled or being compiled."),
    "grammar_misses": ("grammar_misses", "Requests whose constraint was new."),
    "grammar_refusals": ("grammar_refusals", "Constraints that were invalid, not supported or too expensive."),
    "grammar_overruns": ("grammar_overruns", "Requests that were ended because their masks took too long."),
    "grammar_evictions": ("grammar_evictions", "Compiled constraints that were evicted from the cache."),
    "grammar_compile_seconds": ("grammar_compile_seconds", "Time spent compiling constraints."),
    "step_seconds": ("step_seconds", "Time spent in engine steps."),
    "schedule_seconds": ("schedule_seconds", "Time of steps spent in schedule."),
    "launch_seconds": ("launch_seconds", "Time of steps spent preparing and launching forward passes and samplers."),
    "wait_seconds": ("wait_seconds", "Time of steps in which the host waited for tokens."),
    "commit_seconds": ("commit_seconds", "Time of steps spent in commit."),
    "draft_seconds": ("draft_seconds", "Time of steps spent in the drafter."),
    "mask_seconds": ("mask_seconds", "Time of launch spent filling grammar masks."),
    "verify_seconds": ("verify_seconds", "Time of launch and wait in steps for which drafts were proposed."),
    "adapters_installed": ("adapters_installed", "Times that an adapter was copied to the device."),
    "adapters_evicted": ("adapters_evicted", "Times that an adapter gave its place on the device to another one."),
    "adapters_failed": ("adapters_failed", "Adapters that could not be read."),
}


def without_gauges(stats: EngineStats) -> EngineStats:
    """Return the totals of an engine that has ended."""
    return msgspec.structs.replace(stats, **dict.fromkeys(GAUGES, 0))


class Metrics:
    """Hold the collectors of one server in their own registry."""

    def __init__(
        self,
        labels: Mapping[str, str],
        compat: str | None = None,
        model: str = "",
        info: Mapping[str, Any] = MappingProxyType({}),
        expert_series: str | None = None,
    ) -> None:
        """``labels`` describe the server: its version, its model and the name of each component. ``compat`` is the other server whose
        names are added (``metrics.compat``); these need the name of the model and the engine's ``info``. ``expert_series`` is
        ``metrics.expert_load``."""
        self.expert_series = expert_series
        self.registry = CollectorRegistry()
        self.stats = EngineStats()
        self.expert_tokens: dict[int, list[int]] = {}  # by layer; counted if ``expert_series`` is not None
        self._engine = _EngineCollector(self)
        self.registry.register(self._engine)
        self.compat = CompatMetrics(compat, model, info, self._numbers, self.registry) if compat else None
        parts = Gauge("dovetail_info", "The components of this server.", list(labels), registry=self.registry)
        parts.labels(**labels).set(1)
        self.ttft = self._measure(
            "time_to_first_token_seconds", "Time from the arrival of a request to its first token.", TTFT_SECONDS
        )
        self.tpot = self._measure(
            "time_per_output_token_seconds", "Mean time between the tokens of an output.", PER_TOKEN_SECONDS
        )
        self.itl = self._measure(
            "inter_token_latency_seconds", "Time between two consecutive tokens of an output.", PER_TOKEN_SECONDS
        )
        self.e2e = self._measure(
            "e2e_request_latency_seconds", "Time from the arrival of a request to its last token.", E2E_SECONDS
        )
        self.queue = self._measure(
            "request_queue_seconds",
            "Time from the arrival of a request to its admission by the scheduler.",
            E2E_SECONDS,
        )
        self.prefill = self._measure(
            "request_prefill_seconds", "Time from the admission of a request to its first token.", E2E_SECONDS
        )
        self.decode = self._measure(
            "request_decode_seconds", "Time from the first token of an output to its last one.", E2E_SECONDS
        )
        self.finished = Counter(
            "dovetail_outputs_finished", "Outputs by finish reason.", ["reason"], registry=self.registry
        )
        self.disconnected = Counter(
            "dovetail_requests_abandoned", "Requests whose client disconnected or that failed.", registry=self.registry
        )

        for kind in FinishKind:
            self.finished.labels(reason=kind.value)
        self.errors = Counter(
            "dovetail_error_responses", "Requests that were answered with an error.", ["status"], registry=self.registry
        )
        for status in ("429", "500", "503", "504"):  # alerts see the first one only if there was a 0 before
            self.errors.labels(status=status)

    def _measure(self, name: str, text: str, buckets: Sequence[float]) -> Histogram | BothHistograms:
        own = Histogram(f"dovetail_{name}", text, buckets=buckets, registry=self.registry)
        return own if self.compat is None else self.compat.beside(own, name)

    def _numbers(self) -> Iterable[Metric]:
        return [*self._engine.collect(), *self.finished.collect()]

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class RequestMetrics:
    """Measure the outputs of one request. ``times`` are those of each output that has arrived, by the engine's id."""

    def __init__(self, metrics: Metrics, prompts: Sequence[Prompt] = ()) -> None:
        """``prompts`` are those of the request."""
        self._metrics, self._prompts = metrics, prompts
        self.arrival = time.perf_counter()
        self.times: dict[str, OutputTimes] = {}
        self._closed = False

    @property
    def elapsed(self) -> float:
        """Return the seconds since the request arrived."""
        return time.perf_counter() - self.arrival

    @property
    def ttft(self) -> float | None:
        """Return the seconds from the arrival to the first token; None before it."""
        firsts = [times.first for times in self.times.values() if times.first]
        return min(firsts) - self.arrival if firsts else None

    @property
    def queue_seconds(self) -> float:
        """Return the seconds in the waiting queue of the output that was admitted last; 0 before any was admitted."""
        return max((times.admitted - self.arrival for times in self.times.values() if times.admitted), default=0.0)

    def observe(self, batch: Iterable[TokenOutput]) -> None:
        """Record outputs that have just arrived."""
        now = time.perf_counter()
        for output in batch:
            times = self.times.get(output.rid)
            if times is None:
                times = self._begin(output)
            if output.token_ids:
                self._tokens(times, len(output.token_ids), now)
            if output.finish is not None:
                self.finish(output.rid, output.finish.kind)

    def close(self, finished: bool) -> None:
        """Record the end of the request. If it has not ``finished``, it counts as abandoned."""
        if not self._closed and not finished:
            self._metrics.disconnected.inc()
        if not self._closed and finished and self.times and self._metrics.compat is not None:
            self._metrics.compat.closed(self._prompts, self.times.values())
        self._closed = True

    def _begin(self, output: TokenOutput) -> OutputTimes:
        """Record the first message of an output."""
        start = self.arrival
        times = self.times[output.rid] = OutputTimes(
            start, prompt_tokens=output.prompt_tokens, cached_tokens=output.cached_tokens
        )
        if output.compile_seconds is not None:
            times.compiled = start + output.compile_seconds
        if output.queue_seconds is not None:
            times.admitted = start + output.queue_seconds
            self._metrics.queue.observe(output.queue_seconds)
        return times

    def _tokens(self, times: OutputTimes, count: int, now: float) -> None:
        last, times.last = times.last, now
        times.tokens += count
        if not last:
            times.first = now
            self._metrics.ttft.observe(now - times.arrival)
            if times.admitted:
                self._metrics.prefill.observe(now - times.admitted)
            return
        for _ in range(count):
            self._metrics.itl.observe((now - last) / count)

    def finish(self, rid: str, reason: str) -> None:
        """Record that an output has just ended."""
        times = self.times[rid]
        times.end = time.perf_counter()
        self._metrics.finished.labels(reason=reason).inc()
        self._metrics.e2e.observe(times.end - times.arrival)
        if times.first:
            self._metrics.decode.observe(times.last - times.first)
        if times.tokens > 1:
            self._metrics.tpot.observe((times.last - times.first) / (times.tokens - 1))
        if self._metrics.compat is not None:
            self._metrics.compat.finished(times)


class _EngineCollector(Collector):
    """Yield the engine's numbers from ``metrics.stats``."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        stats = self._metrics.stats
        for field, (name, text) in GAUGES.items():
            yield GaugeMetricFamily(f"dovetail_{name}", text, value=getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"dovetail_{name}", text, value=getattr(stats, field))
        by_backend = CounterMetricFamily(
            "dovetail_grammar_requests",
            "Constrained requests by grammar backend.",
            labels=["backend"],
        )
        for backend, count in stats.grammar_requests.items():
            by_backend.add_metric([backend], count)
        yield by_backend
        for name, text, counts in (
            (
                "dovetail_group_cached_prompt_tokens",
                "Prompt tokens that a cache group alone had in the prefix cache. What is found is what all groups have.",
                stats.group_cached_tokens,
            ),
            (
                "dovetail_group_limited_prompts",
                "Prompts of which a cache group had the fewest tokens in the prefix cache, and another one more.",
                stats.group_limited,
            ),
        ):
            if counts:
                by_group = CounterMetricFamily(name, text, labels=["group"])
                for group, count in enumerate(counts):
                    by_group.add_metric([str(group)], count)
                yield by_group
        usage = stats.pages_used / max(stats.pages_total, 1)
        yield GaugeMetricFamily(
            "dovetail_kv_usage", "Share of the KV pool's pages that running requests hold.", value=usage
        )
        hit_rate = stats.cached_tokens / max(stats.prompt_tokens, 1)
        yield GaugeMetricFamily(
            "dovetail_prefix_hit_rate", "Share of prompt tokens found in the prefix cache.", value=hit_rate
        )
        drafts = Acceptance(stats.drafted_tokens, stats.accepted_tokens, stats.verify_steps)
        yield GaugeMetricFamily(
            "dovetail_spec_acceptance_rate", "Share of draft tokens that were accepted.", value=drafts.rate
        )
        text = "Mean number of tokens that a request gets from a step in which its drafts are verified."
        yield GaugeMetricFamily("dovetail_spec_acceptance_length", text, value=drafts.length)
        if self._metrics.expert_series is not None:
            yield from _expert_load(self._metrics.expert_tokens, each=self._metrics.expert_series == "experts")


def balancedness(tokens: Sequence[int]) -> float:
    """Return the mean of the tokens of a layer's experts, divided by the most that one of them has: 1 if all have received
    the same number, also if that is 0."""
    return sum(tokens) / len(tokens) / max(tokens) if any(tokens) else 1.0


def _expert_load(layers: Mapping[int, Sequence[int]], *, each: bool) -> Iterable[Metric]:
    balance = GaugeMetricFamily(
        "dovetail_expert_balancedness",
        "Mean of the tokens that the experts of a layer have received, divided by the most that one of them has received.",
        labels=["layer"],
    )
    counters = CounterMetricFamily(
        "dovetail_expert_tokens",
        "Tokens that an expert has received since the engine's start.",
        labels=["layer", "expert"],
    )
    for layer, tokens in layers.items():
        balance.add_metric([str(layer)], balancedness(tokens))
        for expert, count in enumerate(tokens if each else ()):
            counters.add_metric([str(layer), str(expert)], count)
    yield balance
    if each:
        yield counters
