"""A grammar as an automaton over bytes, of which only the states that texts reach are ever built.

A state is the set of places where a match can stand (partial derivatives, Antimirov 1996); a place is a linked stack of
what is still to come, so rules may name themselves. Places and states are shared while they are in use, and forgotten
in bulk when there are too many: memory is bounded, whatever the texts.
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
from dovetail_grammar.regex_parser import SURROGATES, Alt, Call, Chars, Node, PatternError, Ranges, Repeat, Seq, minus
from dovetail_grammar.utf8 import encoded

MAX_STEPS = 10_000
"""Steps that an automaton remembers before it forgets them all."""
_BYTES_PER_STEP = 1000
_BYTES_PER_OP = 200


class TooLargeError(ValueError):
    """The automaton has more states, or costs more work, than was allowed."""


class _Work(threading.local):
    """Places that this thread may still look at. A place costs about a microsecond."""

    most = left = sys.maxsize

    def spend(self, places: int) -> None:
        """Raises ``TooLargeError`` where that is too much."""
        self.left -= places
        if self.left < 0:
            raise TooLargeError(f"more than {self.most} places of the grammar have to be looked at")


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


class Place:
    """What is still to come: an operation, then ``rest``. Equal places are one object."""

    __slots__ = ("__weakref__", "heads", "mask", "op", "rest")

    def __init__(self, op: int, rest: Place | None, mask: int) -> None:
        self.op = op
        self.rest = rest
        self.mask = mask
        self.heads: frozenset[Place] | None = None


class State:
    """A set of places, each of which reads a byte or is the end. Equal states are one object.

    ``mask`` has bit b set if byte b may come next; every byte that may leads to a text. ``heads`` are what ``sources`` stand
    for.
    """

    __slots__ = ("__weakref__", "_automaton", "_steps", "ends", "heads", "mask", "sources")

    def __init__(self, automaton: Automaton, heads: frozenset[Place], sources: frozenset[Place]) -> None:
        self._automaton = automaton
        self._steps: dict[int, State] = {}
        self.heads = heads
        self.sources = sources
        self.ends = automaton.end in heads
        self.mask = 0
        for place in heads:
            self.mask |= place.mask

    def step(self, byte: int) -> State | None:
        """The state after a byte; None if it may not come."""
        if not self.mask >> byte & 1:
            return None
        return self._steps.get(byte) or self._automaton.advance(self, byte, self._steps)

    def follow(self, data: bytes) -> State | None:
        """The state after bytes; None if they may not come."""
        state: State | None = self
        for byte in data:
            state = state and state.step(byte)
        return state

    def forget(self) -> None:
        """Drop the steps, which can be found again."""
        self._steps.clear()


class Automaton:
    """The states of a grammar: ``start``, and what follows from it. Safe to use from several threads."""

    def __init__(self, node: Node, rules: Mapping[str, Node]) -> None:
        """``node`` is the start. No rule may lead nowhere, nor name itself before it reads a byte and something else
        after. Raises ``PatternError``."""
        self._lock = threading.Lock()
        self._ops: list[_Op] = []
        self._ids: dict[_Op, int] = {}
        self._operations: dict[Node, int] = {}
        self._places: WeakValueDictionary[tuple[int, int], Place] = WeakValueDictionary()
        self._states: WeakValueDictionary[frozenset[Place], State] = WeakValueDictionary()
        self._remembered = 0
        self._work = _Work()
        self.end = Place(-1, None, 0)
        self.end.heads = frozenset({self.end})
        self._rules = {name: self._compile(rule) for name, rule in rules.items()}
        self._nullable = dict.fromkeys(rules, False)
        self._find_nullable()
        with self._lock:
            self.start = self._state(frozenset({self._place(self._compile(node), self.end)}))

    @property
    def num_bytes(self) -> int:
        """Memory it occupies, at most."""
        return _BYTES_PER_OP * len(self._ops) + _BYTES_PER_STEP * MAX_STEPS

    @contextmanager
    def bounded(self, places: int) -> Iterator[None]:
        """Inside, this thread's steps raise ``TooLargeError`` once they have looked at so many places; those that are
        remembered cost nothing. What was found until then is kept."""
        self._work.most = self._work.left = places
        try:
            yield
        finally:
            self._work.most = self._work.left = sys.maxsize

    def operation(self, node: Node) -> int:
        """The number that a part of the grammar has as an operation; new if it is no part of it."""
        with self._lock:
            if node not in self._operations:
                self._operations[node] = self._compile(node)
            return self._operations[node]

    def repetition(self, place: Place) -> tuple[int, int | None] | None:
        """What ``place`` repeats, and how often at most, if it is a repetition."""
        what = self._ops[place.op] if place.rest is not None else None
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
            case Seq(items):
                return self._add(_Cat(tuple(map(self._compile, items))))
            case Alt(options):
                return self._add(_Or(tuple(dict.fromkeys(map(self._compile, options)))))
            case Repeat(inner, low, high):
                return self._repeat(inner, low, high)
            case Call(name):
                return self._add(_Jump(name))
            case _:
                raise PatternError("an anchor is left in the pattern")

    def _repeat(self, inner: Node, low: int, high: int | None) -> int:
        if may_be_empty(inner):  # what may be empty is repeated without it: else each count would be a place of its own
            inner, low = without_empty(inner) or Seq(()), 0
        return self._add(_Times(self._compile(inner), low, high))

    def _characters(self, ranges: Ranges) -> int:
        if not ranges:
            raise PatternError("a part of it matches nothing, or only surrogates, which no text holds")
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

    # -- places and states; the lock is held ---------------------------------------------------------------------------

    def _place(self, op: int, rest: Place) -> Place:
        key = (op, id(rest))
        place = self._places.get(key)
        if place is None:
            what = self._ops[op]
            place = self._places[key] = Place(op, rest, what.mask if isinstance(what, _Bytes) else 0)
        return place

    def _heads(self, place: Place) -> frozenset[Place]:
        """The places that read a byte, or are the end, where ``place`` is reached."""
        if place.heads is None:
            heads, seen, waiting = set[Place](), {place}, [place]
            while waiting:
                self._work.spend(1)
                for reached in self._unfold(waiting.pop(), heads):
                    if reached not in seen:
                        seen.add(reached)
                        waiting.append(reached)
            place.heads = frozenset(heads)
        return place.heads

    def _unfold(self, place: Place, heads: set[Place]) -> list[Place]:
        """One level of ``place``: what it may stand for. Places that are heads go into ``heads``."""
        rest = place.rest
        if rest is None or place.mask:
            heads.add(place)
            return []
        match self._ops[place.op]:
            case _Cat(items):
                for item in reversed(items):
                    rest = self._place(item, rest)
                return [rest]
            case _Or(options):
                return [self._place(option, rest) for option in options]
            case _Times(inner, low, high):
                return self._unfold_repeat(inner, low, high, rest)
            case _Jump(name):
                return [self._place(self._rules[name], rest)]
            case _Bytes():
                return []  # of no byte: a dead end, which the caller was to prune

    def _unfold_repeat(self, inner: int, low: int, high: int | None, rest: Place) -> list[Place]:
        reached = [rest] if low == 0 or self._may_be_empty(inner) else []
        if high != 0:
            left = self._add(_Times(inner, max(low - 1, 0), None if high is None else high - 1))
            reached.append(self._place(inner, self._place(left, rest)))
        return reached

    def _state(self, sources: frozenset[Place]) -> State:
        found = set[Place]()
        for place in sources:
            reached = self._heads(place)
            self._work.spend(len(reached))
            found |= reached
        heads = frozenset(found)
        state = self._states.get(heads)
        if state is None:
            state = self._states[heads] = State(self, heads, sources)
        return state

    def advance(self, state: State, byte: int, steps: dict[int, State]) -> State:
        """The state after ``byte``, which may come; remembered in ``steps``."""
        with self._lock:
            self._work.spend(len(state.heads))
            sources = {place.rest for place in state.heads if place.mask >> byte & 1 and place.rest is not None}
            found = steps[byte] = self._state(frozenset(sources))
            self._remembered += 1
            if self._remembered > MAX_STEPS:
                self._forget()
            return found

    def _forget(self) -> None:
        self._remembered = 0
        for place in list(self._places.values()):
            place.heads = None
        for state in list(self._states.values()):
            state.forget()

    # -- all of it -------------------------------------------------------------------------------------------------------

    def explore(self, max_states: int, max_work: int, weigh: Callable[[State], int]) -> int:
        """The sum of ``weigh`` over every state. Raises ``TooLargeError`` at more states, or more places in them."""
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
    """The characters as sequences of sets of bytes; those of one byte make one set."""
    spans = [spans for low, high in ranges for spans in encoded(low, high)]
    single = 0
    for span in (span for span, *more in spans if not more):
        single |= _span_mask(*span)
    several = [tuple(_span_mask(*span) for span in many) for many in spans if len(many) > 1]
    return [(single,), *several] if single else several


def _span_mask(low: int, high: int) -> int:
    return (1 << high + 1) - (1 << low)


def _representatives(state: State) -> list[int]:
    """One byte of each set that no place of the state tells apart."""
    parts = [state.mask]
    for mask in {place.mask for place in state.heads}:
        parts = [part for whole in parts for part in (whole & mask, whole & ~mask) if part]
    return [part.bit_length() - 1 for part in parts]
