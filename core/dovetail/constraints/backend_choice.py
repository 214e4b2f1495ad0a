"""Choose the grammar backend of a constraint: the one that the request names, or the first that supports the
constraint."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dovetail.constraints.limits import check_nesting
from dovetail.constraints.shortage import (
    BUILD_BYTES,
    BUILD_BYTES_PER_TOKEN,
    is_shortage,
    require_memory,
    shortage_error,
)
from dovetail.errors import EngineError, GrammarError, QueueFullError
from dovetail.interfaces.features import Feature
from dovetail.registry.targets import load_attribute
from dovetail.sampling_params import GrammarSpec

if TYPE_CHECKING:
    from dovetail.config import PluginConfig
    from dovetail.constraints.probe import Probe
    from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""Try to build a backend again this number of seconds after a shortage of memory or threads."""


@dataclass(frozen=True, slots=True)
class GrammarRecipe:
    """Describe how a grammar backend is built, in this process or in another. If ``automatic`` is true, the backend
    also serves requests that name none."""

    name: str
    label: str
    target: str
    config: PluginConfig
    offers: frozenset[Feature]
    automatic: bool = True

    def engine(self, context: GrammarContext) -> GrammarEngine:
        """Return an engine that builds the backend when it is first needed."""

        def build() -> GrammarBackend:
            require_memory(BUILD_BYTES + BUILD_BYTES_PER_TOKEN * context.vocab_size)
            return load_attribute(self.target, self.label)(self.config, context)

        return GrammarEngine(self.name, self.offers, build, automatic=self.automatic)


class GrammarEngine:
    """Build a grammar backend when it is first needed, and hold it. Thread-safe."""

    def __init__(
        self, name: str, offers: frozenset[Feature], build: Callable[[], GrammarBackend], *, automatic: bool = True
    ) -> None:
        self.name = name
        self.offers = offers
        self.automatic = automatic
        self._build = build
        self._backend: GrammarBackend | None = None
        self._failure: EngineError | QueueFullError | None = None
        self._retry_at = 0.0
        self._lock = threading.Lock()

    @property
    def built(self) -> bool:
        """Return True if the backend has been built. ``backend`` then returns at once."""
        return self._backend is not None

    @property
    def backend(self) -> GrammarBackend:
        """Return the backend, which is built first if necessary. Raises ``EngineError`` if it cannot be built; building
        is then not tried again. Raises ``QueueFullError`` if it cannot be built because memory or threads are short;
        building is then tried again after ``RETRY_SECONDS``."""
        with self._lock:
            if self._backend is None and (self._failure is None or time.monotonic() >= self._retry_at):
                self._try_to_build()
            if self._backend is None:
                assert self._failure is not None
                raise self._failure.with_traceback(None)
            return self._backend

    def _try_to_build(self) -> None:
        try:
            self._backend = self._build()
        except Exception as error:
            if is_shortage(error):
                log.warning("grammar backend %r could not be built, and is tried again later: %s", self.name, error)
                self._failure, self._retry_at = shortage_error(error), time.monotonic() + RETRY_SECONDS
                return
            log.exception("grammar backend %r could not be built", self.name)
            text = f"grammar backend {self.name!r} could not be built: {type(error).__name__}: {error}"
            self._failure, self._retry_at = EngineError(text), float("inf")

    def offers_kind(self, spec: GrammarSpec) -> bool:
        """Return True if the backend supports constraints of the kind of ``spec`` at all."""
        return f"grammar.{spec.kind}" in self.offers

    def check(self, spec: GrammarSpec) -> None:
        """Raise ``GrammarError`` if the backend is known not to support ``spec``. Takes milliseconds, because nothing
        is compiled."""
        if not self.offers_kind(spec):
            raise GrammarError(
                f"it does not support constraints of kind {spec.kind}", param=spec.kind, keyword=str(spec.kind)
            )
        self.backend.check(spec)


