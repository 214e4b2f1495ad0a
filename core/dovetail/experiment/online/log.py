"""Record what each arm does: counters and histograms with an ``arm`` label, and the latest latencies for the comparison."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dovetail.api.problems import status_of
from dovetail.errors import DovetailError
from dovetail.messages import GenerateMsg, TokenOutput
from dovetail.server.metrics import E2E_SECONDS, PER_TOKEN_SECONDS, TTFT_SECONDS
from dovetail.types import FinishKind

KEPT = 4096
"""The number of latest outputs of each arm whose latencies are kept for the comparison."""


class Latency(NamedTuple):
    """Describe one finished output. ``at`` is when it finished (seconds, monotonic clock), ``key`` is the key that routed its
    request; ``ttft`` and ``tpot`` are milliseconds. ``tpot`` is None for an output with fewer than two tokens."""

    at: float
    key: str
    ttft: float
    tpot: float | None


class ArmGauges(NamedTuple):
    """Hold the values of one arm's gauges."""

    arm: str
    up: bool
    share: float
    open: int


class ArmLog:
    """Hold the Prometheus collectors and the latest latencies of all arms."""

    def __init__(self, arms: Sequence[str]) -> None:
        self.latencies: dict[str, deque[Latency]] = {arm: deque(maxlen=KEPT) for arm in arms}
        self.requests = _counter("arm_requests", "Requests sent to an arm, by role: served, shadow.", "role")
        self.tokens = _counter("arm_tokens", "Tokens of an arm, by kind: prompt, output.", "kind")
        self.finished = _counter(
            "arm_outputs_finished", "Outputs of an arm by finish reason, abort included.", "reason"
        )
        self.errors = _counter("arm_errors", "Requests of an arm that failed, by HTTP status.", "status")
        self.abandoned = _counter("arm_requests_abandoned", "Requests of an arm whose client disconnected.")
        self.ttft = _histogram(
            "arm_time_to_first_token_seconds", "Time from the arrival of a request to its first token.", TTFT_SECONDS
        )
        self.tpot = _histogram(
            "arm_time_per_output_token_seconds", "Mean time between the tokens of an output.", PER_TOKEN_SECONDS
        )
        self.itl = _histogram(
            "arm_inter_token_latency_seconds", "Time between two consecutive tokens.", PER_TOKEN_SECONDS
        )
        self.e2e = _histogram(
            "arm_e2e_request_latency_seconds", "Time from the arrival of a request to its last token.", E2E_SECONDS
        )

    def register(self, registry: CollectorRegistry, gauges: Callable[[], Iterable[ArmGauges]]) -> None:
        """Register all collectors with ``registry``. ``gauges`` returns the current gauge values of every arm."""
        for collector in vars(self).values():
            if isinstance(collector, Counter | Histogram):
                registry.register(collector)
        registry.register(_GaugeCollector(gauges))

    def totals(self, counter: Counter) -> dict[tuple[str, ...], int]:
        """Return the values of a counter by its label values, for the page."""
        samples = [
            sample for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total")
        ]
        return {tuple(sample.labels.values()): int(sample.value) for sample in samples}


class StreamLog:
    """Measure the requests of one stream of an arm. If ``keep`` is set, the output tokens are kept as well. ``cut`` holds the
    ids of the outputs that the server ended because it found a stop string."""

    def __init__(self, log: ArmLog, arm: str, key: str, msgs: Sequence[GenerateMsg], role: str, keep: bool) -> None:
        self.outputs: dict[str, list[int]] = {msg.rid: [] for msg in msgs} if keep else {}
        self.finish: dict[str, FinishKind] = {}
        self.latencies: list[Latency] = []
        self.cut: set[str] = set()
        self.failed = False
        self.key = key
        self._log, self._arm = log, arm
        self._rids = frozenset(msg.rid for msg in msgs)
        self._arrival = time.monotonic()
        self._times: dict[str, tuple[float, float, int]] = {}  # first, last, tokens
        log.requests.labels(arm, role).inc()
        log.tokens.labels(arm, "prompt").inc(sum(len(msg.input_ids) for msg in msgs))

    @property
    def complete(self) -> bool:
        """Return True if every output has finished with a stop or at its length limit."""
        ends = (FinishKind.STOP, FinishKind.LENGTH)
        return not self.failed and all(self.finish.get(rid) in ends for rid in self._rids)

    def observe(self, batch: Iterable[TokenOutput]) -> None:
        """Record outputs that have just arrived."""
        now = time.monotonic()
        for output in batch:
            if output.rid in self.finish:
                continue
            if output.token_ids:
                self._tokens(output, now)
            if output.finish is not None:
                self.record_finish(output.rid, output.finish.kind)

    def record_finish(self, rid: str, kind: FinishKind) -> None:
        """Record that an output has just ended."""
        now = time.monotonic()
        self.finish[rid] = kind
        self._log.finished.labels(self._arm, kind.value).inc()
        self._log.e2e.labels(self._arm).observe(now - self._arrival)
        if kind is FinishKind.ERROR:
            self._log.errors.labels(self._arm, "500").inc()
        if rid in self._times and kind in (FinishKind.STOP, FinishKind.LENGTH):
            self._measured(self._times[rid], now)

    def record_cut(self, rid: str) -> None:
        """Record that the server has ended an output because its text contains a stop string."""
        self.cut.add(rid)
        self.record_finish(rid, FinishKind.STOP)

    def error(self, error: DovetailError) -> None:
        """Record that the stream has failed."""
        if not self.failed:
            self.failed = True
            self._log.errors.labels(self._arm, str(status_of(error))).inc()

    def close(self) -> None:
        """Record the end of the stream: a request without a finish counts as abandoned."""
        if not self.failed and self.finish.keys() != self._rids:
            self._log.abandoned.labels(self._arm).inc()

    def _tokens(self, output: TokenOutput, now: float) -> None:
        count = len(output.token_ids)
        self._log.tokens.labels(self._arm, "output").inc(count)
        if output.rid in self.outputs:
            self.outputs[output.rid] += output.token_ids
        if output.rid not in self._times:
            self._times[output.rid] = (now, now, count)
            self._log.ttft.labels(self._arm).observe(now - self._arrival)
            return
        first, last, before = self._times[output.rid]
        self._times[output.rid] = (first, now, before + count)
        for _ in range(count):
            self._log.itl.labels(self._arm).observe((now - last) / count)

    def _measured(self, times: tuple[float, float, int], now: float) -> None:
        first, last, count = times
        tpot = (last - first) / (count - 1) if count > 1 else None
        if tpot is not None:
            self._log.tpot.labels(self._arm).observe(tpot)
        self.latencies.append(Latency(now, self.key, 1e3 * (first - self._arrival), tpot and 1e3 * tpot))


class _GaugeCollector(Collector):
    def __init__(self, gauges: Callable[[], Iterable[ArmGauges]]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("dovetail_arm_up", "1 while the arm accepts requests, else 0.", labels=["arm"])
        share = GaugeMetricFamily(
            "dovetail_arm_share", "Share of the request keys that the arm serves.", labels=["arm"]
        )
        running = GaugeMetricFamily(
            "dovetail_arm_requests_open", "Requests that the arm has not finished.", labels=["arm"]
        )
        for one in self._gauges():
            for family, value in ((up, float(one.up)), (share, one.share), (running, one.open)):
                family.add_metric([one.arm], value)
        return [up, share, running]


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"dovetail_{name}", text, ["arm", *labels], registry=None)


def _histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(f"dovetail_{name}", text, ["arm"], buckets=buckets, registry=None)
