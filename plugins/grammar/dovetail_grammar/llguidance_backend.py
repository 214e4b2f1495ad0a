"""Provide llguidance as a grammar backend: an Earley parser over a lexer of derivatives. Masks are computed as needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext, Matcher
from dovetail.sampling_params import GrammarSpec
from dovetail.types import IntArray
from dovetail_grammar.bits import pack_bits
from dovetail_grammar.config import LLGuidanceConfig
from dovetail_grammar.llguidance_errors import refusal
from dovetail_grammar.llguidance_grammars import GrammarWriter

_NOT_FAILED = frozenset({"NotStopped", "NoExtension", "NoExtensionBias", "EndOfSentence"})
"""Stop reasons that are not a failure."""


class _Tokens:
    """Hold the vocabulary in the form that llguidance's wrapper requires. It never tokenizes, because no grammar here
    forces tokens."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        return []


@dataclass(frozen=True, slots=True)
class _TokenTable:
    """Hold the part of the vocabulary that matchers need: the end tokens, as a set and as a bitmask row, and which
    tokens have a text."""

    width: int
    eos: frozenset[int]
    eos_row: IntArray
    usable: Sequence[bool]


class LLGuidanceMatcher(Matcher):
    """Track the position of one request in a compiled grammar.

    llguidance never receives an end token, because it cannot roll back after its own end. Its errors are permanent: a
    matcher that exceeds a limit raises from then on.
    """

    def __init__(self, template: LLMatcher, vocabulary: _TokenTable) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._handle = template.deep_copy()
        self._path: list[int] = []
        self._ended = False
        self._mask: IntArray | None = None

    @property
    def handle(self) -> LLMatcher | None:
        """Return llguidance's matcher if a mask has to be computed, or None if the mask is known."""
        return None if self._ended or self._mask is not None else self._handle

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``. After an end token, only another end token is allowed. Raises ``GrammarError`` if the next
        step is too complex."""
        if self.handle is None:
            self.copy_mask(bitmask, row)
            return
        part = bitmask[row]
        assert part.flags.c_contiguous
        self._handle.unsafe_compute_mask_ptr(part.ctypes.data, part.nbytes)
        self.raise_if_failed()

    def copy_mask(self, bitmask: IntArray, row: int) -> None:
        """Write the mask that is already known into ``bitmask[row]``."""
        known = self._vocabulary.eos_row if self._ended else self._mask
        assert known is not None
        bitmask[row] = known

    def raise_if_failed(self) -> None:
        """Raise ``GrammarError`` if llguidance has stopped with an error on this text, because its mask is then wrong."""
        if self._handle.is_error() or self._handle.stop_reason() not in _NOT_FAILED:
            reason = self._handle.get_error().split("\n")[0] or self._handle.stop_reason()
            raise GrammarError(f"the grammar is too complex for llguidance at this point of the text: {reason}")

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``. Raises ``GrammarError`` if what follows is too complex."""
        if self._ended or not 0 <= token_id < self._vocabulary.width:
            return False
        if token_id in self._vocabulary.eos:
            self._ended = self._handle.is_accepting() and not self._handle.is_error()
        elif not self._vocabulary.usable[token_id]:
            return False
        elif self._handle.try_consume_tokens([token_id]) != 1:
            if self._handle.is_error():
                self.raise_if_failed()
            return False
        if token_id not in self._vocabulary.eos or self._ended:
            self._path.append(token_id)
            self._mask = None
            return True
        return False

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        assert 0 <= num_tokens <= len(self._path), (
            f"cannot roll back {num_tokens} tokens: only {len(self._path)} were accepted"
        )
        if num_tokens == 0:
            return
        del self._path[len(self._path) - num_tokens :]
        inside = num_tokens - self._ended
        self._ended, self._mask = False, None
        if inside and (self._handle.is_error() or not self._handle.rollback(inside)):
            self._handle = self._template.deep_copy()  # llguidance cannot roll back after its end
            consumed = self._handle.try_consume_tokens(self._path)
            assert consumed == len(self._path)

    @property
    def is_terminated(self) -> bool:
        """See ``Matcher``."""
        if self._ended or not self._handle.is_accepting():
            return self._ended
        if self._handle.is_stopped():
            return not self._handle.is_error()
        mask = self._mask
        if mask is None:
            mask = np.zeros(len(self._vocabulary.eos_row), np.int32)
            self.fill_bitmask(mask[None], 0)
            self._mask = mask
        return bool(np.array_equal(mask, self._vocabulary.eos_row))

    def jump_forward(self) -> str:
        """See ``Matcher``. The text consists of whole characters only."""
        if self._ended or self._handle.is_stopped():
            return ""
        forced = self._handle.compute_ff_bytes()
        try:
            return forced.decode()
        except UnicodeDecodeError as error:
            return forced[: error.start].decode()


