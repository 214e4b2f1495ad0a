"""Compute bitmask rows of a vocabulary. It is stored as lm-format-enforcer requires: as a tree of characters, where each
byte is represented by the character with the same number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from lmformatenforcer import CharacterLevelParser, CharacterLevelParserConfig, TokenEnforcer, TokenEnforcerTokenizerData
from lmformatenforcer.exceptions import LMFormatEnforcerException

from dovetail.interfaces.grammar import GrammarContext
from dovetail.types import IntArray
from dovetail_grammar.automaton import Automaton, AutomatonState, TooLargeError
from dovetail_grammar.bits import pack_bits
from dovetail_grammar.json_terms import CHARACTER, PLAIN
from dovetail_grammar.regex_parser import Node, Repeat

_LONGEST = 512
"""Maximum number of bytes of a token that is ever allowed, because the tree is walked recursively, byte by byte."""
_CONFIG = CharacterLevelParserConfig(alphabet="".join(map(chr, range(256))))


class EnforcerLimitError(LMFormatEnforcerException):
    """Raised instead of ``TooLargeError`` inside the enforcer, which treats errors of unknown types as the end of the
    text."""


class StateParser(CharacterLevelParser):
    """Present a state of an automaton as a parser of bytes."""

    def __init__(self, state: AutomatonState) -> None:
        super().__init__(_CONFIG)
        self._state = state

    def add_character(self, new_character: str) -> StateParser:
        """Return the parser after ``new_character``, which must be allowed."""
        try:
            after = self._state.step(ord(new_character))
        except TooLargeError as error:
            raise EnforcerLimitError(str(error)) from error
        assert after is not None, f"the byte {ord(new_character)} is not allowed"
        return StateParser(after)

    def get_allowed_characters(self) -> str:
        """Return the allowed characters as a set. Intersecting a set with the tree's children is ten times faster than
        a text."""
        return cast("str", _characters(self._state.mask))

    def can_end(self) -> bool:
        """Return true if the text may end here."""
        return self._state.ends


_SETS: dict[int, frozenset[str]] = {}
_MOST_SETS = 10_000


def _characters(mask: int) -> frozenset[str]:
    found = _SETS.get(mask)
    if found is None:
        if len(_SETS) >= _MOST_SETS:
            _SETS.clear()
        found = _SETS[mask] = frozenset(chr(byte) for byte in range(256) if mask >> byte & 1)
    return found


@dataclass(frozen=True, slots=True)
class EnforcerVocabulary:
    """Hold the tokens, and precomputed facts about them inside strings.

    ``lengths[unit][i]`` is the number of characters of the kind ``unit`` that token i covers, beginning at the start of
    a character; the last one may be incomplete. It is 0 if the token contains anything else. Only the tokens of
    ``closing`` can contain the end of a string.
    """

    texts: Mapping[int, bytes]
    eos: frozenset[int]
    eos_row: IntArray
    width: int
    whole: TokenEnforcerTokenizerData
    closing: TokenEnforcerTokenizerData
    lengths: Mapping[Node, IntArray]

    @classmethod
    def of(cls, context: GrammarContext) -> EnforcerVocabulary:
        """Build the vocabulary of a tokenizer."""
        width = context.vocab_size
        eos = frozenset(token for token in context.eos_token_ids if 0 <= token < width)
        texts = {i: data for i, data in enumerate(context.token_bytes[:width]) if data and i not in eos and len(data) <= _LONGEST}  # fmt: skip
        whole = _tree(texts, eos, width)
        closing = {token: data for token, data in texts.items() if b'"' in data}
        tree = _tree(closing, eos, width) if b'"' in closing.values() else whole
        lengths: dict[Node, IntArray] = {unit: _lengths(unit, texts, width) for unit in (CHARACTER, PLAIN)}
        return cls(texts, eos, pack_bits(width, eos), width, whole, tree, lengths)

    def row(self, automaton: Automaton, state: AutomatonState) -> IntArray:
        """Return the bitmask row of a state.

        Inside a string nearly all tokens are allowed because they continue the string, which ``lengths`` decides. The
        tree has to be walked only for the tokens that can end it.
        """
        counts = self._inside(automaton, state)
        row = pack_bits(self.width, self._allowed(self.whole if counts is None else self.closing, state))
        for lengths, most in counts or ():
            row |= pack_flags((lengths > 0) & (lengths <= most if most is not None else True))
        return row

    def _inside(self, automaton: Automaton, state: AutomatonState) -> Sequence[tuple[IntArray, int | None]] | None:
        """Return the lengths of tokens and the maximum length (None: unbounded) for each source position of ``state``.

        The result is None if not all of these positions are inside strings.
        """
        kinds = {automaton.operation(unit): lengths for unit, lengths in self.lengths.items()}
        found = [automaton.repetition(place) for place in state.sources]
        inside = [(kinds[part[0]], part[1]) for part in found if part and part[0] in kinds]
        return inside if inside and len(inside) == len(found) else None

    @staticmethod
    def _allowed(tokens: TokenEnforcerTokenizerData, state: AutomatonState) -> list[int]:
        # An enforcer keeps every prefix that it has processed. A new one for each state, with an empty prefix, keeps none.
        return cast("list[int]", TokenEnforcer(tokens, StateParser(state)).get_allowed_tokens([]).allowed_tokens)


def pack_flags(flags: np.ndarray) -> IntArray:
    """Return a bitmask row from one boolean for each token."""
    padded = np.zeros(-(-len(flags) // 32) * 32, np.uint8)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view(np.int32)


def _tree(texts: Mapping[int, bytes], eos: frozenset[int], width: int) -> TokenEnforcerTokenizerData:
    tokens = [(token, data.decode("latin-1"), True) for token, data in texts.items()]
    return TokenEnforcerTokenizerData(tokens, str, sorted(eos), use_bitmask=False, vocab_size=width)


def _lengths(unit: Node, texts: Mapping[int, bytes], width: int) -> IntArray:
    lengths = np.zeros(width, np.int32)
    start = Automaton(Repeat(unit, 0, None), {}).start
    for token, data in texts.items():
        state, count = start, 0
        for byte in data:
            count += state is start
            after = state.step(byte)
            if after is None:
                count = 0
                break
            state = after
        lengths[token] = count
    return lengths
