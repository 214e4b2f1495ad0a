"""Provide lm-format-enforcer as a grammar backend: its token enforcer with Dovetail's own parser.

Its parsers of schemas and regexes are not used. They allow what the schema forbids: control characters in strings,
numbers beyond ``minimum``, keys that ``additionalProperties`` or ``patternProperties`` exclude, and violations of
``allOf`` branches. They also read texts, so the bytes of an incomplete character are lost. The enforcer needs a parser
that returns the characters that may come next. Here this parser is an automaton over bytes, built from the rewritten
schema.
"""

from __future__ import annotations

import codecs
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext, Matcher
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.types import IntArray
from dovetail_grammar.automaton import Automaton, AutomatonState, TooLargeError
from dovetail_grammar.config import LMFormatEnforcerConfig
from dovetail_grammar.constraints import read_choice, read_json, read_regex
from dovetail_grammar.json_terms import JsonTermWriter, num_parts, productive
from dovetail_grammar.lm_format_enforcer_tokens import EnforcerLimitError, EnforcerVocabulary
from dovetail_grammar.patterns import literal
from dovetail_grammar.regex_parser import Alt, Node, PatternError
from dovetail_grammar.schema_rules import SchemaRefusal
from dovetail_grammar.schemas import rewrite

_MAX_JUMP = 4096


class LMFormatEnforcerMatcher(Matcher):
    """Track the states that the accepted tokens of one request have reached in a grammar."""

    def __init__(
        self, compiled: LMFormatEnforcerCompiled, vocabulary: EnforcerVocabulary, start: AutomatonState
    ) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._states = [start]
        self._ended = False

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``. After an end-of-sequence token, only another one is allowed.

        This and all other methods that look ahead raise ``GrammarError`` where the grammar leaves too much open.
        """
        bitmask[row] = self._vocabulary.eos_row if self._ended else self._compiled.row(self._states[-1])

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        state = self._states[-1]
        if self._ended:
            return False
        if token_id in self._vocabulary.eos:
            self._ended = state.ends
            return state.ends
        data = self._vocabulary.texts.get(token_id)
        with self._compiled.bounded():
            after = None if data is None else state.follow(data)
        if after is None:
            return False
        self._states.append(after)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        given = len(self._states) - 1 + self._ended
        assert 0 <= num_tokens <= given, f"cannot roll back {num_tokens} tokens: only {given} were accepted"
        inside = max(num_tokens - self._ended, 0)
        self._ended = self._ended and not num_tokens
        del self._states[len(self._states) - inside :]

    @property
    def is_terminated(self) -> bool:
        """See ``Matcher``."""
        state = self._states[-1]
        if self._ended or not state.ends:
            return self._ended
        return not state.mask or bool(np.array_equal(self._compiled.row(state), self._vocabulary.eos_row))

    def jump_forward(self) -> str:
        """See ``Matcher``. The text is also empty if the forced bytes begin inside a character."""
        state: AutomatonState | None = self._states[-1]
        forced = bytearray()
        with self._compiled.bounded():
            while state and not state.ends and not state.mask & (state.mask - 1) and len(forced) < _MAX_JUMP:
                forced.append(state.mask.bit_length() - 1)
                state = state.step(forced[-1])
        try:
            return "" if self._ended else codecs.getincrementaldecoder("utf-8")().decode(bytes(forced))
        except UnicodeDecodeError:
            return ""


class LMFormatEnforcerCompiled(CompiledGrammar):
    """Hold the automaton of a grammar, and cache the bitmask rows of the states that were requested last."""

    def __init__(self, automaton: Automaton, vocabulary: EnforcerVocabulary, config: LMFormatEnforcerConfig) -> None:
        self._automaton = automaton
        self._vocabulary = vocabulary
        self._max_work = config.max_work
        self._most_rows = max(config.cache_bytes // vocabulary.eos_row.nbytes, 1)
        self._rows: OrderedDict[AutomatonState, IntArray] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self) -> LMFormatEnforcerMatcher:
        """Return a new matcher at the start of the grammar."""
        return LMFormatEnforcerMatcher(self, self._vocabulary, self._automaton.start)

    def row(self, state: AutomatonState) -> IntArray:
        """Return the bitmask row of a state. The caller must not change it."""
        with self._lock:
            row = self._rows.get(state)
            if row is not None:
                self._rows.move_to_end(state)
                return row
        with self.bounded():
            row = self._vocabulary.row(self._automaton, state)
        with self._lock:
            self._rows[state] = row
            if len(self._rows) > self._most_rows:
                self._rows.popitem(last=False)
        return row

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Make steps of the automaton raise ``GrammarError`` inside the ``with`` block if they cost too much."""
        try:
            with self._automaton.bounded(self._max_work):
                yield
        except (TooLargeError, EnforcerLimitError) as error:
            raise GrammarError(
                f"the grammar leaves too much open for lm_format_enforcer at this point of the text: {error} (`max_work`)",
                keyword="size",
            ) from error

    @property
    def num_bytes(self) -> int:
        """Return an upper bound of the memory that the grammar occupies, in bytes."""
        return self._automaton.num_bytes + self._most_rows * self._vocabulary.eos_row.nbytes


