"""Provide XGrammar as a grammar backend (arXiv 2411.15100)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgrammar

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext, Matcher
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.types import IntArray
from dovetail_grammar.bits import pack_bits
from dovetail_grammar.config import XGrammarConfig
from dovetail_grammar.constraints import read_choice, read_json, read_regex, read_tags
from dovetail_grammar.patterns import emit
from dovetail_grammar.repeats import grouped
from dovetail_grammar.schema_values import MAX_PATTERN
from dovetail_grammar.schemas import rewrite
from dovetail_grammar.xgrammar_vocabulary import separated

_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+?:\d+: (Check failed: .*? is false: )?")
_NEVER_IN_JSON = frozenset(range(0x20)) - {0x0A}
"""Control characters. JSON needs only the newline, and xgrammar allows the others in strings with a length bound."""


_NEVER_IN_UTF8 = re.compile(rb"\xed[\xa0-\xbf]|[\xc0\xc1\xf5-\xff]")
"""Surrogates, and bytes that do not occur in any valid text."""


@dataclass(frozen=True, slots=True)
class TokenSets:
    """Hold the bitmask rows of the tokens that may be used with any grammar.

    xgrammar allows surrogates (ED A0 80 to ED BF BF, which are not valid UTF-8) in strings. Therefore a token must not
    contain a surrogate, and after a token that ends in ED a token must not begin with a byte that would complete one.
    xgrammar's masks of long repetitions also allow bytes that it then refuses.
    """

    usable: IntArray
    usable_after_ed: IntArray
    eos: IntArray
    ends_in_ed: frozenset[int]
    is_json: bool

    @classmethod
    def of(cls, texts: Sequence[bytes], eos: Sequence[int], width: int, banned: frozenset[int]) -> TokenSets:
        """Build the rows of a vocabulary, without the tokens that contain a ``banned`` byte. Unusable ids have empty
        texts."""
        good = [
            i
            for i, text in enumerate(texts)
            if text and not banned.intersection(text) and not _NEVER_IN_UTF8.search(text)
        ]
        after_ed = [i for i in good if not 0xA0 <= texts[i][0] <= 0xBF]
        ends_in_ed = frozenset(i for i in good if texts[i][-1] == 0xED)
        return cls(
            pack_bits(width, [*good, *eos]),
            pack_bits(width, [*after_ed, *eos]),
            pack_bits(width, eos),
            ends_in_ed,
            bool(banned),
        )


class XGrammarMatcher(Matcher):
    """Track the position of one request in a compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, tokens: TokenSets) -> None:
        self._handle = xgrammar.GrammarMatcher(compiled)
        self._tokens = tokens
        self._path: list[int] = []

    @property
    def handle(self) -> xgrammar.GrammarMatcher:
        """Return xgrammar's matcher."""
        return self._handle

    @property
    def ended(self) -> bool:
        """Return true after an end-of-sequence token: only another one may follow."""
        return self._handle.is_terminated()

    @property
    def _usable(self) -> IntArray:
        after_ed = bool(self._path) and self._path[-1] in self._tokens.ends_in_ed
        return self._tokens.usable_after_ed if after_ed else self._tokens.usable

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``. After an end-of-sequence token, only another one is allowed."""
        if self._handle.is_terminated():
            bitmask[row] = self._tokens.eos
            return
        self._handle.fill_next_token_bitmask(bitmask, row)
        self.restrict(bitmask[row])

    def restrict(self, row: IntArray) -> None:
        """Clear the bits of xgrammar's mask that are not allowed: it sets bits beyond the vocabulary, and halves of
        surrogates."""
        row &= self._usable

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        usable = self._usable
        if self._handle.is_terminated() or not 0 <= token_id < 32 * len(usable):
            return False
        if not usable[token_id // 32] >> (token_id % 32) & 1 or not self._handle.accept_token(token_id):
            return False
        self._path.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        assert 0 <= num_tokens <= len(self._path), (
            f"cannot roll back {num_tokens} tokens: only {len(self._path)} were accepted"
        )
        self._handle.rollback(num_tokens)
        del self._path[len(self._path) - num_tokens :]

    @property
    def is_terminated(self) -> bool:
        """See ``Matcher``."""
        if self._handle.is_terminated():
            return True
        if not self._handle.is_completed():
            return False
        row = np.zeros((1, len(self._tokens.eos)), np.int32)
        self.fill_bitmask(row, 0)
        return bool(np.array_equal(row[0], self._tokens.eos))

    def jump_forward(self) -> str:
        """See ``Matcher``. The text is also empty if the forced bytes begin or end inside a character."""
        if self._handle.is_terminated():
            return ""
        try:
            return self._handle.find_jump_forward_string()
        except UnicodeDecodeError:
            return ""


class XGrammarCompiled(CompiledGrammar):
    """Hold a compiled constraint."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, tokens: TokenSets, data_bytes: int = 0) -> None:
        """``data_bytes`` is the size of the data from which the constraint was read; 0 if it was compiled here."""
        self._compiled = compiled
        self._tokens = tokens
        self._data_bytes = data_bytes

    def matcher(self) -> XGrammarMatcher:
        """Return a new matcher at the start of the grammar."""
        return XGrammarMatcher(self._compiled, self._tokens)

    @property
    def num_bytes(self) -> int:
        """Return the memory that the grammar occupies, in bytes. What was read from data takes about 0.9 bytes for each of
        its bytes, many times what xgrammar reports: every rule gets its own copy of the automaton."""
        return max(self._compiled.memory_size_bytes, self._data_bytes)

    def dump(self) -> bytes:
        """Return xgrammar's serialised form, after a byte that identifies the usable tokens: ``j`` for JSON, else
        ``p``."""
        mark = b"j" if self._tokens.is_json else b"p"
        return mark + self._compiled.serialize_json().encode()


