"""outlines-core as a grammar backend: one regex, an index of every token in every state (arXiv 2307.09702).

Its own ``build_regex_from_schema`` is not used: it drops ``minimum``, ``uniqueItems`` and whatever else it has no regex for,
and lets control characters into strings. The regex is made of the schema as it was rewritten for what is honoured whole.
"""

from __future__ import annotations

import numpy as np
from outlines_core import Guide, Index, Vocabulary

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext, Matcher
from dovetail.types import GrammarSpec, IntArray
from dovetail_grammar.automaton import Automaton, State, TooLargeError
from dovetail_grammar.bits import pack_bits
from dovetail_grammar.config import OutlinesConfig
from dovetail_grammar.outlines_regexes import may_be_empty, read, without_empty
from dovetail_grammar.patterns import emit
from dovetail_grammar.regex_parser import Node, PatternError

_MAX_ROLLBACK = 2**31
_BYTES_PER_TRANSITION = 18
"""Of the index in memory: a hash table of pairs of 32-bit numbers."""


class OutlinesMatcher(Matcher):
    """A position in an index."""

    def __init__(self, index: Index, eos: IntArray, end_at_start: bool) -> None:
        self._guide = Guide(index, max_rollback=_MAX_ROLLBACK)
        self._eos = eos
        self._end_at_start = end_at_start
        self._accepted = 0
        self._ended = 0

    @property
    def _may_end(self) -> bool:
        return self._guide.is_finished() if self._accepted else self._end_at_start

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``. After an end-of-sequence token, nothing but another is allowed."""
        words = bitmask[row]
        if self._ended:
            words[:] = self._eos
            return
        self._guide.write_mask_into(words.ctypes.data, len(words), 4)
        if self._may_end:
            words |= self._eos

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        if self._ended or not 0 <= token_id < 32 * len(self._eos):
            return False
        if self._eos[token_id // 32] >> (token_id % 32) & 1:
            self._ended = int(self._may_end)
            return self._may_end
        if not self._guide.accepts_tokens([token_id]):
            return False
        self._guide.advance(token_id, return_tokens=False)
        self._accepted += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        given = self._accepted + self._ended
        assert 0 <= num_tokens <= given, f"{num_tokens} tokens to take back of {given}"
        if num_tokens > self._ended:
            self._guide.rollback_state(num_tokens - self._ended)
        self._accepted -= max(num_tokens - self._ended, 0)
        self._ended = 0 if num_tokens else self._ended

    @property
    def is_terminated(self) -> bool:
        """See ``Matcher``."""
        if self._ended or not self._may_end:
            return bool(self._ended)
        row = np.empty((1, len(self._eos)), np.int32)
        self.fill_bitmask(row, 0)
        return bool(np.array_equal(row[0], self._eos))


class OutlinesCompiled(CompiledGrammar):
    """An index."""

    def __init__(self, index: Index, eos: IntArray, end_at_start: bool, transitions: int) -> None:
        self._index = index
        self._eos = eos
        self._end_at_start = end_at_start
        self._transitions = transitions

    def matcher(self) -> OutlinesMatcher:
        """A fresh matcher."""
        return OutlinesMatcher(self._index, self._eos, self._end_at_start)

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
        # It knows one end token, and sets its bit: an id beyond the row, so that ends are left to the matcher.
        self._vocabulary = Vocabulary(32 * words, tokens)
        self._begin_with = [0] * 256
        for data, ids in tokens.items():
            self._begin_with[data[0]] += len(ids)

    def check(self, spec: GrammarSpec) -> None:
        """See ``GrammarBackend``. What is too large only as an automaton is found by ``compile``."""
        read(spec, self._config)

    def compile(self, spec: GrammarSpec) -> OutlinesCompiled:
        """See ``GrammarBackend``."""
        whole = read(spec, self._config)
        some = without_empty(whole)
        if some is None:
            raise GrammarError(f"only the empty text satisfies this {spec.kind}", param=spec.kind)
        transitions = self._count_transitions(some, spec)
        try:
            # Without \z, 0.2.14 drops what leads from an end to a state that is none: b in a(bc)?
            index = Index(rf"(?:{emit(some)})\z", self._vocabulary)
        except ValueError as error:
            raise GrammarError(f"outlines cannot compile this {spec.kind}: {error}", param=spec.kind) from error
        return OutlinesCompiled(index, self._eos, may_be_empty(whole), transitions)

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