class LMFormatEnforcerBackend(GrammarBackend):
    """Compile schemas, regexes and choices into automata, whose states are built when lm-format-enforcer reaches them."""

    def __init__(self, config: LMFormatEnforcerConfig, context: GrammarContext) -> None:
        self._config = config
        self._vocabulary = EnforcerVocabulary.of(context)

    def check(self, spec: GrammarSpec) -> None:
        """See ``GrammarBackend``."""
        self._read(spec)

    def compile(self, spec: GrammarSpec) -> LMFormatEnforcerCompiled:
        """See ``GrammarBackend``. Only the row of the start is computed here. Rows of other states are computed when a
        matcher reaches them."""
        try:
            automaton = Automaton(*self._read(spec))
        except (PatternError, RecursionError) as error:
            message = f"the {spec.kind} is not supported by grammar backend lm_format_enforcer: {error}"
            raise GrammarError(message, param=spec.kind, keyword="size") from error
        grammar = LMFormatEnforcerCompiled(automaton, self._vocabulary, self._config)
        row = grammar.row(automaton.start)
        if not (row & ~self._vocabulary.eos_row).any():
            what = "only the empty text" if row.any() else "no text that this vocabulary can spell"
            raise GrammarError(f"{what} satisfies this {spec.kind}", param=spec.kind)
        return grammar

    def _read(self, spec: GrammarSpec) -> tuple[Node, Mapping[str, Node]]:
        match spec.kind:
            case GrammarKind.REGEX:
                return read_regex(spec, self._config.max_size), {}
            case GrammarKind.CHOICE:
                return Alt(tuple(map(literal, read_choice(spec)))), {}
            case GrammarKind.JSON_SCHEMA:
                return self._schema(read_json(spec))
            case GrammarKind.JSON_OBJECT:
                return self._schema({"type": "object"})
            case _:
                raise GrammarError(
                    f"grammar backend lm_format_enforcer does not support {spec.kind}; it supports json_schema, json_object, "
                    "regex and choice",
                    param=spec.kind,
                    keyword=spec.kind,
                )

    def _schema(self, schema: bool | dict[str, object]) -> tuple[Node, Mapping[str, Node]]:
        try:
            rewritten = rewrite(schema, strict=self._config.strict)
            terms = JsonTermWriter(rewritten, self._config.max_whitespace, None)
            node, rules = productive(terms.value(rewritten), terms.rules)
            found = sum(map(num_parts, (node, *rules.values())))
        except RecursionError as error:
            raise SchemaRefusal(
                "#", "the schema is nested too deeply for grammar backend lm_format_enforcer", "size"
            ) from error
        except PatternError as error:
            raise SchemaRefusal("#", str(error), "pattern") from error
        if found > self._config.max_size:
            raise SchemaRefusal(
                "#", f"the schema has {found} parts as a pattern; allowed: {self._config.max_size} (`max_size`)", "size"
            )
        return node, rules
