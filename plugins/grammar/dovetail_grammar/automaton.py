"""Match texts against a grammar with an automaton over bytes, of which only the states that texts reach are built.

A state is the set of positions where a match can be (partial derivatives, Antimirov 1996). A position is a linked stack
of the operations that still have to match, so rules may refer to themselves. Equal positions and equal states are
shared while they are in use. When too many steps are cached, all of them are dropped at once, so memory is bounded for
every text.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakValueDictionary

from dovetail_grammar.emptiness import may_be_empty, without_empty
from dovetail_grammar.regex_parser import (
    SURROGATES,
    Alt,
    Chars,
    Node,
    PatternError,
    Ranges,
    RegexSeq,
    Repeat,
    RuleCall,
    minus,
)
from dovetail_grammar.utf8 import encoded

MAX_STEPS = 10_000
"""Number of steps that an automaton caches. When it is exceeded, all cached steps are dropped."""
_BYTES_PER_STEP = 1000
_BYTES_PER_OP = 200


class TooLargeError(ValueError):
    """Raised when the automaton has more states, or costs more work, than is allowed."""


class _Work(threading.local):
    """Count the positions that the current thread may still examine. A position costs about a microsecond."""

    most = left = sys.maxsize

    def spend(self, positions: int) -> None:
        """Take ``positions`` from the budget. Raises ``TooLargeError`` if the budget is exceeded."""
        self.left -= positions
        if self.left < 0:
            raise TooLargeError(f"more than {self.most} positions of the grammar have to be examined")


@dataclass(frozen=True, slots=True)
class _Bytes:
    mask: int  # bit b: byte b


@dataclass(frozen=True, slots=True)
class _Cat:
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Or:
    options: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Times:
    op: int
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class _Jump:
    name: str


_Op = _Bytes | _Cat | _Or | _Times | _Jump


class GrammarPosition:
    """Hold what still has to match: the operation ``op``, then ``rest``. Equal positions are the same object.

    ``mask`` has bit b set if ``op`` reads byte b. ``heads`` caches the result of ``Automaton._heads``.
    """

    __slots__ = ("__weakref__", "heads", "mask", "op", "rest")

    def __init__(self, op: int, rest: GrammarPosition | None, mask: int) -> None:
        self.op = op
        self.rest = rest
        self.mask = mask
        self.heads: frozenset[GrammarPosition] | None = None


class AutomatonState:
    """Hold a set of positions, each of which reads a byte or is the end. Equal states are the same object.

    ``mask`` has bit b set if byte b may come next; after each such byte the text can be completed. ``heads`` are the
    positions that result from unfolding ``sources``. ``ends`` is true if the text may end in this state.
    """

    __slots__ = ("__weakref__", "_automaton", "_steps", "ends", "heads", "mask", "sources")

    def __init__(
        self, automaton: Automaton, heads: frozenset[GrammarPosition], sources: frozenset[GrammarPosition]
    ) -> None:
        self._automaton = automaton
        self._steps: dict[int, AutomatonState] = {}
        self.heads = heads
        self.sources = sources
        self.ends = automaton.end in heads
        self.mask = 0
        for position in heads:
            self.mask |= position.mask

    def step(self, byte: int) -> AutomatonState | None:
        """Return the state after ``byte``, or None if the grammar does not allow it."""
        if not self.mask >> byte & 1:
            return None
        return self._steps.get(byte) or self._automaton.advance(self, byte, self._steps)

    def follow(self, data: bytes) -> AutomatonState | None:
        """Return the state after all bytes of ``data``, or None if the grammar does not allow them."""
        state: AutomatonState | None = self
        for byte in data:
            state = state and state.step(byte)
        return state

    def forget(self) -> None:
        """Drop the cached steps. They are computed again when they are needed."""
        self._steps.clear()


class Automaton:
    """Build the states of a grammar as they are reached, beginning with ``start``. Safe to use from several threads."""

    def __init__(self, node: Node, rules: Mapping[str, Node]) -> None:
        """Compile the start pattern ``node`` and the ``rules`` that it refers to.

        Every rule must match some text. A rule must not refer to itself before it has read a byte if something else
        follows that reference (left recursion). Raises ``PatternError``.
        """
        self._lock = threading.Lock()
        self._ops: list[_Op] = []
        self._ids: dict[_Op, int] = {}
        self._operations: dict[Node, int] = {}
        self._positions: WeakValueDictionary[tuple[int, int], GrammarPosition] = WeakValueDictionary()
        self._states: WeakValueDictionary[frozenset[GrammarPosition], AutomatonState] = WeakValueDictionary()
        self._remembered = 0
        self._work = _Work()
        self.end = GrammarPosition(-1, None, 0)
        self.end.heads = frozenset({self.end})
        self._rules = {name: self._compile(rule) for name, rule in rules.items()}
        self._nullable = dict.fromkeys(rules, False)
        self._find_nullable()
        with self._lock:
            self.start = self._state(frozenset({self._position(self._compile(node), self.end)}))

    @property
    def num_bytes(self) -> int:
        """Return an upper bound of the memory that the automaton occupies, in bytes."""
        return _BYTES_PER_OP * len(self._ops) + _BYTES_PER_STEP * MAX_STEPS

    @contextmanager
    def bounded(self, positions: int) -> Iterator[None]:
        """Limit the work of this thread inside the ``with`` block.

        Its steps raise ``TooLargeError`` once they have examined more than ``positions`` positions. Cached steps cost
        nothing. The states found until then are kept.
        """
        self._work.most = self._work.left = positions
        try:
            yield
        finally:
            self._work.most = self._work.left = sys.maxsize

    def operation(self, node: Node) -> int:
        """Return the operation number of ``node``. A node that is not yet a part of the grammar is compiled first."""
        with self._lock:
            if node not in self._operations:
                self._operations[node] = self._compile(node)
            return self._operations[node]

    def repetition(self, position: GrammarPosition) -> tuple[int, int | None] | None:
        """Return the operation that ``position`` repeats and the maximum count (None: unbounded), or None if
        ``position`` is not a repetition."""
        what = self._ops[position.op] if position.rest is not None else None
        return (what.op, what.high) if isinstance(what, _Times) else None

    # -- the grammar -----------------------------------------------------------------------------------------------------

    def _add(self, op: _Op) -> int:
        if op not in self._ids:
            self._ids[op] = len(self._ops)
            self._ops.append(op)
        return self._ids[op]

    def _compile(self, node: Node) -> int:
        match node:
            case Chars(ranges):
                return self._characters(minus(ranges, SURROGATES))
            case RegexSeq(items):
                return self._add(_Cat(tuple(map(self._compile, items))))
            case Alt(options):
                return self._add(_Or(tuple(dict.fromkeys(map(self._compile, options)))))
            case Repeat(inner, low, high):
                return self._repeat(inner, low, high)
            case RuleCall(name):
                return self._add(_Jump(name))
            case _:
                raise PatternError("an anchor is left in the pattern")

    def _repeat(self, inner: Node, low: int, high: int | None) -> int:
        if may_be_empty(inner):  # without the empty text, because otherwise each count would be a separate position
            inner, low = without_empty(inner) or RegexSeq(()), 0
        return self._add(_Times(self._compile(inner), low, high))

    def _characters(self, ranges: Ranges) -> int:
        if not ranges:
            raise PatternError("a part of it matches nothing, or only surrogates, which no text contains")
        options = [self._add(_Cat(tuple(self._add(_Bytes(mask)) for mask in masks))) for masks in _byte_masks(ranges)]
        return options[0] if len(options) == 1 else self._add(_Or(tuple(options)))

    def _find_nullable(self) -> None:
        changed = True
        while changed:
            changed = False
            for name, op in self._rules.items():
                if not self._nullable[name] and self._may_be_empty(op):
                    self._nullable[name] = changed = True

    def _may_be_empty(self, op: int) -> bool:
        match self._ops[op]:
            case _Bytes():
                return False
            case _Cat(items):
                return all(map(self._may_be_empty, items))
            case _Or(options):
                return any(map(self._may_be_empty, options))
            case _Times(inner, low, _):
                return low == 0 or self._may_be_empty(inner)
            case _Jump(name):
                return self._nullable[name]

    # -- positions and states (the caller holds the lock) ------------------------------------------------------------------

    def _position(self, op: int, rest: GrammarPosition) -> GrammarPosition:
        key = (op, id(rest))
        position = self._positions.get(key)
        if position is None:
            what = self._ops[op]
            position = self._positions[key] = GrammarPosition(op, rest, what.mask if isinstance(what, _Bytes) else 0)
        return position

    def _heads(self, position: GrammarPosition) -> frozenset[GrammarPosition]:
        """Return the positions that read a byte, or are the end, after ``position`` is unfolded completely."""
        if position.heads is None:
            heads, seen, waiting = set[GrammarPosition](), {position}, [position]
            while waiting:
                self._work.spend(1)
                for reached in self._unfold(waiting.pop(), heads):
                    if reached not in seen:
                        seen.add(reached)
                        waiting.append(reached)
            position.heads = frozenset(heads)
        return position.heads

    def _unfold(self, position: GrammarPosition, heads: set[GrammarPosition]) -> list[GrammarPosition]:
        """Unfold ``position`` by one level and return the resulting positions. Add it to ``heads`` if it is a head."""
        rest = position.rest
        if rest is None or position.mask:
            heads.add(position)
            return []
        match self._ops[position.op]:
            case _Cat(items):
                for item in reversed(items):
                    rest = self._position(item, rest)
                return [rest]
            case _Or(options):
                return [self._position(option, rest) for option in options]
            case _Times(inner, low, high):
                return self._unfold_repeat(inner, low, high, rest)
            case _Jump(name):
                return [self._position(self._rules[name], rest)]
            case _Bytes():
                return []  # an empty set of bytes: the caller of the constructor must prune such dead ends

    def _unfold_repeat(self, inner: int, low: int, high: int | None, rest: GrammarPosition) -> list[GrammarPosition]:
        reached = [rest] if low == 0 or self._may_be_empty(inner) else []
        if high != 0:
            left = self._add(_Times(inner, max(low - 1, 0), None if high is None else high - 1))
            reached.append(self._position(inner, self._position(left, rest)))
        return reached

    def _state(self, sources: frozenset[GrammarPosition]) -> AutomatonState:
        found = set[GrammarPosition]()
        for position in sources:
            reached = self._heads(position)
            self._work.spend(len(reached))
            found |= reached
        heads = frozenset(found)
        state = self._states.get(heads)
        if state is None:
            state = self._states[heads] = AutomatonState(self, heads, sources)
        return state

    def advance(self, state: AutomatonState, byte: int, steps: dict[int, AutomatonState]) -> AutomatonState:
        """Return the state after ``byte``, which ``state`` must allow, and cache it in ``steps``."""
        with self._lock:
            self._work.spend(len(state.heads))
            sources = {
                position.rest for position in state.heads if position.mask >> byte & 1 and position.rest is not None
            }
            found = steps[byte] = self._state(frozenset(sources))
            self._remembered += 1
            if self._remembered > MAX_STEPS:
                self._forget()
            return found

    def _forget(self) -> None:
        self._remembered = 0
        for position in list(self._positions.values()):
            position.heads = None
        for state in list(self._states.values()):
            state.forget()

    # -- the whole automaton -----------------------------------------------------------------------------------------------

    def explore(self, max_states: int, max_work: int, weigh: Callable[[AutomatonState], int]) -> int:
        """Return the sum of ``weigh`` over all states that can be reached.

        Raises ``TooLargeError`` if there are more than ``max_states`` states, or if the steps between them examine more
        than ``max_work`` positions.
        """
        seen, waiting, weight, work = {self.start}, [self.start], 0, 0
        while waiting:
            state = waiting.pop()
            weight += weigh(state)
            for byte in _representatives(state):
                work += len(state.heads)
                after = state.step(byte)
                if after is not None and after not in seen:
                    seen.add(after)
                    waiting.append(after)
            if len(seen) > max_states or work > max_work:
                raise TooLargeError(f"its automaton has more than {len(seen) - 1} states")
        return weight


@lru_cache(maxsize=1024)
def _byte_masks(ranges: Ranges) -> list[tuple[int, ...]]:
    """Return the characters of ``ranges`` as sequences of byte masks. All one-byte characters share one mask."""
    spans = [spans for low, high in ranges for spans in encoded(low, high)]
    single = 0
    for span in (span for span, *more in spans if not more):
        single |= _span_mask(*span)
    several = [tuple(_span_mask(*span) for span in many) for many in spans if len(many) > 1]
    return [(single,), *several] if single else several


def _span_mask(low: int, high: int) -> int:
    return (1 << high + 1) - (1 << low)


def _representatives(state: AutomatonState) -> list[int]:
    """Return one byte of each set of bytes that every position of ``state`` treats alike."""
    parts = [state.mask]
    for mask in {position.mask for position in state.heads}:
        parts = [part for whole in parts for part in (whole & mask, whole & ~mask) if part]
    return [part.bit_length() - 1 for part in parts]
