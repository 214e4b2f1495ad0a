"""Compile constraints into matchers on worker threads, so that the loop never waits for a compilation."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.constraints.backend_choice import candidates
from dovetail.constraints.cache import Compiled, GrammarCache, named
from dovetail.constraints.fair_pool import FairPool
from dovetail.constraints.jobs import CompileJob, GrammarTicket
from dovetail.constraints.limits import check_size
from dovetail.constraints.mask_budget import DEFAULT_MASK_BUDGET, Meter
from dovetail.constraints.process import Abandoned
from dovetail.constraints.shortage import is_shortage, shortage_error
from dovetail.errors import GrammarError, QueueFullError, RequestError

if TYPE_CHECKING:
    from dovetail.constraints.compilers import Compiler
    from dovetail.constraints.mask_budget import MaskBudget
    from dovetail.interfaces.grammar import GrammarBackend, Matcher
    from dovetail.sampling_params import GrammarSpec


@dataclass(slots=True)
class GrammarTotals:
    """Count compilations since the start.

    ``hits`` counts the requests whose constraint was cached (compiled or refused) or was being compiled, ``misses`` all
    other requests. ``compiles`` counts the compilations that were started, ``seconds`` is the time that they took, and
    ``refusals`` counts those that ended with a ``GrammarError``. ``overruns`` counts the requests whose matchers took
    too long. ``backends`` counts requests by the backend of their matcher.
    """

    hits: int = 0
    misses: int = 0
    compiles: int = 0
    refusals: int = 0
    overruns: int = 0
    seconds: float = 0.0
    backends: Counter[str] = field(default_factory=Counter)


class GrammarService:
    """Compile constraints for requests, and cache the compiled ones in up to ``cache_bytes``.

    If ``compiler`` is None, every constraint is refused, with ``reason``. Equal constraints are compiled once, even if
    the second is submitted while the first is being compiled. At most ``workers`` constraints are compiled at the same
    time, and the others wait in turns for their tenants (``FairPool``).
    """

    def __init__(
        self,
        compiler: Compiler | None,
        reason: str = "",
        *,
        workers: int = 2,
        cache_bytes: int = 256 * 2**20,
        budget: MaskBudget = DEFAULT_MASK_BUDGET,
    ) -> None:
        self._compiler = compiler
        self._reason = reason
        self._budget = budget
        self._pool = FairPool(workers, "dovetail-grammar") if compiler else None
        self._lock = threading.Lock()
        self._jobs: dict[GrammarSpec, CompileJob] = {}
        self._cache = GrammarCache(cache_bytes)
        self.totals = GrammarTotals()

    @property
    def cached_bytes(self) -> int:
        """Return the memory of the cache, in bytes."""
        return self._cache.num_bytes

    @property
    def evictions(self) -> int:
        """Return the number of compiled constraints that were evicted from the cache since the start."""
        return self._cache.evictions

    def submit(self, spec: GrammarSpec, tenant: str = "", weight: float = 1.0) -> GrammarTicket:
        """Start to compile ``spec``, unless it is cached or being compiled. The constraints of different tenants are compiled
        in turns, in proportion to ``weight``. Raises ``GrammarError`` if it is refused at once, and ``QueueFullError`` if
        threads are short."""
        if self._compiler is None or self._pool is None:
            raise GrammarError(
                f"this server cannot constrain its output ({self._reason or 'it has no grammar backend'}); "
                "install one (pip install xgrammar), or select it with `grammar: xgrammar`",
                param=spec.kind,
            )
        check_size(spec)
        first = candidates(self._compiler.engines, spec)[0].name
        with self._lock:
            job = self._known(spec, first, self._compiler.seconds)
            if job is None:
                job = self._jobs[spec] = CompileJob(spec, self._compiler.seconds)
                job.join()
                self.totals.misses += 1
                self._start(job, tenant, weight)
            else:
                job.join()
                self.totals.hits += 1
        return GrammarTicket(job)

    def _start(self, job: CompileJob, tenant: str, weight: float) -> None:
        assert self._compiler is not None
        assert self._pool is not None
        try:
            self._pool.submit(tenant, weight, self._run, job, self._compiler)
        except RuntimeError as error:  # the pool could not start a thread
            self._forget(job)
            job.close()
            if is_shortage(error):
                raise shortage_error(error) from error
            raise

    def matcher(self, ticket: GrammarTicket) -> Matcher:
        """Return the matcher of a ticket that is ready, and count the request. Raises the exceptions of
        ``GrammarTicket.matcher``, and ``QueueFullError`` if memory is short."""
        try:
            matcher = ticket.matcher()
        except Exception as error:
            if is_shortage(error) and not isinstance(error, RequestError | QueueFullError):
                raise shortage_error(error) from error
            raise
        self.totals.backends[ticket.backend] += 1
        return matcher

    def meter(self, ticket: GrammarTicket) -> Meter:
        """Return the meter for the matcher of a ticket. If the matcher exceeds the budget, its constraint is refused
        for a while, because it would cost the next request the same time."""
        spec, backend = ticket.spec, ticket.backend

        def over(error: GrammarError) -> None:
            with self._lock:
                self.totals.overruns += 1
                for refused in (spec, named(spec, backend)):
                    self._cache.refuse(refused, error)

        return Meter(spec, backend, self._budget, over)

    def backend(self, name: str) -> GrammarBackend:
        """Return the backend ``name``, which must have made a matcher before."""
        assert self._compiler is not None
        return next(engine.backend for engine in self._compiler.engines if engine.name == name)

    def _known(self, spec: GrammarSpec, first: str, seconds: float) -> CompileJob | None:
        """Return a job for ``spec`` that has an outcome or is being compiled; None if there is none. If ``spec`` names
        no backend, an equal constraint that was compiled by ``first``, the first candidate for ``spec``, is used too,
        because ``first`` would be chosen again."""
        outcome = self._cache.get(spec)
        if outcome is None and spec.backend is None:
            found = self._cache.get(named(spec, first))
            outcome = found if isinstance(found, Compiled) else None
        return CompileJob(spec, seconds, outcome) if outcome is not None else self._jobs.get(spec)

    def _run(self, job: CompileJob, compiler: Compiler) -> None:
        """Compile a job on a worker thread. The job always ends, with an outcome or an error."""
        while self._begin(job):
            start = time.monotonic()
            try:
                self._end(job, compiler.compile(job))
            except Abandoned:
                continue  # another request may have begun to wait meanwhile
            except Exception as error:
                short = is_shortage(error) and not isinstance(error, GrammarError | QueueFullError)
                self._end(job, shortage_error(error) if short else error)
            finally:
                with self._lock:
                    self.totals.seconds += time.monotonic() - start
            return

    def _begin(self, job: CompileJob) -> bool:
        with self._lock:
            if not job.is_awaited:
                self._forget(job)
                job.close()
                return False
            self.totals.compiles += not job.started
            job.started = True
            return True

    def _end(self, job: CompileJob, result: Compiled | Exception) -> None:
        with self._lock:
            self._forget(job)
            if isinstance(result, Compiled):
                self._cache.keep(job.spec, result)
                job.outcome = result
            elif isinstance(result, GrammarError):
                self.totals.refusals += 1
                job.outcome = self._cache.refuse(job.spec, result)
            else:
                job.error = result

    def _forget(self, job: CompileJob) -> None:
        if self._jobs.get(job.spec) is job:
            del self._jobs[job.spec]

    def close(self) -> None:
        """Start no more compilations. Tickets that still wait end as cancelled. Compilations that run on threads end by
        themselves."""
        if self._pool is None or self._compiler is None:
            return
        self._pool.close()
        with self._lock:
            for job in self._jobs.values():
                job.close()
        self._compiler.close()
