"""Compile constraints in a process of low priority with bounded memory, which the engine kills if it takes too long.

The process receives a ``Setup`` with the names of the backends to build at once, and then one ``GrammarSpec`` after
another. It answers each with events, the last of which is a ``Done``, ``GrammarRefused`` or ``CompileFailed``. It
imports the backends that it needs, and as few modules of dovetail as possible.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from dovetail.constraints.backend_choice import GrammarEngine, GrammarRecipe, choose
from dovetail.constraints.mask_budget import MaskBudget
from dovetail.constraints.probe import Probe
from dovetail.errors import EngineError, GrammarError, QueueFullError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import CompiledGrammar, GrammarContext
from dovetail.sampling_params import GrammarSpec

NICENESS = 5
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Setup:
    """Hold the first message to a worker. ``memory`` (bytes) and ``seconds`` limit the compilation of one constraint,
    ``budget`` limits the time of its masks."""

    recipes: tuple[GrammarRecipe, ...]
    context: GrammarContext
    memory: int
    seconds: float
    budget: MaskBudget


@dataclass(frozen=True, slots=True)
class BuildStarted:
    """Report that a backend is being built; the clock of the time limit stops."""


@dataclass(frozen=True, slots=True)
class CompileStarted:
    """Report that the constraint is being compiled; the clock of the time limit runs."""


@dataclass(frozen=True, slots=True)
class Done:
    """Report that backend ``name`` has compiled the constraint. ``data`` is the compiled grammar, None if it cannot be
    sent."""

    name: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class GrammarRefused:
    """Report a ``GrammarError``, in a form that can be sent."""

    message: str
    param: str | None
    keyword: str | None

    @classmethod
    def of(cls, error: GrammarError) -> GrammarRefused:
        """Return the event that reports ``error``."""
        return cls(str(error), error.param, error.keyword)

    def error(self) -> GrammarError:
        """Return the error that this event reports."""
        return GrammarError(self.message, param=self.param, keyword=self.keyword)


@dataclass(frozen=True, slots=True)
class CompileFailed:
    """Report that the compilation failed for a reason that may not lie in the constraint. ``memory`` is true if it took
    more memory than it may, ``shortage`` if the system has no memory or threads for the backend."""

    message: str
    memory: bool = False
    shortage: bool = False


Event = BuildStarted | CompileStarted | Done | GrammarRefused | CompileFailed


class Bounds:
    """Limit the memory and the processor time of this process, not counting what its imports have taken. Systems other
    than Linux have no limits."""

    def __init__(self, memory: int, seconds: float) -> None:
        self._memory = memory
        self._seconds = seconds
        self._base: int | None = None  # memory of this process before the first constraint after a build

    def set(self) -> None:
        """Allow ``memory`` more bytes from now on, and the processor time of all cores for the duration of the time
        limit."""
        if sys.platform != "linux":
            return
        self._base = self._base or _data_bytes()
        _bound("RLIMIT_DATA", _data_bytes() + self._memory)
        _bound("RLIMIT_CPU", int(sum(os.times()[:2]) + self._seconds * (os.cpu_count() or 1)) + 60)

    def lift(self) -> None:
        """Remove the limits, between constraints."""
        for name in ("RLIMIT_DATA", "RLIMIT_CPU") if sys.platform == "linux" else ():
            _bound(name, None)

    def build(self) -> None:
        """Remove the limits while a backend is built."""
        self.lift()
        self._base = None

    @property
    def bloated(self) -> bool:
        """Return True if more than a quarter of the allowed memory was not freed. The next constraint then needs a new
        process."""
        return self._base is not None and _data_bytes() - self._base > self._memory // 4


def _bound(name: str, value: int | None) -> None:
    """Set a soft limit of at most the hard limit; None stands for the hard limit."""
    import resource

    which = getattr(resource, name)
    _, hard = resource.getrlimit(which)
    inside = value is not None and (hard == resource.RLIM_INFINITY or value < hard)
    resource.setrlimit(which, (value if inside and value is not None else hard, hard))


def _data_bytes() -> int:
    """Return the private writable memory of this process in bytes, which RLIMIT_DATA bounds."""
    with open("/proc/self/status", encoding="ascii") as status:
        kib = next(line.split()[1] for line in status if line.startswith("VmData:"))
    return int(kib) * 1024


class _Reporter:
    """Report progress to the parent process, and set the bounds accordingly."""

    def __init__(self, send: Callable[[Event], None], bounds: Bounds) -> None:
        self._send = send
        self._bounds = bounds

    def building(self) -> None:
        """See ``CompileWatch``."""
        self._bounds.build()
        self._send(BuildStarted())

    def compiling(self) -> None:
        """See ``CompileWatch``."""
        self._bounds.set()
        self._send(CompileStarted())


def serve(conn: Connection) -> None:
    """Compile until the other end of the pipe closes, or until this process has grown too large."""
    setup, names = conn.recv()
    engines = [recipe.engine(setup.context) for recipe in setup.recipes]
    _build(engines, names)
    bounds = Bounds(setup.memory, setup.seconds)
    reporter, probe = _Reporter(conn.send, bounds), Probe(setup.context, setup.budget)
    must_end = False
    while not must_end:
        spec: GrammarSpec = conn.recv()
        answer = _answer(engines, spec, reporter, probe)
        bounds.lift()
        must_end = bounds.bloated or (isinstance(answer, CompileFailed) and (answer.memory or answer.shortage))
        conn.send(answer)


def _build(engines: Sequence[GrammarEngine], names: Sequence[str]) -> None:
    for engine in engines:
        if engine.name in names:
            with suppress(EngineError, QueueFullError):  # raised again for each constraint that needs this backend
                _ = engine.backend


def _answer(engines: Sequence[GrammarEngine], spec: GrammarSpec, reporter: _Reporter, probe: Probe) -> Event:
    try:
        engine, grammar = choose(engines, spec, reporter, probe)
        return Done(engine.name, _dumped(engine, grammar))
    except GrammarError as error:
        return GrammarRefused.of(error)
    except QueueFullError as error:
        return CompileFailed(str(error), shortage=True)
    except MemoryError:
        return CompileFailed("out of memory", memory=True)
    except Exception as error:
        traceback.print_exc()
        return CompileFailed(f"{type(error).__name__}: {error}")


def _dumped(engine: GrammarEngine, grammar: CompiledGrammar) -> bytes | None:
    """Return the grammar as bytes; None if the backend cannot write it or fails to, for example because memory runs
    out."""
    if Feature.GRAMMAR_PORTABLE not in engine.offers:
        return None
    try:
        return engine.backend.dump(grammar)
    except Exception:  # libraries raise their own exceptions when memory runs out
        traceback.print_exc()
        return None


def main(fd: int) -> None:
    """Run the process; ``fd`` is its end of the pipe."""
    os.nice(NICENESS)
    try:
        serve(Connection(fd))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
