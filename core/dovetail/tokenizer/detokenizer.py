"""Tokens to text, as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dovetail.tokenizer.stops import StopCutter

if TYPE_CHECKING:
    from dovetail.messages import TokenOutput
    from dovetail.sampling_params import SamplingParams
    from dovetail.tokenizer.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one output, piece by piece; costs O(new tokens) a push.

    ``push`` never returns half of a UTF-8 character, nor text that may be the beginning of a stop string: what it
    returned is final. Joined, the pieces are ``tokenizer.decode`` of all tokens, cut at the first stop string
    (with it, if ``include_stop``). The stop string that ends first counts, whatever the token borders are.
    Stop strings count from the ``min_tokens``-th token on: those that end before it are text like any other.
    ``continues=True`` keeps a leading space that a SentencePiece tokenizer would drop, for text that follows a prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        continues: bool = False,
        min_tokens: int = 0,
        keep_special: tuple[int, ...] = (),
    ) -> None:
        self._bytes = tokenizer.text_bytes(skip_special_tokens, keep_special)
        self._decoder = _Utf8Decoder("replace")
        self._cutter = StopCutter(stop, include_stop) if stop else None
        self._include_stop = include_stop
        self._strip = tokenizer.strip_leading_space and not continues
        self._unstoppable = max(min_tokens - 1, 0)
        self.matched: str | None = None

    @classmethod
    def for_params(
        cls, tokenizer: Tokenizer, params: SamplingParams, continues: bool = False
    ) -> IncrementalDetokenizer:
        """One that shows an output as its request asked for it."""
        return cls(
            tokenizer,
            params.stop,
            params.skip_special_tokens,
            params.include_stop,
            continues,
            params.min_new_tokens,
            params.keep_special,
        )

    def take(self, output: TokenOutput) -> tuple[str, int]:
        """Add what the engine sent. Returns the text that has become final, and how many of the tokens are shown in it:
        the stop token that ended the output is not, unless ``include_stop``."""
        ids, finish = output.token_ids, output.finish
        if finish is None:
            return self.push(ids), len(ids)
        hidden = isinstance(finish.matched, int) and ids[-1:] == [finish.matched] and not self._include_stop
        shown = len(ids) - hidden
        return self.push(ids[:shown]) + self.finish(), shown

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; returns the text that has become final. After a stop string matched, always empty."""
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
