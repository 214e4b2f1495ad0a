"""XGrammar as a grammar backend (arXiv 2411.15100)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xgrammar

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext, Matcher
from dovetail.types import GrammarKind, GrammarSpec, IntArray
from dovetail_grammar.config import XGrammarConfig
from dovetail_grammar.patterns import checked, emit, size, whole
from dovetail_grammar.regex_parser import PatternError, parse
from dovetail_grammar.schema_values import MAX_PATTERN
from dovetail_grammar.schemas import rewrite

_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+?:\d+: (Check failed: .*? is false: )?")
_NEVER_IN_JSON = frozenset(range(0x20)) - {0x0A}
"""Control characters. JSON needs none but the newline, and xgrammar lets them into strings with a length bound."""


_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")


def pack_bits(width: int, token_ids: Iterable[int]) -> IntArray:
    """A bitmask row of ``width`` tokens with the given ones set: int32 ``[ceil(width / 32)]``."""
    flags = np.zeros(-(-width // 32) * 32, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


@dataclass(frozen=True, slots=True)
class TokenSets:
    """What is true of the tokens whatever the grammar, as bitmask rows.

    xgrammar lets surrogates (ED A0 80 to ED BF BF, no valid UTF-8) into strings, so a token must not spell one, nor go
    on from an ED with the byte that would.
    """

    usable: IntArray
    usable_after_ed: IntArray
    eos: IntArray
    ends_in_ed: frozenset[int]
    is_json: bool

    @classmethod
    def of(cls, texts: Sequence[bytes], eos: Sequence[int], width: int, banned: frozenset[int]) -> TokenSets:
        """Of a vocabulary, without the tokens that hold a ``banned`` byte. Unusable ids have empty texts."""
        good = [
            i for i, text in enumerate(texts) if text and not banned.intersection(text) and not _SURROGATE.search(text)
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
    """A position in a compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, tokens: TokenSets) -> None:
        self._handle = xgrammar.GrammarMatcher(compiled)
        self._tokens = tokens
        self._path: list[int] = []

    @property
    def _usable(self) -> IntArray:
        after_ed = bool(self._path) and self._path[-1] in self._tokens.ends_in_ed
        return self._tokens.usable_after_ed if after_ed else self._tokens.usable

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``. After an end-of-sequence token, nothing but another is allowed."""
        if self._handle.is_terminated():
            bitmask[row] = self._tokens.eos
            return
        self._handle.fill_next_token_bitmask(bitmask, row)
        bitmask[row] &= self._usable  # xgrammar sets the bits beyond the vocabulary

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
        assert 0 <= num_tokens <= len(self._path), f"{num_tokens} tokens to take back of {len(self._path)}"
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
        """See ``Matcher``. Empty also where the forced bytes begin or end inside a character."""
        if self._handle.is_terminated():
            return ""
        try:
            return self._handle.find_jump_forward_string()
        except UnicodeDecodeError:
            return ""


class XGrammarCompiled(CompiledGrammar):
    """A compiled constraint."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, tokens: TokenSets) -> None:
        self._compiled = compiled
        self._tokens = tokens

    def matcher(self) -> XGrammarMatcher:
        """A fresh matcher."""
        return XGrammarMatcher(self._compiled, self._tokens)

    @property
    def num_bytes(self) -> int:
        """Memory it occupies."""
        return self._compiled.memory_size_bytes

    def dump(self) -> bytes:
        """xgrammar's own form, after a mark of the tokens that may be used."""
        mark = b"j" if self._tokens.is_json else b"p"
        return mark + self._compiled.serialize_json().encode()


class XGrammarBackend(GrammarBackend):
    """Compiles with xgrammar. Schemas and regexes are first rewritten into what it honours, or refused."""

    def __init__(self, config: XGrammarConfig, context: GrammarContext) -> None:
        self._config = config
        width = context.vocab_size
        eos = sorted(token for token in set(context.eos_token_ids) if 0 <= token < width)
        texts = [data or b"" for data in context.token_bytes[:width]]
        for token in eos:
            texts[token:] = [b"", *texts[token + 1 :]]
        self._plain_tokens = TokenSets.of(texts, eos, width, frozenset())
        self._json_tokens = TokenSets.of(texts, eos, width, _NEVER_IN_JSON)
        self._info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=width, stop_token_ids=eos)
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=config.threads, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        """See ``GrammarBackend``."""
        is_json = spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
        try:
            compiled = self._compile(spec)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, GrammarError):
                raise
            message = _LOG_PREFIX.sub("", str(error)).strip()
            raise GrammarError(f"xgrammar cannot compile this {spec.kind}: {message}", param=spec.kind) from error
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
        return XGrammarCompiled(xgrammar.CompiledGrammar.deserialize_json(data[1:].decode(), self._info), tokens)

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                return self._compile_schema(rewrite(_read_schema(spec.text), strict=self._config.strict))
            case GrammarKind.JSON_OBJECT:
                return self._compile_schema({"type": "object"})
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(_plain_regex(spec.text))
            case GrammarKind.EBNF:
                return self._compile_ebnf(spec.text)

    def _compile_schema(self, schema: dict[str, object]) -> xgrammar.CompiledGrammar:
        text = json.dumps(schema, ensure_ascii=False)
        most = self._config.max_whitespace
        return self._compiler.compile_json_schema(text, strict_mode=False, max_whitespace_cnt=most)

    def _compile_ebnf(self, text: str) -> xgrammar.CompiledGrammar:
        """Under a start rule of our own: xgrammar's masks miss tokens where the start rule is part of another."""
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


def _read_schema(text: str) -> bool | dict[str, object]:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not valid JSON: {error}", param=GrammarKind.JSON_SCHEMA) from error
    except RecursionError as error:
        raise GrammarError("the JSON schema is nested too deeply", param=GrammarKind.JSON_SCHEMA) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _plain_regex(text: str) -> str:
    """The regex in the plainest spelling; the whole output must match it. Raises ``GrammarError``."""
    try:
        node = checked(whole(parse(text), search=False))
    except (PatternError, RecursionError) as error:
        raise GrammarError(f"the regex is not supported: {error}", param=GrammarKind.REGEX) from error
    if size(node) > MAX_PATTERN:
        raise GrammarError(
            f"the regex has {size(node)} characters with its repetitions written out; allowed: {MAX_PATTERN}",
            param=GrammarKind.REGEX,
        )
    return emit(node)
