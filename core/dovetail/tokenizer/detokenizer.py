"""Turn tokens into text as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from dovetail.tokenizer.stops import StopCutter

if TYPE_CHECKING:
    from dovetail.messages import TokenOutput
    from dovetail.sampling_params import SamplingParams

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenTexts(Protocol):
    """Describe what ``IncrementalDetokenizer`` needs of a tokenizer; ``tokenizer.Tokenizer`` provides it."""

    @property
    def strip_leading_space(self) -> bool:
        """Return True if decoding drops one space at the start of a text."""
        ...

    def text_bytes(self, skip_special_tokens: bool, keep: tuple[int, ...] = ()) -> list[bytes | None]:
        """Return the bytes of every token. See ``Tokenizer.text_bytes``."""
        ...


class IncrementalDetokenizer:
    """Return the text of one output in pieces; a push costs O(new tokens).

    ``push`` returns final text only: it never returns half of a UTF-8 character, nor text that may be the beginning of
    a stop string. Joined, the pieces are ``tokenizer.decode`` of all tokens, cut before the first stop string (after
    it, if ``include_stop``). The first stop string is the one that ends first, regardless of where tokens end. A match
    of ``stop_regex`` counts as a stop string. Stop strings that end before the output has ``min_tokens`` tokens are ordinary text. ``continues=True`` keeps a leading
    space that a SentencePiece tokenizer would drop, for text that follows a prompt. ``matched`` is the stop string that
    has ended the text (or the expression of ``stop_regex`` that has matched), or None.
    """

    def __init__(
        self,
        tokenizer: TokenTexts,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        continues: bool = False,
        min_tokens: int = 0,
        keep_special: tuple[int, ...] = (),
        stop_regex: Sequence[str] = (),
    ) -> None:
        self._bytes = tokenizer.text_bytes(skip_special_tokens, keep_special)
        self._decoder = _Utf8Decoder("replace")
        self._cutter = StopCutter(stop, include_stop, stop_regex) if stop or stop_regex else None
        self._include_stop = include_stop
        self._strip = tokenizer.strip_leading_space and not continues
        self._unstoppable = max(min_tokens - 1, 0)
        self.matched: str | None = None

    @classmethod
    def for_params(
        cls, tokenizer: TokenTexts, params: SamplingParams, continues: bool = False
    ) -> IncrementalDetokenizer:
        """Return a detokenizer with the settings of a request's parameters."""
        return cls(
            tokenizer,
            params.stop,
            params.skip_special_tokens,
            params.include_stop,
            continues,
            params.min_new_tokens,
            params.keep_special,
            params.stop_regex,
        )

    def take(self, output: TokenOutput) -> tuple[str, int]:
        """Add an output of the engine. Return the text that has become final, and the number of tokens of the output
        that are shown as text. The stop token that ended the output is not shown, unless ``include_stop``."""
        ids, finish = output.token_ids, output.finish
        if finish is None:
            return self.push(ids), len(ids)
        hidden = isinstance(finish.matched, int) and ids[-1:] == [finish.matched] and not self._include_stop
        shown = len(ids) - hidden
        return self.push(ids[:shown]) + self.finish(), shown

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that has become final. The text is always empty after a stop string has
        matched."""
        if self._unstoppable:
            ids = list(ids)
            first, ids = ids[: self._unstoppable], ids[self._unstoppable :]
            self._unstoppable -= len(first)
            return self._push(first, False) + self._push(ids, True)
        return self._push(ids, True)

    def _push(self, ids: Iterable[int], may_stop: bool) -> str:
        if self.matched is not None:
            return ""
        data = b"".join([self._bytes[token] or b"" for token in ids if token < len(self._bytes)])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._release(self._decoder.decode(data), may_stop)

    def finish(self) -> str:
        """Return the text that was held back. Call it once, after the last token."""
        if self.matched is not None:
            return ""
        text = self._release(self._decoder.decode(b"", True), True)
        return text + self._cutter.finish() if self._cutter is not None and self.matched is None else text

    def _release(self, text: str, may_stop: bool) -> str:
        if self._cutter is None or not text:
            return text
        text = self._cutter.feed(text, may_stop)
        self.matched = self._cutter.matched
        return text
