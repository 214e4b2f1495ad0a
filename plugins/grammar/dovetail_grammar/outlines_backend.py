"""outlines-core as a grammar backend: one regex, an index of every token in every state (arXiv 2307.09702).

Its own ``build_regex_from_schema`` is not used: it drops ``minimum``, ``uniqueItems`` and whatever else it has no regex for,
and lets control characters into strings. The regex is made of the schema as it was rewritten for what is honoured whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from outlines_core import Guide, Index, Vocabulary

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext, Matcher
from dovetail.sampling_params import GrammarSpec
from dovetail.types import IntArray
from dovetail_grammar.automaton import Automaton, State, TooLargeError
from dovetail_grammar.bits import pack_bits
from dovetail_grammar.config import OutlinesConfig
from dovetail_grammar.outlines_regexes import read
from dovetail_grammar.patterns import emit, holds, literal, without
from dovetail_grammar.regex_parser import Node, PatternError, set_of

_MAX_ROLLBACK = 2**20
"""Tokens. The library sets aside four bytes for each, for every matcher."""
_SIGNS = ("\0", "\U0010ffff")
"""Characters to begin a regex with. The second, a noncharacter, no output holds where the regex itself holds the first."""
_BYTES_PER_TRANSITION = 18
"""Of the index in memory: a hash table of pairs of 32-bit numbers."""


def _start_token(words: int) -> int:
    return 32 * words + 1


def _with_start(tokens: Mapping[bytes, list[int]], start: int) -> dict[bytes, list[int]]:
    return {sign.encode(): [*tokens.get(sign.encode(), ()), start] for sign in _SIGNS}


class OutlinesMatcher(Matcher):
    """A position in an index."""

    def __init__(self, index: Index, eos: IntArray) -> None:
        self._guide = Guide(index, max_rollback=_MAX_ROLLBACK)
        self._guide.advance(_start_token(len(eos)), return_tokens=False)
        self._eos = eos
        self._accepted = 0
        self._ended = False

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``. After an end-of-sequence token, nothing but another is allowed."""
        words = bitmask[row]
        if self._ended:
            words[:] = self._eos
            return
        self._guide.write_mask_into(words.ctypes.data, len(words), 4)
        if self._guide.is_finished():
            words |= self._eos

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        if self._ended or not 0 <= token_id < 32 * len(self._eos):
            return False
        if self._eos[token_id // 32] >> (token_id % 32) & 1:
            self._ended = self._guide.is_finished()
            return self._ended
        if not self._guide.accepts_tokens([token_id]):
            return False
        self._guide.advance(token_id, return_tokens=False)
        self._accepted += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        given = self._accepted + self._ended
        assert 0 <= num_tokens <= given, f"{num_tokens} tokens to take back of {given}"
        inside = max(num_tokens - self._ended, 0)
        if inside:
            self._guide.rollback_state(inside)
        self._accepted -= inside
        self._ended = self._ended and not num_tokens

    @property
    def is_terminated(self) -> bool:
        """See ``Matcher``."""
        if self._ended or not self._guide.is_finished():
            return self._ended
        row = np.empty((1, len(self._eos)), np.int32)
        self.fill_bitmask(row, 0)
        return bool(np.array_equal(row[0], self._eos))


class OutlinesCompiled(CompiledGrammar):
    """An index."""

    def __init__(self, index: Index, eos: IntArray, transitions: int) -> None:
        self._index = index
        self._eos = eos
        self._transitions = transitions

    def matcher(self) -> OutlinesMatcher:
        """A fresh matcher."""
        return OutlinesMatcher(self._index, self._eos)

    @property
    def num_bytes(self) -> int:
        """Memory it occupies, at most."""
        return self._transitions * _BYTES_PER_TRANSITION


class OutlinesBackend(GrammarBackend):
    """Compiles regexes with outlines-core; schemas and choices are made into regexes first."""

    def __init__(self, config: OutlinesConfig, context: GrammarContext) -> None:
        self._config = config
        words = -(-context.vocab_size // 32)
        eos = {token for token in context.eos_token_ids if 0 <= token < context.vocab_size}
        self._eos = pack_bits(context.vocab_size, eos)
        tokens: dict[bytes, list[int]] = {}
        for token, data in enumerate(context.token_bytes[: context.vocab_size]):
            if data and token not in eos:
                tokens.setdefault(data, []).append(token)
        # Ids beyond the row are never seen in it: the one end token that it knows, as ends are left to the matcher, and
        # the token of the characters that a regex begins with.
        self._vocabulary = Vocabulary(32 * words, {**tokens, **_with_start(tokens, _start_token(words))})
        self._begin_with = [0] * 256
        for data, ids in tokens.items():
            self._begin_with[data[0]] += len(ids)

    def check(self, spec: GrammarSpec) -> None:
        """See ``GrammarBackend``. What is too large only as an automaton is found by ``compile``."""
        read(spec, self._config)

    def compile(self, spec: GrammarSpec) -> OutlinesCompiled:
        """See ``GrammarBackend``."""
        sign, node = self._marked(spec)
        transitions = self._count_transitions(node, spec)
        try:
            index = Index(rf"{emit(literal(sign))}(?:{emit(node)})\z", self._vocabulary)
        except ValueError as error:
            raise GrammarError(f"outlines cannot compile this {spec.kind}: {error}", param=spec.kind) from error
        grammar = OutlinesCompiled(index, self._eos, transitions)
        self._refuse_empty(grammar, spec)
        return grammar

    def _marked(self, spec: GrammarSpec) -> tuple[str, Node]:
        """A character that the regex begins with, and the regex without it.

        outlines-core 0.2.14 also builds the automaton that looks for the regex anywhere in a text, and never uses it; one
        that begins with what it holds nowhere else is small. And without the \\z at its end, it drops what leads from an
        end to a state that is none: b in a(bc)?
        """
        node = read(spec, self._config)
        if not holds(node, ord(_SIGNS[0])):
            return _SIGNS[0], node
        try:
            return _SIGNS[1], without(node, set_of(_SIGNS[1]))
        except PatternError as error:
            message = "only texts with U+10FFFF match, which grammar backend outlines does not write"
            raise GrammarError(message, param=spec.kind, keyword="U+10FFFF") from error

    def _refuse_empty(self, grammar: OutlinesCompiled, spec: GrammarSpec) -> None:
        row = np.zeros((1, len(self._eos)), np.int32)
        grammar.matcher().fill_bitmask(row, 0)
        if not (row[0] & ~self._eos).any():
            what = "only the empty text" if row.any() else "no text that this vocabulary can spell"
            raise GrammarError(f"{what} satisfies this {spec.kind}", param=spec.kind)

    def _count_transitions(self, node: Node, spec: GrammarSpec) -> int:
        """The most that the index can have; outlines-core itself has no bound on time and memory."""
        most, counts = self._config.max_transitions, dict[int, int]()
        found = 0

        def weigh(state: State) -> int:
            nonlocal found
            if state.mask not in counts:
                counts[state.mask] = sum(n for byte, n in enumerate(self._begin_with) if state.mask >> byte & 1)
            found += counts[state.mask]
            if found > most:
                raise TooLargeError(f"its index has more than {most} transitions (`max_transitions`)")
            return counts[state.mask]

        try:
            return Automaton(node, {}).explore(self._config.max_states, 100 * self._config.max_states, weigh)
        except (TooLargeError, RecursionError) as error:
            message = f"the {spec.kind} is too large for grammar backend outlines: {error}"
            raise GrammarError(message, param=spec.kind, keyword="size") from error
        except PatternError as error:
            raise GrammarError(f"the {spec.kind} is not supported: {error}", param=spec.kind) from error
