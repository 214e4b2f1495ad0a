"""Run ``dovetail bench serve`` and ``dovetail bench offline``: make the workload, warm up, measure once or at several
rates, and report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.bench.arrivals import with_arrivals
from dovetail.bench.call_tracker import OnDone, ignore_measurement
from dovetail.bench.client.http import open_client
from dovetail.bench.client.target import ApiName, find_target
from dovetail.bench.metrics import SLO
from dovetail.bench.records import RunRecord, Workload
from dovetail.bench.report import BenchReport, Point
from dovetail.bench.serve import measure_server
from dovetail.bench.specs import ArrivalSpec, WorkloadSpec
from dovetail.bench.sweep import at_rate, highest_rate, point_of, sweep
from dovetail.bench.workloads import PromptVocabulary, make_workload, repeated, with_roots
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.config import Config


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Describe the workload, its arrivals and the SLO. ``warmup`` calls with another seed are sent first and not
    recorded."""

    spec: WorkloadSpec
    arrivals: ArrivalSpec | None = None
    seed: int = 0
    warmup: int = 4
    slo: SLO | None = None
    share: float = 0.9

    def workloads(self, vocabulary: PromptVocabulary | None) -> tuple[Workload, Workload | None]:
        """Return the workload that is measured, and its warm-up or None."""
        workload = make_workload(self.spec, self.seed, vocabulary, self.arrivals)
        if not self.warmup:
            return workload, None
        other = make_workload(self.spec, self.seed + 2**31, vocabulary)
        calls = tuple(call.model_copy(update={"arrival": 0.0}) for call in other.calls[: self.warmup])
        return workload, other.model_copy(update={"calls": calls})

    def at_rate(self, vocabulary: PromptVocabulary | None, rate: float, seconds: float) -> Workload:
        """Return the workload that arrives within ``seconds`` at ``rate``."""
        roots = max(math.ceil(rate * seconds), 1)
        made = repeated(make_workload(with_roots(self.spec, roots), self.seed, vocabulary), roots)
        return with_arrivals(made, at_rate(self.arrivals, rate), self.seed)

    def report(
        self,
        workload: Workload,
        title: str,
        points: list[Point],
        *,
        searched: bool = False,
        best_rate: float | None = None,
        startup_seconds: float | None = None,
    ) -> BenchReport:
        """Return the report of the measured points."""
        return BenchReport(
            title=title,
            workload=workload.description,
            slo=self.slo,
            share=self.share,
            points=tuple(points),
            searched=searched,
            best_rate=best_rate,
            startup_seconds=startup_seconds,
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """Describe the rates to measure.

    ``rates`` requires a run at each rate. ``find`` instead searches for the highest rate that meets the SLO, starting
    from ``start``, until it is known up to the factor 1 + ``tolerance``. Each run takes the calls that arrive within ``seconds``. With a
    number of calls that is the same at every rate, a high rate would be a short burst, which does not measure what the
    server can sustain.
    """

    rates: tuple[float, ...] = ()
    find: bool = False
    start: float = 1.0
    tolerance: float = 0.1
    seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """Describe how the client reaches the server.

    ``timeout`` seconds without a byte fail a call. ``flush`` empties the server's prefix cache before each run if its
    API can do so.
    """

    url: str
    api: ApiName = "native"
    model: str | None = None
    tokenizer: Path | None = None
    api_key: str | None = None
    timeout: float = 600.0
    flush: bool = True


OnRun = Callable[[Workload, float | None], OnDone]
"""Called before each run with its workload and its rate; returns the function that is called with each measurement of
the run."""


async def bench_server(
    access: ServerAccess,
    plan: LoadPlan,
    rates: Rates | None = None,
    on_run: OnRun = lambda workload, rate: ignore_measurement,
) -> BenchReport:
    """Measure a server. Raises ``ConfigError`` for settings that do not fit together."""
    rates = rates or Rates()
    if rates.find and plan.slo is None:
        raise ConfigError(
            "the search for the highest rate needs an SLO; give --goodput, as in --goodput ttft:200 tpot:20"
        )
    async with open_client(access.url, access.timeout, access.api_key) as client:
        target = await find_target(client, access.api, access.model, access.tokenizer)
        workload, warmup = plan.workloads(target.vocabulary)
        left = [warmup]

        async def measure(load: Workload, rate: float | None) -> RunRecord:
            first = left.pop() if left else None
            return await measure_server(client, target, load, first, flush=access.flush, on_done=on_run(load, rate))

        async def at(rate: float) -> RunRecord:
            return await measure(plan.at_rate(target.vocabulary, rate, rates.seconds), rate)

        title = f"{target.name} at {access.url}"
        if rates.find:
            assert plan.slo is not None
            best, points = await highest_rate(at, plan.slo, plan.share, rates.start, rates.tolerance)
            return plan.report(workload, title, points, searched=True, best_rate=best)
        if rates.rates:
            points = await sweep(at, rates.rates, plan.slo, plan.share)
        else:
            rate = getattr(plan.arrivals, "rate", None)
            points = [point_of(rate, await measure(workload, rate), plan.slo, plan.share)]
        return plan.report(workload, title, points)


def bench_offline(
    config: Config, plan: LoadPlan, on_run: OnRun = lambda workload, rate: ignore_measurement
) -> BenchReport:
    """Measure the engine in this process."""
    from dovetail.bench.offline import measure_offline
    from dovetail.llm import LLM

    started = time.perf_counter()
    llm = LLM(config)
    startup = time.perf_counter() - started
    try:
        vocabulary = PromptVocabulary.of(llm.tokenizer) if llm.tokenizer is not None else None
        if vocabulary is None:
            info = llm.resolved.model_info
            vocabulary = PromptVocabulary.of_size(info.vocab_size, info.eos_token_ids)
        workload, warmup = plan.workloads(vocabulary)
        rate = getattr(plan.arrivals, "rate", None)
        watch = on_run(workload, rate)
        record = measure_offline(llm, workload, warmup, startup_seconds=startup, on_done=watch)
    finally:
        llm.close()
    point = point_of(rate, record, plan.slo, plan.share)
    return plan.report(workload, f"{config.model.name}, offline", [point], startup_seconds=startup)
