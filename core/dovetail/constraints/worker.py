"""The process that compiles grammars: bounded in memory, low in priority, and killed where it takes too long.

It is told ``Setup`` and which backends to build at once, and then one ``GrammarSpec`` after another. Each is answered with events, the last of them a ``Done``,
``GrammarRefused`` or ``CompileFailed``. It imports the backends it needs, and of this package as little as that takes.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from dovetail.constraints.choice import GrammarEngine, GrammarRecipe, choose
from dovetail.constraints.mask_budget import MaskBudget
from dovetail.constraints.probe import Probe
from dovetail.errors import EngineError, GrammarError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import CompiledGrammar, GrammarContext
from dovetail.sampling_params import GrammarSpec

NICENESS = 5
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told first. ``memory`` is in bytes, ``seconds`` is the time limit of one constraint, ``pace`` that of
    its masks."""

    recipes: tuple[GrammarRecipe, ...]
    context: GrammarContext
    memory: int
    seconds: float
    budget: MaskBudget


@dataclass(frozen=True, slots=True)
class BuildStarted:
    """A backend is being built; the clock stands still."""


@dataclass(frozen=True, slots=True)
class CompileStarted:
    """The constraint is being read; the clock runs."""


@dataclass(frozen=True, slots=True)
class Done:
    """Backend ``name`` honours the constraint. ``data`` is the compiled grammar, None where it cannot travel."""

    name: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class GrammarRefused:
    """A ``GrammarError``."""

    message: str
    param: str | None
    keyword: str | None

    @classmethod
    def of(cls, error: GrammarError) -> GrammarRefused:
        """From the error."""
        return cls(str(error), error.param, error.keyword)

    def error(self) -> GrammarError:
        """As the error."""
        return GrammarError(self.message, param=self.param, keyword=self.keyword)


@dataclass(frozen=True, slots=True)
class CompileFailed:
    """The constraint was not judged. ``memory``: for want of it."""

    message: str
    memory: bool = False


Event = BuildStarted | CompileStarted | Done | GrammarRefused | CompileFailed


class Bounds:
    """What this process may take beyond what its imports did. Nothing is bounded where the system has no such limits."""

    def __init__(self, memory: int, seconds: float) -> None:
        self._memory = memory
        self._seconds = seconds
        self._base: int | None = None  # memory of this process before the first constraint after a build

    def set(self) -> None:
        """From now on: so many bytes more, and as much processor time as all cores have in the time limit."""
        if sys.platform != "linux":
            return
        self._base = self._base or _data_bytes()
        _bound("RLIMIT_DATA", _data_bytes() + self._memory)
        _bound("RLIMIT_CPU", int(sum(os.times()[:2]) + self._seconds * (os.cpu_count() or 1)) + 60)

    def lift(self) -> None:
        """No bounds, between constraints."""
        for name in ("RLIMIT_DATA", "RLIMIT_CPU") if sys.platform == "linux" else ():
            _bound(name, None)

    def build(self) -> None:
        """No bounds while a backend is built."""
        self.lift()
        self._base = None

    @property
    def bloated(self) -> bool:
        """True if so much memory was not given back that the next constraint had better have a fresh process."""
        return self._base is not None and _data_bytes() - self._base > self._memory // 4


def _bound(name: str, value: int | None) -> None:
    """Set a soft limit, at most the hard one, which None stands for."""
    import resource

    which = getattr(resource, name)
    _, hard = resource.getrlimit(which)
    inside = value is not None and (hard == resource.RLIM_INFINITY or value < hard)
    resource.setrlimit(which, (value if inside and value is not None else hard, hard))


def _data_bytes() -> int:
    """Private writable memory of this process: what RLIMIT_DATA counts."""
    with open("/proc/self/status", encoding="ascii") as status:
        kib = next(line.split()[1] for line in status if line.startswith("VmData:"))
    return int(kib) * 1024


class _Reporter:
    """Tells the parent what goes on, and sets the bounds accordingly."""

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
    """Compile until the other end closes, or until this process has grown too large."""
    setup, names = conn.recv()
    engines = [recipe.engine(setup.context) for recipe in setup.recipes]
    _build(engines, names)
    bounds = Bounds(setup.memory, setup.seconds)
    reporter, probe = _Reporter(conn.send, bounds), Probe(setup.context, setup.budget)
    tired = False
    while not tired:
        spec: GrammarSpec = conn.recv()
        answer = _answer(engines, spec, reporter, probe)
        bounds.lift()
        tired = bounds.bloated or (isinstance(answer, CompileFailed) and answer.memory)
        conn.send(answer)


def _build(engines: Sequence[GrammarEngine], names: Sequence[str]) -> None:
    for engine in engines:
        if engine.name in names:
            with suppress(EngineError):  # told to whoever needs it
                _ = engine.backend


def _answer(engines: Sequence[GrammarEngine], spec: GrammarSpec, reporter: _Reporter, probe: Probe) -> Event:
    try:
        engine, grammar = choose(engines, spec, reporter, probe)
        return Done(engine.name, _dumped(engine, grammar))
    except GrammarError as error:
        return GrammarRefused.of(error)
    except MemoryError:
        return CompileFailed("out of memory", memory=True)
    except Exception as error:
        traceback.print_exc()
        return CompileFailed(f"{type(error).__name__}: {error}")


def _dumped(engine: GrammarEngine, grammar: CompiledGrammar) -> bytes | None:
    """The grammar in the form that travels; None where there is none, or the memory for it is lacking."""
    if Feature.GRAMMAR_PORTABLE not in engine.offers:
        return None
    try:
        return engine.backend.dump(grammar)
    except Exception:  # libraries have exceptions of their own for a lack of memory
        traceback.print_exc()
        return None


def main(fd: int) -> None:
    """The process: ``fd`` is its end of the pipe."""
    os.nice(NICENESS)
    try:
        serve(Connection(fd))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
