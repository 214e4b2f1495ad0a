"""Begin constraints after the first part of an output. A wrapper around a matcher leaves that part free and forces the
tokens that lead to the constrained part."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

import numpy as np

from dovetail.interfaces.grammar import Matcher

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.sampling_params import GrammarGate
    from dovetail.types import IntArray


_STAND_IN = re.compile(r"[\x0e-\x1f]")


class _Phase(enum.Enum):
    CHOICE = enum.auto()  # the optional lead may begin
    LEAD = enum.auto()
    FREE = enum.auto()
    PREFIX = enum.auto()
    GRAMMAR = enum.auto()
    ENDED = enum.auto()


class FreeTokens:
    """Hold two bitmask rows for parts of an output that are not constrained: one allows all tokens, the other all
    tokens except those that end an output."""

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.eos = frozenset(eos_token_ids)
        self.all = pack_tokens(vocab_size, range(vocab_size))
        self.not_last = pack_tokens(vocab_size, (token for token in range(vocab_size) if token not in self.eos))


def gated(matcher: Matcher, gate: GrammarGate | None, free: FreeTokens) -> Matcher:
    """Return a matcher that applies ``gate`` first and the constraint of ``matcher`` after it. Return ``matcher``
    itself if there is no gate."""
    return matcher if gate is None else GatedMatcher(matcher, gate, free)


class GatedMatcher(Matcher):
    """Match the lead, the free part and the prefix of a gate, and then what the inner matcher allows. See
    ``interfaces.parsers.ConstraintGate``."""

    def __init__(self, inner: Matcher, gate: GrammarGate, free: FreeTokens) -> None:
        self._inner = inner
        self._gate = gate
        self._free = free
        self._stand_ins = dict(gate.marks)
        self._raw = frozenset(self._stand_ins.values())
        self._state: tuple[_Phase, int] = self._after_lead()
        if gate.lead:
            self._state = (_Phase.CHOICE if gate.optional else _Phase.LEAD, 0)
        self._path: list[
            tuple[_Phase, int, bool]
        ] = []  # the state before each token, and whether the inner matcher accepted it

    @property
    def inner(self) -> Matcher | None:
        """Return the matcher of the backend if the constraint has begun and has no marks, so that it alone decides
        about the next token; else None."""
        return self._inner if self._state[0] is _Phase.GRAMMAR and not self._stand_ins else None

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``."""
        phase, at = self._state
        if phase is _Phase.GRAMMAR:
            self._fill_inner(bitmask, row)
        elif phase is _Phase.FREE:
            bitmask[row] = self._free.all if self._gate.may_end else self._free.not_last
        elif phase is _Phase.CHOICE:
            self._fill_begin(bitmask, row)
            _allow(bitmask, row, self._gate.lead[0])
        else:
            bitmask[row] = 0
            forced = self._gate.lead if phase is _Phase.LEAD else self._gate.prefix
            for token in self._free.eos if phase is _Phase.ENDED else forced[at : at + 1]:
                _allow(bitmask, row, token)

    def _fill_begin(self, bitmask: IntArray, row: int) -> None:
        """Allow the first token of the prefix, or of the grammar if there is no prefix."""
        if not self._gate.prefix:
            self._fill_inner(bitmask, row)
            return
        bitmask[row] = 0
        _allow(bitmask, row, self._gate.prefix[0])

    def _fill_inner(self, bitmask: IntArray, row: int) -> None:
        """Allow what the grammar allows, with each mark in place of the token that stands for it in the grammar."""
        self._inner.fill_bitmask(bitmask, row)
        for mark, stand_in in self._gate.marks:
            if _forbid(bitmask, row, stand_in):
                _allow(bitmask, row, mark)

    def _accept_inner(self, token: int) -> bool:
        return token not in self._raw and self._inner.accept(self._stand_ins.get(token, token))

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        before = self._state
        moved = self._next(token_id)
        if moved is None:
            return False
        self._state, inner = moved
        self._path.append((*before, inner))
        return True

    def _next(self, token: int) -> tuple[tuple[_Phase, int], bool] | None:
        """Return the state after ``token``, and True if the inner matcher accepted the token. Return None if the token
        is forbidden."""
        gate = self._gate
        phase, at = self._state
        if phase is _Phase.CHOICE:
            if token == gate.lead[0]:
                phase = _Phase.LEAD
            else:
                phase, at = self._begin()
        if phase is _Phase.LEAD:
            follows = (_Phase.LEAD, at + 1) if at + 1 < len(gate.lead) else self._after_lead()
            return (follows, False) if token == gate.lead[at] else None
        if phase is _Phase.FREE:
            if token in self._free.eos:
                return ((_Phase.ENDED, 0), False) if gate.may_end else None
            return (self._begin() if token == gate.until else (_Phase.FREE, 0)), False
        if phase is _Phase.PREFIX:
            if token != gate.prefix[at] or (gate.prefix_in_grammar and not self._accept_inner(token)):
                return None
            follows = (_Phase.PREFIX, at + 1) if at + 1 < len(gate.prefix) else (_Phase.GRAMMAR, 0)
            return follows, gate.prefix_in_grammar
        if phase is _Phase.GRAMMAR:
            return ((_Phase.GRAMMAR, 0), True) if self._accept_inner(token) else None
        return None

    def _after_lead(self) -> tuple[_Phase, int]:
        return (_Phase.FREE, 0) if self._gate.until is not None else self._begin()

    def _begin(self) -> tuple[_Phase, int]:
        return (_Phase.PREFIX, 0) if self._gate.prefix else (_Phase.GRAMMAR, 0)

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        if not num_tokens:
            return
        undone = self._path[-num_tokens:]
        del self._path[-num_tokens:]
        self._state = undone[0][:2]
        count = sum(inner for _, _, inner in undone)
        if count:
            self._inner.rollback(count)

    @property
    def is_terminated(self) -> bool:
        """See ``Matcher``."""
        phase = self._state[0]
        return phase is _Phase.ENDED or (phase is _Phase.GRAMMAR and self._inner.is_terminated)

    def jump_forward(self) -> str:
        """See ``Matcher``."""
        if self._state[0] is not _Phase.GRAMMAR:
            return ""
        forced = self._inner.jump_forward()
        return _STAND_IN.split(forced, maxsplit=1)[0] if self._stand_ins else forced


def pack_tokens(vocab_size: int, tokens: Iterable[int]) -> IntArray:
    """Return a bitmask row, int32 ``[ceil(vocab_size / 32)]``, that allows ``tokens``."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def _allow(bitmask: IntArray, row: int, token: int) -> None:
    bitmask.view(np.uint32)[row, token // 32] |= np.uint32(1 << (token % 32))


def _forbid(bitmask: IntArray, row: int, token: int) -> bool:
    """Forbid ``token``, and return True if it was allowed."""
    words, bit = bitmask.view(np.uint32), np.uint32(1 << (token % 32))
    allowed = bool(words[row, token // 32] & bit)
    words[row, token // 32] &= ~bit
    return allowed