class CompileWatch(Protocol):
    """Receive the progress of a compilation. The time limit of a constraint counts the time to compile it and not the
    time to build backends."""

    def building(self) -> None:
        """Record that a backend is about to be built, which takes seconds."""

    def compiling(self) -> None:
        """Record that the backend is about to read the constraint."""


def candidates(engines: Sequence[GrammarEngine], spec: GrammarSpec) -> list[GrammarEngine]:
    """Return the engines that may compile ``spec``, best first: the one that ``spec`` names, else the automatic ones.
    Raises ``GrammarError`` if ``spec`` names a backend that this server does not have."""
    if spec.backend is None:
        return [engine for engine in engines if engine.automatic]
    named = [engine for engine in engines if engine.name == spec.backend]
    if not named:
        names = ", ".join(engine.name for engine in engines)
        raise GrammarError(
            f"grammar_backend is {spec.backend!r:.80}; this server has: {names}", param="grammar_backend"
        )
    return named


def choose(
    engines: Sequence[GrammarEngine], spec: GrammarSpec, watch: CompileWatch, probe: Probe | None = None
) -> tuple[GrammarEngine, CompiledGrammar]:
    """Compile ``spec`` with the first candidate that supports all of it, at a cost that ``probe`` admits.

    Raises ``GrammarError``. If the constraint is wrong for every backend, the first candidate's error is raised at
    once; else the error lists what each candidate does not support.
    """
    check_nesting(spec)
    refusals: dict[str, GrammarError] = {}
    for engine in candidates(engines, spec):
        try:
            return engine, _compile(engine, spec, watch, probe)
        except GrammarError as error:
            if error.keyword is None:
                raise
            refusals[engine.name] = error
    others = [engine for engine in engines if engine.name not in refusals]
    raise refusal(spec, refusals, [engine.name for engine in _supporting(others, spec, watch)])


def _compile(engine: GrammarEngine, spec: GrammarSpec, watch: CompileWatch, probe: Probe | None) -> CompiledGrammar:
    _prepare(engine, spec, watch)
    engine.check(spec)
    try:
        grammar = engine.backend.compile(spec)
        if probe is not None:
            probe.try_out(grammar, spec, engine.name)
        return grammar
    except (GrammarError, EngineError, QueueFullError, MemoryError):
        raise
    except Exception as error:
        text = f"the {spec.kind} could not be compiled by {engine.name}: {error!r}"
        raise GrammarError(text, param=spec.kind) from error


def _prepare(engine: GrammarEngine, spec: GrammarSpec, watch: CompileWatch) -> None:
    if engine.offers_kind(spec) and not engine.built:
        watch.building()
        _ = engine.backend
    watch.compiling()


def _supporting(engines: Sequence[GrammarEngine], spec: GrammarSpec, watch: CompileWatch) -> Iterator[GrammarEngine]:
    """Yield the engines whose ``check``, which does not compile, does not refuse ``spec``."""
    for engine in engines:
        try:
            _prepare(engine, spec, watch)
            engine.check(spec)
        except (GrammarError, EngineError, QueueFullError):
            continue
        yield engine


def refusal(spec: GrammarSpec, refusals: Mapping[str, GrammarError], able: Sequence[str]) -> GrammarError:
    """Return the error for a client whose constraint was refused. It lists what each engine does not support, and the
    engines that may support the constraint (``able``)."""
    alike: dict[str, list[str]] = {}
    for name, error in refusals.items():
        alike.setdefault(f"not support {error.keyword!r} ({error})", []).append(name)
    reasons = "; ".join(f"{' and '.join(names)} do{'' if names[1:] else 'es'} {lack}" for lack, names in alike.items())
    tried = f"the grammar backend {spec.backend!r}" if spec.backend else "any grammar backend that was tried"
    advice = (
        f"These may support it: {', '.join(able)}; name one as grammar_backend"
        if able
        else "No other grammar backend of this server supports it; leave that out of the constraint"
    )
    text = f"this {spec.kind} cannot be honoured completely by {tried}: {reasons}. {advice}"
    keyword = next((error.keyword for error in refusals.values()), None)
    return GrammarError(text, param=spec.kind, keyword=keyword)
