"""llguidance as a grammar backend: Earley over a lexer of derivatives; masks are computed as they are needed."""

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

_GOING_ON = frozenset({"NotStopped", "NoExtension", "NoExtensionBias", "EndOfSentence"})
"""Stop reasons that are no failure."""


class _Tokens:
    """The vocabulary in the form that llguidance's wrapper wants. It never tokenizes: no grammar here forces tokens."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        return []


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What matchers need to know: the end tokens, as a set and as a bitmask row, and which tokens have a text."""

    width: int
    eos: frozenset[int]
    eos_row: IntArray
    usable: Sequence[bool]


class LLGuidanceMatcher(Matcher):
    """A position in a compiled grammar.

    llguidance never sees an end token: its own end cannot be taken back. Its errors are for good, so that a matcher
    that runs into a limit raises from then on.
    """

    def __init__(self, template: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._handle = template.deep_copy()
        self._path: list[int] = []
        self._ended = False
        self._mask: IntArray | None = None

    @property
    def handle(self) -> LLMatcher | None:
        """llguidance's matcher where a mask has to be computed, None where the mask is known."""
        return None if self._ended or self._mask is not None else self._handle

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``. After an end token, nothing but another is allowed. Raises ``GrammarError`` where the next step
        is too complex."""
        if self.handle is None:
            self.copy_mask(bitmask, row)
            return
        part = bitmask[row]
        assert part.flags.c_contiguous
        self._handle.unsafe_compute_mask_ptr(part.ctypes.data, part.nbytes)
        self.require_health()

    def copy_mask(self, bitmask: IntArray, row: int) -> None:
        """Write the mask that is known already."""
        known = self._vocabulary.eos_row if self._ended else self._mask
        assert known is not None
        bitmask[row] = known

    def require_health(self) -> None:
        """Raise ``GrammarError`` if llguidance has given up on this text: its mask then lies."""
        if self._handle.is_error() or self._handle.stop_reason() not in _GOING_ON:
            reason = self._handle.get_error().split("\n")[0] or self._handle.stop_reason()
            raise GrammarError(f"the grammar is too complex for llguidance at this point of the text: {reason}")

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``. Raises ``GrammarError`` where what follows is too complex."""
        if self._ended or not 0 <= token_id < self._vocabulary.width:
            return False
        if token_id in self._vocabulary.eos:
            self._ended = self._handle.is_accepting() and not self._handle.is_error()
        elif not self._vocabulary.usable[token_id]:
            return False
        elif self._handle.try_consume_tokens([token_id]) != 1:
            if self._handle.is_error():
                self.require_health()
            return False
        if token_id not in self._vocabulary.eos or self._ended:
            self._path.append(token_id)
            self._mask = None
            return True
        return False

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        assert 0 <= num_tokens <= len(self._path), f"{num_tokens} tokens to take back of {len(self._path)}"
        if num_tokens == 0:
            return
        del self._path[len(self._path) - num_tokens :]
        inside = num_tokens - self._ended
        self._ended, self._mask = False, None
        if inside and (self._handle.is_error() or not self._handle.rollback(inside)):
            self._handle = self._template.deep_copy()  # at its end, llguidance takes nothing back
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
        """See ``Matcher``. Whole characters only."""
        if self._ended or self._handle.is_stopped():
            return ""
        forced = self._handle.compute_ff_bytes()
        try:
            return forced.decode()
        except UnicodeDecodeError as error:
            return forced[: error.start].decode()


class LLGuidanceCompiled(CompiledGrammar):
    """A compiled constraint: a matcher at the start, to be copied."""

    def __init__(self, template: LLMatcher, vocabulary: _Vocabulary, size: int) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._size = size

    def matcher(self) -> LLGuidanceMatcher:
        """A fresh matcher."""
        return LLGuidanceMatcher(self._template, self._vocabulary)

    @property
    def num_bytes(self) -> int:
        """An estimate: llguidance does not say, and its lexer's states are made as texts need them."""
        return self._size


class LLGuidanceBackend(GrammarBackend):
    """Compiles with llguidance. What it would read otherwise than the constraint says is rewritten first, or refused."""

    def __init__(self, config: LLGuidanceConfig, context: GrammarContext) -> None:
        width = context.vocab_size
        eos = sorted(token for token in set(context.eos_token_ids) if 0 <= token < width)
        texts = [_text(data) for data in context.token_bytes[:width]]
        texts += [b""] * (width - len(texts))
        for token in eos:
            texts[token] = b""
        self._vocabulary = _Vocabulary(width, frozenset(eos), pack_bits(width, eos), [bool(text) for text in texts])
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(texts, eos[0])), eos_token=eos)
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
        self._writer.write(spec)

    def compile(self, spec: GrammarSpec) -> LLGuidanceCompiled:
        """See ``GrammarBackend``."""
        text = self._writer.write(spec)
        template = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=self._limits)
        if template.is_error():
            raise refusal(spec.kind, template.get_error())
        if warnings := template.get_grammar_warnings():
            raise refusal(spec.kind, warnings[0])
        compiled = LLGuidanceCompiled(template, self._vocabulary, 65536 + 64 * len(text))
        self._refuse_unusable(compiled, spec)
        return compiled

    def fill_bitmasks(self, matchers: Sequence[Matcher], bitmask: IntArray, rows: Sequence[int]) -> None:
        """See ``GrammarBackend``. Several threads compute, without the interpreter's lock."""
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
            matcher.require_health()

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
            if matcher.accept(
                first
            ):  # what a text may begin with is often one token, and what follows the first choice
                matcher.fill_bitmask(row, 0)
        except GrammarError as error:
            raise GrammarError(
                f"this {spec.kind} leaves too much open at one place: {error}", param=spec.kind, keyword="size"
            ) from error


def _text(data: bytes | None) -> bytes:
    """What a token adds. llguidance takes FF, which is in no valid text, for the mark of a special token."""
    return b"" if data is None or 0xFF in data else data
