"""Cache compiled constraints, and refusals of constraints, by constraint. The least recently used entries are evicted
first."""

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
"""Count this number of bytes for each entry in addition to its text and its grammar: for its objects, and for memory
that the backend does not report."""
REFUSAL_SECONDS = 60.0
"""Keep a refusal for this number of seconds, so that a constraint that was refused for its cost is not compiled again
at once."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Hold a constraint as ``backend`` has compiled it."""

    backend: str
    grammar: CompiledGrammar


@dataclass(frozen=True, slots=True)
class Refused:
    """Hold the error of a constraint that is refused until ``expires``, in seconds of the monotonic clock."""

    error: RequestError
    expires: float


Outcome = Compiled | Refused


class GrammarCache:
    """Keep the outcomes of compilations by constraint, in at most ``max_bytes`` bytes. Not thread-safe.

    A compiled constraint is kept once; its key is the constraint with the name of the backend that compiled it. The
    entry of a constraint that names no backend holds only the name of that backend.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.evictions = 0
        self._entries: OrderedDict[GrammarSpec, tuple[Outcome | str, int]] = OrderedDict()

    def get(self, spec: GrammarSpec) -> Outcome | None:
        """Return the outcome of ``spec``, or None if there is none. Mark its entry as the most recently used."""
        found, _ = self._entries.get(spec, (None, 0))
        if isinstance(found, Refused) and found.expires <= time.monotonic():
            self._drop(spec)
            return None
        if found is not None:
            self._entries.move_to_end(spec)
        return self.get(named(spec, found)) if isinstance(found, str) else found

    def keep(self, spec: GrammarSpec, compiled: Compiled) -> None:
        """Keep a compiled constraint, if it fits into ``max_bytes``."""
        kept = self._put(named(spec, compiled.backend), compiled, max(compiled.grammar.num_bytes, 0))
        if kept and spec.backend is None:
            self._put(spec, compiled.backend, 0)

    def refuse(self, spec: GrammarSpec, error: RequestError) -> Refused:
        """Keep a refusal for ``REFUSAL_SECONDS``, and return it."""
        refused = Refused(error, time.monotonic() + REFUSAL_SECONDS)
        self._put(spec, refused, len(str(error)))
        return refused

    def _put(self, spec: GrammarSpec, value: Outcome | str, size: int) -> bool:
        """Keep an entry of ``size`` bytes and evict others to make it fit. Return False if it does not fit at all."""
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
    """Return ``spec`` with ``backend`` as its backend."""
    return dataclasses.replace(spec, backend=backend)
