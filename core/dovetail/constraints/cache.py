"""Compiled grammars that are kept, the least recently used ones given up first."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.sampling_params import GrammarSpec

if TYPE_CHECKING:
    from dovetail.errors import RequestError
    from dovetail.interfaces.grammar import CompiledGrammar

_PER_ENTRY = 4096
"""What an entry is counted for at least: its key, its objects, and what the backend does not report."""
REFUSAL_SECONDS = 60.0
"""How long a refusal is remembered: what was refused for its cost is not tried again at once."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A constraint as ``backend`` has compiled it."""

    backend: str
    grammar: CompiledGrammar


@dataclass(frozen=True, slots=True)
class Refused:
    """A constraint that was refused, until ``expires`` on the monotonic clock."""

    error: RequestError
    expires: float


Outcome = Compiled | Refused


class GrammarCache:
    """Outcomes by constraint, at most ``max_bytes`` of them. Not thread-safe.

    A grammar is kept once, under the backend that compiled it; for a constraint that names none, that backend's name is.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.evictions = 0
        self._entries: OrderedDict[GrammarSpec, tuple[Outcome | str, int]] = OrderedDict()

    def get(self, spec: GrammarSpec) -> Outcome | None:
        """What became of ``spec``, which is now the most recently used."""
        found, _ = self._entries.get(spec, (None, 0))
        if isinstance(found, Refused) and found.expires <= time.monotonic():
            self._drop(spec)
            return None
        if found is not None:
            self._entries.move_to_end(spec)
        return self.get(named(spec, found)) if isinstance(found, str) else found

    def keep(self, spec: GrammarSpec, compiled: Compiled) -> None:
        """Remember a grammar, if it fits."""
        kept = self._put(named(spec, compiled.backend), compiled, max(compiled.grammar.num_bytes, 0))
        if kept and spec.backend is None:
            self._put(spec, compiled.backend, 0)

    def refuse(self, spec: GrammarSpec, error: RequestError) -> Refused:
        """Remember a refusal for a while."""
        refused = Refused(error, time.monotonic() + REFUSAL_SECONDS)
        self._put(spec, refused, len(str(error)))
        return refused

    def _put(self, spec: GrammarSpec, value: Outcome | str, size: int) -> bool:
        """False if it does not fit."""
        self._drop(spec)
        size += 4 * len(spec.text) + _PER_ENTRY
        if size > self.max_bytes:
            return False
        self._entries[spec] = value, size
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            self.evictions += isinstance(self._drop(next(iter(self._entries))), Compiled)
        return True

    def _drop(self, spec: GrammarSpec) -> Outcome | str | None:
        value, size = self._entries.pop(spec, (None, 0))
        self.num_bytes -= size
        return value


def named(spec: GrammarSpec, backend: str) -> GrammarSpec:
    """The constraint, for this backend."""
    return dataclasses.replace(spec, backend=backend)
