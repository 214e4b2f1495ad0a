"""The compile service: constraints become matchers on worker threads, never on the loop's."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from dovetail.errors import GrammarError
from dovetail.types import GrammarSpec

if TYPE_CHECKING:
    from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, Matcher

MAX_TEXT_BYTES = 256 * 1024
_PER_ENTRY = 4096
"""What a cached grammar is counted for at least: its text, its entry, and what the backend does not report."""


class GrammarTicket:
    """A constraint on its way to a matcher. ``ready`` and ``matcher`` never block."""

    def __init__(self, spec: GrammarSpec, job: _Job, timeout: float) -> None:
        self._spec = spec
        self._job = job
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._cancelled = False

    @property
    def ready(self) -> bool:
        """True once ``matcher`` has an answer: compiled, refused, timed out or cancelled."""
        return self._cancelled or self._job.future.done() or time.monotonic() >= self._deadline

    def matcher(self) -> Matcher:
        """A fresh matcher of this ticket's own. Raises ``GrammarError``; only if ``ready``."""
        if self._cancelled or self._job.future.cancelled():
            raise GrammarError(f"the {self._spec.kind} was cancelled before it was compiled", param=self._spec.kind)
        if not self._job.future.done():
            assert time.monotonic() >= self._deadline, "ask `ready` first"
            self.cancel()
            raise GrammarError(
                f"the {self._spec.kind} took longer than {self._timeout:g} s to compile; make it smaller",
                param=self._spec.kind,
            )
        return self._job.future.result().matcher()

    def cancel(self) -> None:
        """Give the ticket up. A compilation that nobody waits for any more is not started."""
        if not self._cancelled:
            self._cancelled = True
            self._job.leave()


class _Job:
    """One compilation, which any number of tickets wait for."""

    def __init__(self) -> None:
        self.future: Future[CompiledGrammar] = Future()
        self._waiting = 0
        self._lock = threading.Lock()

    def join(self) -> None:
        with self._lock:
            self._waiting += 1

    def leave(self) -> None:
        with self._lock:
            self._waiting -= 1

    @property
    def wanted(self) -> bool:
        """True while a ticket waits."""
        with self._lock:
            return self._waiting > 0


class GrammarService:
    """Compiles constraints for requests, and remembers the compiled ones up to ``cache_bytes``.

    ``backend`` None means that every constraint is refused, with ``reason``. Specs that are equal compile once, also
    while they are being compiled. A compilation that outlives ``timeout`` seconds fails its requests; its thread goes
    on, so at most ``workers`` threads are ever lost to such constraints, and those behind them time out in their turn.
    ``compiles`` counts compilations that were started, ``hits`` requests that needed none of their own.
    """

    def __init__(
        self,
        backend: GrammarBackend | None,
        reason: str = "",
        *,
        workers: int = 2,
        cache_bytes: int = 256 * 2**20,
        timeout: float = 30.0,
    ) -> None:
        self._backend = backend
        self._reason = reason
        self._cache_bytes = cache_bytes
        self._timeout = timeout
        self._pool = ThreadPoolExecutor(workers, "dovetail-grammar") if backend else None
        self._lock = threading.Lock()
        self._jobs: OrderedDict[GrammarSpec, _Job] = OrderedDict()
        self._sizes: dict[GrammarSpec, int] = {}
        self.compiles = 0
        self.hits = 0

    @property
    def cached_bytes(self) -> int:
        """Memory of the compiled grammars that are kept."""
        with self._lock:
            return sum(self._sizes.values())

    def submit(self, spec: GrammarSpec) -> GrammarTicket:
        """Start to compile, unless that was done before. Raises ``GrammarError`` for what is refused at once."""
        if self._backend is None or self._pool is None:
            raise GrammarError(
                f"this server cannot constrain its output ({self._reason or 'it has no grammar backend'}); "
                "install one (pip install xgrammar), or select it with `grammar: xgrammar`",
                param=spec.kind,
            )
        size = len(spec.text.encode("utf-8", "surrogatepass"))
        if size > MAX_TEXT_BYTES:
            raise GrammarError(f"the {spec.kind} has {size} bytes; allowed: {MAX_TEXT_BYTES}", param=spec.kind)
        return self._ticket(spec, self._backend, self._pool)

    def _ticket(self, spec: GrammarSpec, backend: GrammarBackend, pool: ThreadPoolExecutor) -> GrammarTicket:
        with self._lock:
            job = self._jobs.get(spec)
            if job is None:
                job = self._jobs[spec] = _Job()
                job.join()
                pool.submit(self._run, spec, job, backend)
            else:
                job.join()
                self.hits += 1
                self._jobs.move_to_end(spec)
        return GrammarTicket(spec, job, self._timeout)

    def _run(self, spec: GrammarSpec, job: _Job, backend: GrammarBackend) -> None:
        """Compile, on a worker thread; the future always ends."""
        with self._lock:
            if not job.wanted:
                self._forget(spec, job)
                job.future.cancel()
            if not job.future.set_running_or_notify_cancel():
                return
            self.compiles += 1
        try:
            compiled = backend.compile(spec)
        except GrammarError as error:
            self._fail(spec, job, error)
        except Exception as error:
            failure = GrammarError(f"the {spec.kind} could not be compiled: {error!r}", param=spec.kind)
            failure.__cause__ = error
            self._fail(spec, job, failure)
        else:
            self._keep(spec, job, compiled)
            job.future.set_result(compiled)

    def _fail(self, spec: GrammarSpec, job: _Job, error: GrammarError) -> None:
        with self._lock:
            self._forget(spec, job)
        job.future.set_exception(error)

    def _forget(self, spec: GrammarSpec, job: _Job) -> None:
        if self._jobs.get(spec) is job:
            del self._jobs[spec]

    def _keep(self, spec: GrammarSpec, job: _Job, compiled: CompiledGrammar) -> None:
        """Count the grammar, and drop the least recently used ones beyond the bound."""
        with self._lock:
            if self._jobs.get(spec) is not job:
                return
            self._sizes[spec] = max(compiled.num_bytes, 0) + len(spec.text) + _PER_ENTRY
            total = sum(self._sizes.values())
            for old in [key for key in self._jobs if key in self._sizes]:
                if total <= self._cache_bytes:
                    break
                total -= self._sizes.pop(old)
                del self._jobs[old]

    def close(self) -> None:
        """Start nothing more; waiting tickets end as cancelled. Compilations that run are left to end by themselves."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for job in self._jobs.values():
                job.future.cancel()