class LLGuidanceCompiled(CompiledGrammar):
    """Hold a compiled constraint: a matcher at the start, which each request copies."""

    def __init__(self, template: LLMatcher, vocabulary: _TokenTable, size: int) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._size = size

    def matcher(self) -> LLGuidanceMatcher:
        """Return a new matcher at the start of the grammar."""
        return LLGuidanceMatcher(self._template, self._vocabulary)

    @property
    def num_bytes(self) -> int:
        """Return an estimate in bytes: llguidance does not report its memory, and its lexer's states are built as texts
        need them."""
        return self._size


class LLGuidanceBackend(GrammarBackend):
    """Compile constraints with llguidance. Parts that it would interpret differently are rewritten first, or refused."""

    def __init__(self, config: LLGuidanceConfig, context: GrammarContext) -> None:
        width = context.vocab_size
        eos = sorted(token for token in set(context.eos_token_ids) if 0 <= token < width)
        texts = [_text(data) for data in context.token_bytes[:width]]
        texts += [b""] * (width - len(texts))
        for token in eos:
            texts[token] = b""
        self._vocabulary = _TokenTable(width, frozenset(eos), pack_bits(width, eos), [bool(text) for text in texts])
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(texts, eos[0])), eos_token=eos) if eos else None
        self._executor = LLExecutor(config.threads)
        self._writer = GrammarWriter(config.max_whitespace)
        self._limits = LLParserLimits(
            step_lexer_fuel=config.max_lexer_steps,
            step_max_items=config.max_items,
            max_lexer_states=config.max_lexer_states,
            verbose_errors=False,
        )

    def check(self, spec: GrammarSpec) -> None:
        """See ``GrammarBackend``."""
        self._write(spec)

    def _write(self, spec: GrammarSpec) -> tuple[str, LLTokenizer]:
        """Return the grammar as llguidance receives it, and its tokenizer. Raises ``GrammarError``, always if no token ends
        outputs, because llguidance needs one."""
        if self._tokenizer is None:
            raise GrammarError(
                "llguidance needs a token that ends outputs, and the model has none; use another backend (grammar: xgrammar)",
                param=spec.kind,
                keyword=str(spec.kind),
            )
        return self._writer.write(spec), self._tokenizer

    def compile(self, spec: GrammarSpec) -> LLGuidanceCompiled:
        """See ``GrammarBackend``."""
        text, tokenizer = self._write(spec)
        template = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=self._limits)
        if template.is_error():
            raise refusal(spec.kind, template.get_error())
        if warnings := template.get_grammar_warnings():
            raise refusal(spec.kind, warnings[0])
        compiled = LLGuidanceCompiled(template, self._vocabulary, 3 * 65536 + 64 * len(text))
        self._refuse_unusable(compiled, spec)
        return compiled

    def fill_bitmasks(self, matchers: Sequence[Matcher], bitmask: IntArray, rows: Sequence[int]) -> None:
        """See ``GrammarBackend``. Several threads compute the masks without the interpreter's lock."""
        assert bitmask.flags.c_contiguous
        open_rows: list[tuple[LLMatcher, int]] = []
        for matcher, row in zip(matchers, rows, strict=True):
            assert isinstance(matcher, LLGuidanceMatcher)
            if matcher.handle is None:
                matcher.copy_mask(bitmask, row)
            else:
                open_rows.append((matcher.handle, row))
        if open_rows:
            self._executor.unsafe_compute_mask_ptr(open_rows, bitmask.ctypes.data, bitmask.strides[0], len(bitmask))
        for matcher in matchers:
            assert isinstance(matcher, LLGuidanceMatcher)
            matcher.raise_if_failed()

    def _refuse_unusable(self, compiled: LLGuidanceCompiled, spec: GrammarSpec) -> None:
        row = np.zeros((1, len(self._vocabulary.eos_row)), np.int32)
        try:
            compiled.matcher().fill_bitmask(row, 0)
        except GrammarError:  # a dead end
            row[:] = 0
        if not (row[0] & ~self._vocabulary.eos_row).any():
            what = "only the empty text" if row.any() else "no text that this vocabulary can spell"
            raise GrammarError(f"{what} satisfies this {spec.kind}", param=spec.kind)
        first = int(np.flatnonzero(np.unpackbits(row[0].view(np.uint8), bitorder="little"))[0])
        try:
            matcher = compiled.matcher()
            # Often only one token may begin a text, and the first choice comes after it.
            if matcher.accept(first):
                matcher.fill_bitmask(row, 0)
        except GrammarError as error:
            raise GrammarError(
                f"this {spec.kind} leaves too much open at one point of the text: {error}",
                param=spec.kind,
                keyword="size",
            ) from error


def _text(data: bytes | None) -> bytes:
    """Return the text of a token, or the empty text if it has none or contains the byte FF.

    FF is not part of any valid text, and llguidance uses it to mark special tokens.
    """
    return b"" if data is None or 0xFF in data else data
