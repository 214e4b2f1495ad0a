"""Compute the numbers of a run, each defined once: TTFT, TPOT, ITL, end-to-end latency, throughput, goodput.

All latencies are in seconds and count from when a call was due (``records.Measurement``).

    due        first                last
     |-- TTFT --|-- ITL --|-- ITL --|          TPOT = (last - first) / (tokens - 1)
     |------------- e2e ------------|
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np

from dovetail.bench.records import Data, Measurement, RunRecord
from dovetail.errors import ConfigError


class SLO(Data):
    """Bound the latencies of a call that counts as good, in milliseconds; None is no bound. A failed call never meets
    the SLO."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met(self, m: Measurement) -> bool:
        """Return whether the call succeeded within every bound."""
        pairs = ((self.ttft_ms, ttft(m)), (self.tpot_ms, tpot(m)), (self.e2e_ms, e2e(m)))
        return m.ok and all(bound is None or value is None or value * 1e3 <= bound for bound, value in pairs)

    def __str__(self) -> str:
        bounds = (("ttft", self.ttft_ms), ("tpot", self.tpot_ms), ("e2e", self.e2e_ms))
        return " ".join(f"{name}:{value:g}" for name, value in bounds if value is not None)


def parse_slo(words: Iterable[str]) -> SLO:
    """Parse ``["ttft:200", "tpot:20"]`` (milliseconds); one word may hold several bounds. Raises ``ConfigError``."""
    bounds: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, _, value = word.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in ("ttft", "tpot", "e2e") or not number > 0 or f"{name}_ms" in bounds:
            raise ConfigError(
                f"goodput {word!r}; allowed: ttft:MS, tpot:MS and e2e:MS, each once, as in ttft:200 tpot:20"
            )
        bounds[f"{name}_ms"] = number
    if not bounds:
        raise ConfigError("the SLO has no bound; give one of ttft:MS, tpot:MS and e2e:MS")
    return SLO(**bounds)


def ttft(m: Measurement) -> float | None:
    """Return the time to the first token; None for a call without tokens."""
    return None if m.first_token is None else m.first_token - m.due


def tpot(m: Measurement) -> float | None:
    """Return the time per output token after the first; None for fewer than two tokens."""
    if m.first_token is None or m.output_tokens < 2:
        return None
    return (m.token_times[-1] - m.first_token) / (m.output_tokens - 1)


def itl(m: Measurement) -> list[float]:
    """Return the gaps between tokens.

    Tokens that arrive together share the gap before them, so that the mean of an output's gaps is its TPOT if the first
    token arrived alone. Tokens that arrive together with the first token have no gap.
    """
    arrivals = [(time, sum(1 for _ in same)) for time, same in groupby(m.token_times)]
    gaps: list[float] = []
    for (before, _), (now, count) in pairwise(arrivals):
        gaps += [(now - before) / count] * count
    return gaps


def e2e(m: Measurement) -> float:
    """Return the time to the end of the answer."""
    return m.end - m.due


PER_CALL: Mapping[str, Callable[[Measurement], float | None]] = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
"""The latencies of which a call has at most one value each."""


def values(measurements: Iterable[Measurement], metric: str) -> list[tuple[str, float]]:
    """Return (group, value) for every successful call. ``metric`` is ttft, tpot, e2e, or itl, which has many values per
    call."""
    done = [m for m in measurements if m.ok]
    if metric == "itl":
        return [(m.group, gap) for m in done for gap in itl(m)]
    found = [(m.group, PER_CALL[metric](m)) for m in done]
    return [(group, value) for group, value in found if value is not None]


def span(measurements: Sequence[Measurement]) -> float:
    """Return the seconds from when the first call was due to the end of the last call."""
    if not measurements:
        return 0.0
    return max(m.end for m in measurements) - min(m.due for m in measurements)


def throughput(measurements: Sequence[Measurement]) -> float:
    """Return the output tokens of successful calls per second of ``span``."""
    seconds = span(measurements)
    return sum(m.output_tokens for m in measurements if m.ok) / seconds if seconds else 0.0


class Goodput(Data):
    """Count the calls that met an SLO. ``rate`` is calls per second; ``share`` is their share of all calls, failed
    calls included."""

    slo: SLO
    good: int
    rate: float
    share: float


def goodput(measurements: Sequence[Measurement], slo: SLO) -> Goodput:
    """Return how many of the calls met ``slo``."""
    good, seconds = sum(slo.met(m) for m in measurements), span(measurements)
    return Goodput(slo=slo, good=good, rate=good / seconds if seconds else 0.0, share=good / max(len(measurements), 1))


class SampleSummary(Data):
    """Summarise samples, which are in seconds unless the caller passes values of another unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(numbers: Sequence[float]) -> SampleSummary | None:
    """Summarise ``numbers``; None if there are none. Percentiles are interpolated linearly."""
    if not numbers:
        return None
    array = np.asarray(numbers, dtype=np.float64)
    p50, p90, p99 = (float(p) for p in np.percentile(array, (50, 90, 99)))
    return SampleSummary(count=len(array), mean=float(array.mean()), p50=p50, p90=p90, p99=p99, max=float(array.max()))


class Summary(Data):
    """Summarise a run in numbers. Rates are per second of ``seconds``; token counts include successful calls only.

    ``failures`` counts the failed calls by error text.
    """

    calls: int
    completed: int
    failed: int
    failures: dict[str, int]
    seconds: float
    calls_per_second: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    total_tokens_per_second: float
    cached_share: float | None
    acceptance_length: float | None
    ttft: SampleSummary | None
    tpot: SampleSummary | None
    itl: SampleSummary | None
    e2e: SampleSummary | None
    goodput: Goodput | None


def summarize(record: RunRecord, slo: SLO | None = None) -> Summary:
    """Summarise the record of a run. ``slo`` adds the goodput."""
    every = record.measurements
    done, seconds = [m for m in every if m.ok], span(every)
    prompt, output = sum(m.prompt_tokens for m in done), sum(m.output_tokens for m in done)
    per_second = 1 / seconds if seconds else 0.0
    dists = {name: distribution([value for _, value in values(done, name)]) for name in ("ttft", "tpot", "itl", "e2e")}
    return Summary(
        calls=len(every),
        completed=len(done),
        failed=len(every) - len(done),
        failures=_failures(every),
        seconds=seconds,
        calls_per_second=len(done) * per_second,
        prompt_tokens=prompt,
        output_tokens=output,
        output_tokens_per_second=output * per_second,
        total_tokens_per_second=(prompt + output) * per_second,
        cached_share=_cached_share(done),
        acceptance_length=_acceptance_length(done),
        **dists,
        goodput=goodput(every, slo) if slo else None,
    )


def _failures(measurements: Iterable[Measurement]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for m in measurements:
        if not m.ok:
            text = m.error or "no reason given"
            counts[text] = counts.get(text, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _cached_share(done: Sequence[Measurement]) -> float | None:
    """Return the cached share of the prompt tokens of those calls whose server reported the number of cached tokens."""
    known = [(m.cached_tokens, m.prompt_tokens) for m in done if m.cached_tokens is not None]
    total = sum(prompt for _, prompt in known)
    return sum(cached for cached, _ in known) / total if total else None


def _acceptance_length(done: Sequence[Measurement]) -> float | None:
    steps = sum(m.verify_steps or 0 for m in done)
    return 1 + sum(m.accepted or 0 for m in done) / steps if steps else None
