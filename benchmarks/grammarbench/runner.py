"""Run one grammar backend in a separate process, which is ended if a schema takes too long."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from dovetail.config import PluginsSection
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import GrammarContext
from dovetail.registry.installed import Registry
from dovetail.registry.loader import load_plugins
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.grammar_corpora import CorpusChecker, CorpusResult, SchemaCase
from dovetail.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "core" / "dovetail" / "assets" / "tiny"
STARTUP = 300.0
Load = Callable[[Path], Sequence[SchemaCase]]


def registry() -> Registry:
    """Return a registry of every installed plugin."""
    return load_plugins(PluginsSection())


def engine_names() -> list[str]:
    """Return the installed grammar backends that take JSON schemas, in the order in which ``auto`` tries them."""
    specs = [component.spec for component in registry().components(ComponentKind.GRAMMAR)]
    usable = [spec for spec in specs if Feature.GRAMMAR_JSON_SCHEMA in spec.offers]
    return [spec.name for spec in sorted(usable, key=lambda spec: (-spec.priority, spec.name))]


def make_checker(name: str) -> CorpusChecker:
    """Make a checker of this backend under its default config, with the tiny model's vocabulary."""
    plugins, tokenizer = registry(), Tokenizer.from_dir(TINY)
    component = plugins.get(ComponentKind.GRAMMAR, name)
    config = plugins.config_class(ComponentKind.GRAMMAR, name).model_validate({"kind": name})
    context = GrammarContext(tokenizer.vocab_size, tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.json)
    backend = load_attribute(component.spec.target, component.label)(config, context)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    return CorpusChecker(backend, encode, tokenizer.vocab_size, tokenizer.eos_token_ids[0])


def _serve(name: str, cases: Sequence[SchemaCase], pipe: Connection) -> None:
    checker = make_checker(name)
    pipe.send(None)
    while (index := pipe.recv()) is not None:
        try:
            pipe.send(checker.check(cases[index]))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


class Runner:
    """Judge cases one after the other. ``limit`` is in seconds per case."""

    def __init__(self, name: str, cases: Sequence[SchemaCase], limit: float) -> None:
        self.name = name
        self.cases = cases
        self.limit = limit
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def verdicts(self) -> list[CorpusResult]:
        """Return one verdict for every case, in order. Raises ``RuntimeError`` if the backend fails in another way
        than by refusing."""
        try:
            return [self._one(index) for index in range(len(self.cases))]
        finally:
            self._end()

    def _one(self, index: int) -> CorpusResult:
        pipe = self._pipe or self._start()
        pipe.send(index)
        start = time.monotonic()
        answer = (
            pipe.recv() if pipe.poll(self.limit) else CorpusResult(timed_out=True, compile=time.monotonic() - start)
        )
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name} fails on {self.cases[index].name}: {answer}")
        if answer.timed_out:
            self._end()
        return answer

    def _start(self) -> Connection:
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.name, self.cases, other), daemon=True)
        self._process.start()
        assert self._pipe.poll(STARTUP), f"{self.name} did not start"
        self._pipe.recv()
        return self._pipe

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None
