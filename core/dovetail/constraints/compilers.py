"""Compile constraints, either on a thread of this process or in a worker process that can be killed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from dovetail.constraints import worker
from dovetail.constraints.backend_choice import candidates, choose
from dovetail.constraints.cache import Compiled
from dovetail.constraints.jobs import too_slow
from dovetail.constraints.mask_budget import DEFAULT_MASK_BUDGET
from dovetail.constraints.process import STALL_SECONDS, Abandoned, Ended, TimedOut, WorkerProcess
from dovetail.constraints.shortage import COMPILE_BYTES, LOAD_BYTES_PER_BYTE, is_shortage, require_memory
from dovetail.errors import EngineError, GrammarError, QueueFullError

if TYPE_CHECKING:
    from dovetail.constraints.backend_choice import GrammarEngine, GrammarRecipe
    from dovetail.constraints.jobs import CompileJob
    from dovetail.constraints.mask_budget import MaskBudget
    from dovetail.interfaces.grammar import GrammarContext
    from dovetail.sampling_params import GrammarSpec

log = logging.getLogger(__name__)


class Compiler(Protocol):
    """Compile constraints for the service, on the threads of the service."""

    engines: Sequence[GrammarEngine]
    seconds: float  # time limit of one constraint

    def compile(self, job: CompileJob) -> Compiled:
        """Compile ``job.spec``. Raises ``GrammarError`` if the constraint is refused or costs too much, ``Abandoned``
        if no request waits for it any more, ``QueueFullError`` if memory or threads are short, and ``EngineError`` for other
        failures that the constraint does not cause."""
        ...

    def close(self) -> None:
        """Free processes and memory. The service calls this once; compilations that are running end by themselves."""
        ...


class ThreadCompiler:
    """Compile on the calling thread. A compilation that exceeds its time limit fails its requests and occupies its
    thread until it ends."""

    def __init__(self, engines: Sequence[GrammarEngine], seconds: float) -> None:
        self.engines: Sequence[GrammarEngine] = engines
        self.seconds = seconds

    def compile(self, job: CompileJob) -> Compiled:
        """See ``Compiler``."""
        engine, grammar = choose(self.engines, job.spec, job)
        return Compiled(engine.name, grammar)

    def close(self) -> None:
        """See ``Compiler``."""


class ProcessCompiler:
    """Compile in worker processes, which are started when they are first needed.

    Backends that offer ``grammar.portable`` return the compiled constraint as bytes. For other backends, the worker
    process only shows that the constraint can be compiled within its limits; the constraint is then compiled again in
    this process.
    """

    def __init__(
        self,
        recipes: Sequence[GrammarRecipe],
        context: GrammarContext,
        *,
        seconds: float,
        memory: int,
        budget: MaskBudget = DEFAULT_MASK_BUDGET,
        stall_seconds: float = STALL_SECONDS,
        processes: int = 1,
    ) -> None:
        """Store the settings of worker processes. ``seconds`` and ``memory`` (bytes) are the limits of one constraint.
        Constraints whose masks exceed ``budget`` are refused. A process that was stopped (SIGSTOP) is replaced after
        ``stall_seconds``. When the last idle process gets a constraint, another one is started, up to ``processes``, so
        that the next constraint does not wait for its start."""
        self.engines: Sequence[GrammarEngine] = [recipe.engine(context) for recipe in recipes]
        self.seconds = seconds
        self._stall_seconds = stall_seconds
        self._setup = worker.Setup(tuple(recipes), context, memory, seconds, budget)
        self._processes = processes
        self._idle: list[WorkerProcess] = []
        self._busy = self._starting = 0
        self._lock = threading.Lock()
        self._closed = False

    def compile(self, job: CompileJob) -> Compiled:
        """See ``Compiler``."""
        self._build_meanwhile(candidates(self.engines, job.spec)[0])
        answer = self._compile_in_process(job)
        match answer:
            case worker.GrammarRefused():
                raise answer.error()
            case worker.CompileFailed(memory=True):
                raise self._too_large(job.spec, answer.message)
            case worker.CompileFailed(shortage=True):
                raise QueueFullError(answer.message)
            case worker.Done(name=name, data=data):
                backend = next(engine for engine in self.engines if engine.name == name).backend
                require_memory(COMPILE_BYTES + LOAD_BYTES_PER_BYTE * len(data or b""))
                return Compiled(name, backend.compile(job.spec) if data is None else backend.load(data))
        assert isinstance(answer, worker.CompileFailed), answer
        raise EngineError(answer.message)

    def _build_meanwhile(self, engine: GrammarEngine) -> None:
        """Import the backend that is likely to be chosen in this process while the worker process imports it too."""

        def build() -> None:
            try:
                _ = engine.backend
            except (EngineError, QueueFullError):
                return  # raised again for each request that needs this backend

        if not engine.built:
            threading.Thread(target=build, name=f"dovetail-build-{engine.name}").start()

    def _compile_in_process(self, job: CompileJob) -> worker.Event:
        """Return the answer of a worker process. If the process is killed from outside, the constraint is not at fault,
        and it is given to another process, once."""
        killed = False
        while True:
            process, fresh = self._take()
            try:
                answer = process.compile(job.spec, self.seconds, lambda: job.is_awaited)
            except Abandoned:
                self._start_another()
                raise
            except TimedOut as error:
                self._start_another()
                if error.building:
                    raise EngineError("the grammar worker took too long to import its backends") from None
                raise too_slow(job.spec, self.seconds) from None
            except Ended as error:
                if error.killed and (error.compiling or fresh) and not killed:
                    killed = True
                    log.warning("a grammar worker was killed from outside (%s); its constraint is tried again", error)
                elif error.compiling or fresh:
                    self._start_another()
                    raise self._error_of(job.spec, error) from None
                continue  # an idle process that had grown too large ended after its last answer; try another
            finally:
                with self._lock:
                    self._busy -= 1
            self._put_back(process)
            return answer

    def _error_of(self, spec: GrammarSpec, error: Ended) -> EngineError | GrammarError:
        """Return the error for a process that has ended: ``GrammarError`` if the constraint is at fault, else
        ``EngineError``."""
        if error.killed:
            return EngineError(
                f"the processes that compile grammars were killed from outside ({error}), twice for this {spec.kind}: "
                "by an operator, or by the system because it ran out of memory (lower `grammar.memory_mib` or "
                "`grammar.workers`); retry later"
            )
        if not error.compiling:
            return EngineError(f"the grammar worker ended ({error}) before it could compile")
        return too_slow(spec, self.seconds) if error.overtime else self._too_large(spec, str(error))

    def _start_another(self) -> None:
        """Start an idle process, and build the backends in it that are likely to be needed."""

        def start() -> None:
            try:
                process = WorkerProcess(self._setup, self._stall_seconds)
                process.prepare([engine.name for engine in self.engines if engine.built])
            except OSError:
                return  # the next constraint starts another process, and reports if that fails too
            finally:
                with self._lock:
                    self._starting -= 1
            self._put_back(process, 0)

        with self._lock:
            self._starting += 1
        try:
            threading.Thread(target=start, name="dovetail-grammar-start").start()
        except RuntimeError as error:
            with self._lock:
                self._starting -= 1
            if not is_shortage(error):
                raise

    def _too_large(self, spec: GrammarSpec, how: str) -> GrammarError:
        most = self._setup.memory / 2**20
        text = (
            f"the {spec.kind} needs more than {most:g} MiB to compile, or crashes the compiler ({how}); make it smaller"
        )
        return GrammarError(text, param=spec.kind)

    def _take(self) -> tuple[WorkerProcess, bool]:
        """Return the idle process that was used last and False, or a new process and True if none is idle."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
            self._busy += 1
            is_last = process is not None and not self._idle
            short = is_last and self._busy + self._starting < self._processes
        if short:
            self._start_another()
        if process is not None:
            return process, False
        try:
            return WorkerProcess(self._setup, self._stall_seconds), True
        except BaseException:
            with self._lock:
                self._busy -= 1
            raise

    def _put_back(self, process: WorkerProcess, place: int | None = None) -> None:
        with self._lock:
            if not self._closed:
                self._idle.insert(len(self._idle) if place is None else place, process)
                return
        process.kill()

    def close(self) -> None:
        """See ``Compiler``."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()
