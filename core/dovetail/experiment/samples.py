"""Define the metrics of an experiment, and extract their values from a run: numbers, and the request that each belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dovetail.bench.metrics import SLO, e2e, itl, span, tpot, ttft
from dovetail.bench.records import Measurement
from dovetail.experiment.result import Better

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Metric:
    """Describe a number of a run. ``kind`` is the mean of its values, their ``q`` quantile, or their sum per second (``rate``)."""

    name: str
    label: str
    unit: str
    better: Better
    kind: Literal["mean", "quantile", "rate"]
    q: float = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """Hold one metric of one run: ``values`` [values] and ``owners`` [values], the index in the workload of the request that each value
    belongs to. A request may have no value or many (inter-token latencies). ``seconds`` is the duration of the run, for rates."""

    values: Floats
    owners: Ints
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class BlockSamples:
    """Hold the runs of both arms that are compared with each other, in the order in which they ran: two of each arm for ABBA."""

    a: tuple[Sample, ...]
    b: tuple[Sample, ...]


METRICS: tuple[Metric, ...] = (
    Metric("ttft_p50", "TTFT, median", "ms", "lower", "quantile", 0.5),
    Metric("ttft_p99", "TTFT, p99", "ms", "lower", "quantile", 0.99),
    Metric("tpot_mean", "TPOT, mean", "ms", "lower", "mean"),
    Metric("itl_p50", "ITL, median", "ms", "lower", "quantile", 0.5),
    Metric("itl_p99", "ITL, p99", "ms", "lower", "quantile", 0.99),
    Metric("e2e_mean", "End to end, mean", "ms", "lower", "mean"),
    Metric("throughput", "Throughput", "tok/s", "higher", "rate"),
    Metric("goodput", "Goodput", "req/s", "higher", "rate"),
)
"""All metrics of an experiment. Goodput needs an SLO."""

PRIMARY = ("ttft_p50", "tpot_mean", "throughput")
"""The metrics that determine the verdict by default."""

_MS = 1e3
_OF_CALL: Mapping[str, Callable[[Measurement], Sequence[float | None]]] = {
    "ttft": lambda m: (ttft(m),),
    "tpot": lambda m: (tpot(m),),
    "itl": itl,
    "e2e": lambda m: (e2e(m),),
}


def metrics(slo: SLO | None) -> tuple[Metric, ...]:
    """Return the metrics that can be computed. Goodput is among them only if there is an SLO."""
    return METRICS if slo else METRICS[:-1]


def clusters(calls: Sequence[tuple[str, str]]) -> Ints:
    """Return the cluster number of each (id, group) of a workload [requests]. Requests of one group depend on each other and share a
    number."""
    number: dict[str, int] = {}
    return np.array([number.setdefault(group, len(number)) for _, group in calls], dtype=np.int64)


def sample(
    metric: Metric, measurements: Sequence[Measurement], place: Mapping[str, int], slo: SLO | None = None
) -> Sample:
    """Return a metric of a run. ``place`` is the index in the workload of each call, by its id. Failed calls have no latency and no
    tokens, and never meet an SLO."""
    if metric.kind == "rate":
        counts = [(m, _counted(metric, m, slo)) for m in measurements]
    else:
        source = _OF_CALL[metric.name.partition("_")[0]]
        counts = [(m, v * _MS) for m in measurements if m.ok for v in source(m) if v is not None]
    values = np.array([value for _, value in counts], dtype=np.float64)
    owners = np.array([place[m.id] for m, _ in counts], dtype=np.int64)
    return Sample(values, owners, span(measurements) if metric.kind == "rate" else 1.0)


def _counted(metric: Metric, m: Measurement, slo: SLO | None) -> float:
    if metric.name == "goodput":
        assert slo is not None, "metrics() returns goodput only with an SLO"
        return float(slo.met(m))
    return float(m.output_tokens) if m.ok else 0.0