class XGrammarBackend(GrammarBackend):
    """Compile constraints with xgrammar. Schemas and regexes are first rewritten into what it enforces, or refused."""

    def __init__(self, config: XGrammarConfig, context: GrammarContext) -> None:
        self._config = config
        width = context.vocab_size
        eos = sorted(token for token in set(context.eos_token_ids) if 0 <= token < width)
        texts = [data or b"" for data in context.token_bytes[:width]]
        for token in eos:
            texts[token] = b""
        named = separated(texts, frozenset(eos))
        texts = named.texts
        self._plain_tokens = TokenSets.of(texts, eos, width, frozenset())
        self._json_tokens = TokenSets.of(texts, eos, width, _NEVER_IN_JSON)
        self._info = xgrammar.TokenizerInfo(
            named.with_separators, xgrammar.VocabType.RAW, vocab_size=width, stop_token_ids=eos
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=config.threads, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(min(config.threads, os.cpu_count() or 1))

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        """See ``GrammarBackend``."""
        is_json = spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
        try:
            compiled = self._compile(spec)
        except GrammarError:
            raise
        except (RuntimeError, ValueError) as error:
            message = _LOG_PREFIX.sub("", str(error)).strip()
            lack = str(spec.kind) if is_json else None  # a rewritten schema is well-formed
            raise GrammarError(
                f"xgrammar cannot compile this {spec.kind}: {message}", param=spec.kind, keyword=lack
            ) from error
        grammar = XGrammarCompiled(compiled, self._json_tokens if is_json else self._plain_tokens)
        self._refuse_empty(grammar, spec)
        return grammar

    def dump(self, grammar: CompiledGrammar) -> bytes:
        """See ``GrammarBackend``."""
        assert isinstance(grammar, XGrammarCompiled)
        return grammar.dump()

    def load(self, data: bytes) -> XGrammarCompiled:
        """See ``GrammarBackend``."""
        tokens = self._json_tokens if data[:1] == b"j" else self._plain_tokens
        compiled = xgrammar.CompiledGrammar.deserialize_json(data[1:].decode(), self._info)
        return XGrammarCompiled(compiled, tokens, len(data))

    def check(self, spec: GrammarSpec) -> None:
        """See ``GrammarBackend``."""
        self._write(spec)

    def fill_bitmasks(self, matchers: Sequence[Matcher], bitmask: IntArray, rows: Sequence[int]) -> None:
        """See ``GrammarBackend``. xgrammar's threads fill the rows of the matchers that have not ended."""
        open_ones = [(m, row) for m, row in zip(matchers, rows, strict=True) if not _xgrammar(m).ended]
        if len(open_ones) > 1:
            handles = [_xgrammar(matcher).handle for matcher, _ in open_ones]
            self._batch.batch_fill_next_token_bitmask(handles, bitmask, [row for _, row in open_ones])
            for matcher, row in open_ones:
                _xgrammar(matcher).restrict(bitmask[row])
        for matcher, row in zip(matchers, rows, strict=True):
            if len(open_ones) <= 1 or _xgrammar(matcher).ended:
                matcher.fill_bitmask(bitmask, row)

    def _write(self, spec: GrammarSpec) -> Any:
        """Return the constraint as xgrammar receives it: schema, regex, EBNF or structural tag. Raises
        ``GrammarError``."""
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                return rewrite(read_json(spec), strict=self._config.strict)
            case GrammarKind.JSON_OBJECT:
                return {"type": "object"}
            case GrammarKind.REGEX:
                return emit(grouped(read_regex(spec, MAX_PATTERN)))
            case GrammarKind.EBNF:
                return spec.text
            case GrammarKind.CHOICE:
                return "root ::= " + " | ".join(_literal(text) for text in read_choice(spec))
            case GrammarKind.STRUCTURAL_TAG:
                return self._tags(spec)
            case GrammarKind.LARK:
                raise GrammarError("xgrammar does not support Lark grammars", param=spec.kind, keyword=str(spec.kind))

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        written = self._write(spec)
        match spec.kind:
            case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
                return self._compile_schema(written)
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(written)
            case GrammarKind.STRUCTURAL_TAG:
                return self._compiler.compile_structural_tag(written)
            case _:
                return self._compile_ebnf(written)

    def _tags(self, spec: GrammarSpec) -> dict[str, Any]:
        structures, triggers = read_tags(spec)
        tags = [{"begin": s.begin, "content": self._content(s.schema), "end": s.end} for s in structures]
        return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}

    def _content(self, schema: Any) -> dict[str, Any]:
        written = rewrite(schema, strict=self._config.strict, free_text=True)
        return {"type": "json_schema", "json_schema": written, "max_whitespace_cnt": self._config.max_whitespace}

    def _compile_schema(self, schema: dict[str, object]) -> xgrammar.CompiledGrammar:
        text = json.dumps(schema, ensure_ascii=False)
        most = self._config.max_whitespace
        return self._compiler.compile_json_schema(text, strict_mode=False, max_whitespace_cnt=most)

    def _compile_ebnf(self, text: str) -> xgrammar.CompiledGrammar:
        """Compile the grammar under a new start rule, because xgrammar's masks miss tokens if another rule uses the
        start rule."""
        start = "start"
        while start in text:
            start += "_"
        return self._compiler.compile_grammar(f"{text}\n{start} ::= root\n", root_rule_name=start)

    def _refuse_empty(self, grammar: XGrammarCompiled, spec: GrammarSpec) -> None:
        row = np.zeros((1, len(self._plain_tokens.eos)), np.int32)
        grammar.matcher().fill_bitmask(row, 0)
        if not (row[0] & ~self._plain_tokens.eos).any():
            what = "only the empty text" if row.any() else "no text that this vocabulary can spell"
            raise GrammarError(f"{what} satisfies this {spec.kind}", param=spec.kind)


def _xgrammar(matcher: Matcher) -> XGrammarMatcher:
    assert isinstance(matcher, XGrammarMatcher)
    return matcher


def _literal(text: str) -> str:
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() else f"\\U{ord(char):08x}"
