"""Compute when the calls of a workload are due."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice, pairwise
from pathlib import Path

from dovetail.bench.draws import Draws
from dovetail.bench.records import Workload
from dovetail.bench.specs import AllAtOnce, ArrivalSpec, ArrivalTrace, AsGiven, FixedConcurrency, Gamma, Poisson
from dovetail.errors import ConfigError


def with_arrivals(workload: Workload, spec: ArrivalSpec, seed: int = 0) -> Workload:
    """Return the same calls with the arrival times of ``spec``. Calls with a parent are still due after their parent. Raises
    ``ConfigError``."""
    if isinstance(spec, AsGiven):
        return workload
    roots = sum(call.parent is None for call in workload.calls)
    times = iter(offsets(spec, roots, seed))
    calls = [c if c.parent is not None else c.model_copy(update={"arrival": next(times)}) for c in workload.calls]
    limit = spec.limit if isinstance(spec, FixedConcurrency) else None
    description = {**workload.description, "arrivals": spec.model_dump(mode="json")}
    return workload.model_copy(update={"calls": tuple(calls), "concurrency": limit, "description": description})


def offsets(spec: ArrivalSpec, count: int, seed: int = 0) -> list[float]:
    """Return ``count`` arrival times in ascending order: seconds after the start, rounded to whole microseconds.

    Raises ``ConfigError`` for a file of offsets that cannot be used.
    """
    if isinstance(spec, AllAtOnce | FixedConcurrency | AsGiven):
        return [0.0] * count
    times = _traced(spec) if isinstance(spec, ArrivalTrace) else accumulate(_gaps(spec, seed))
    return [round(time, 6) for time in islice(times, count)]


def _gaps(spec: Poisson | Gamma, seed: int) -> Iterator[float]:
    """Yield the gaps between arrivals. The first call is due at once. Another rate gives the same gaps, scaled."""
    draws = Draws(seed, "arrivals")
    yield 0.0
    while True:
        if isinstance(spec, Poisson):
            yield draws.exponential() / spec.rate
        else:
            yield draws.gamma(spec.burstiness) / (spec.burstiness * spec.rate)


def _traced(spec: ArrivalTrace) -> Iterator[float]:
    """Yield the offsets of a trace repeatedly. A repetition begins one mean gap after the end of the previous one."""
    given = list(spec.offsets or ()) if spec.file is None else _read(spec.file)
    if any(b < a for a, b in pairwise(given)):
        raise ConfigError("the offsets of a trace are not in ascending order; sort them")
    length = given[-1] - given[0]
    period, start = length + (length / (len(given) - 1) if len(given) > 1 else 1.0), 0.0
    while True:
        yield from ((start + time) / spec.speed for time in given)
        start += period


def _read(file: Path) -> list[float]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"the trace {file} cannot be read: {error}") from error
    found: list[float] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(float(line))
        except ValueError:
            found.append(-1.0)
        if not 0 <= found[-1] < float("inf"):
            raise ConfigError(f"{file}, line {number} is {line[:40]!r}; allowed: seconds after the start, one per line")
    if not found:
        raise ConfigError(f"{file} has no offsets; give seconds after the start, one per line")
    return found
