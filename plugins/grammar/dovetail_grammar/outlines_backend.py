"""Provide outlines-core as a grammar backend: one regex, and an index of every token in every state (arXiv 2307.09702).

Its own ``build_regex_from_schema`` is not used: it drops ``minimum``, ``uniqueItems`` and all other keywords that it
has no regex for, and it allows control characters in strings. The regex is built from the rewritten schema, all of
which is enforced.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from outlines_core import Guide, Index, Vocabulary

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext, Matcher
from dovetail.sampling_params import GrammarSpec
from dovetail.types import IntArray
from dovetail_grammar.automaton import Automaton, AutomatonState, TooLargeError
from dovetail_grammar.bits import pack_bits
from dovetail_grammar.config import OutlinesConfig
from dovetail_grammar.outlines_regexes import read
from dovetail_grammar.patterns import emit, holds, literal, without
from dovetail_grammar.regex_parser import Node, PatternError, set_of

_MAX_ROLLBACK = 2**20
"""Maximum number of tokens that a matcher can roll back. The library reserves four bytes for each of them in every
matcher."""
_SIGNS = ("\0", "\U0010ffff")
"""Characters that a regex may be prefixed with. The second one, a noncharacter, is used if the regex itself contains
the first one; it is then excluded from outputs."""
_BYTES_PER_TRANSITION = 18
"""Memory of one transition of the index, which is a hash table of pairs of 32-bit numbers."""


def _start_token(words: int) -> int:
    return 32 * words + 1


def _with_start(tokens: Mapping[bytes, list[int]], start: int) -> dict[bytes, list[int]]:
    return {sign.encode(): [*tokens.get(sign.encode(), ()), start] for sign in _SIGNS}


class OutlinesMatcher(Matcher):
    """Track the position of one request in an index."""

    def __init__(self, index: Index, eos: IntArray) -> None:
        self._guide = Guide(index, max_rollback=_MAX_ROLLBACK)
        self._guide.advance(_start_token(len(eos)), return_tokens=False)
        self._eos = eos
        self._accepted = 0
        self._ended = False

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``. After an end-of-sequence token, only another one is allowed."""
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
        assert 0 <= num_tokens <= given, f"cannot roll back {num_tokens} tokens: only {given} were accepted"
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
    """Hold the index of a compiled constraint."""

    def __init__(self, index: Index, eos: IntArray, transitions: int) -> None:
        self._index = index
        self._eos = eos
        self._transitions = transitions

    def matcher(self) -> OutlinesMatcher:
        """Return a new matcher at the start of the grammar."""
        return OutlinesMatcher(self._index, self._eos)

    @property
    def num_bytes(self) -> int:
        """Return an upper bound of the memory that the index occupies, in bytes."""
        return self._transitions * _BYTES_PER_TRANSITION


class OutlinesBackend(GrammarBackend):
    """Compile regexes with outlines-core. Schemas and choices are converted to regexes first."""

    def __init__(self, config: OutlinesConfig, context: GrammarContext) -> None:
        self._config = config
        words = -(-context.vocab_size // 32)
        eos = {token for token in context.eos_token_ids if 0 <= token < context.vocab_size}
        self._eos = pack_bits(context.vocab_size, eos)
        tokens: dict[bytes, list[int]] = {}
        for token, data in enumerate(context.token_bytes[: context.vocab_size]):
            if data and token not in eos:
                tokens.setdefault(data, []).append(token)
        # Two ids are beyond the row, so they never appear in a mask: the only end token that the index knows (the matcher
        # handles the real ones), and the token of the character that a regex is prefixed with.
        self._vocabulary = Vocabulary(32 * words, {**tokens, **_with_start(tokens, _start_token(words))})
        self._begin_with = [0] * 256
        for data, ids in tokens.items():
            self._begin_with[data[0]] += len(ids)

    def check(self, spec: GrammarSpec) -> None:
        """See ``GrammarBackend``. ``compile`` refuses regexes that are too large only as an automaton."""
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
        """Return a character to prefix the regex with, and the regex without that character.

        outlines-core 0.2.14 also builds the automaton that searches for the regex anywhere in a text, and never uses
        it. That automaton is small if the regex begins with a character that it does not contain elsewhere. Without the
        \\z at its end, outlines-core also drops transitions from an accepting state to one that is not accepting: b in
        a(bc)?
        """
        node = read(spec, self._config)
        if not holds(node, ord(_SIGNS[0])):
            return _SIGNS[0], node
        try:
            return _SIGNS[1], without(node, set_of(_SIGNS[1]))
        except PatternError as error:
            message = "only texts with U+10FFFF match, which grammar backend outlines does not support"
            raise GrammarError(message, param=spec.kind, keyword="U+10FFFF") from error

    def _refuse_empty(self, grammar: OutlinesCompiled, spec: GrammarSpec) -> None:
        row = np.zeros((1, len(self._eos)), np.int32)
        grammar.matcher().fill_bitmask(row, 0)
        if not (row[0] & ~self._eos).any():
            what = "only the empty text" if row.any() else "no text that this vocabulary can spell"
            raise GrammarError(f"{what} satisfies this {spec.kind}", param=spec.kind)

    def _count_transitions(self, node: Node, spec: GrammarSpec) -> int:
        """Return an upper bound of the number of transitions of the index.

        Raises ``GrammarError`` if it is too large, because outlines-core itself does not limit time and memory.
        """
        most, counts = self._config.max_transitions, dict[int, int]()
        found = 0

        def weigh(state: AutomatonState) -> int:
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
