"""Append text that a grammar forces, without a forward pass for each of its tokens (jump-forward decoding).

    output   ... {"na|me|":|          known tokens, the last of them sampled just now
    forced              "Bel          the text that must follow, by the grammar
    jump                |_"|          its tokens, up to the first that depends on what may follow the forced text

The tokens of a jump enter the next forward pass together, like a chunk of a prompt; the next token is sampled after
them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.tokenizer import Tokenizer
    from dovetail.types import Req

TAIL = 4
"""Limit the number of tokens before the forced text that are tokenised together with it."""

PROBES = ("a", "s", "A", "1", " ", " a", '"', '",', ".", ",", ":", "}", "]", "[", "{", "/", "-", "_", "\n", "é", "字")
"""List texts that may follow a forced text. Tokens that change if one of these follows are left to the model."""


class JumpForward:
    """Tokenise forced text. Results are cached, because requests with one schema have the same forced texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cached_tokens = lru_cache(4096)(self._tokens)

    def forced_tokens(self, req: Req) -> list[int]:
        """Return the tokens that must follow the tokens of ``req``, at most as many as the request may still get. The
        list is empty if there is a choice, if the text has no stable tokens, or if the request has log-probabilities or
        a logit bias."""
        if req.matcher is None or req.params.logprobs is not None or req.params.logit_bias:
            return []
        text = req.matcher.jump_forward()
        if not text:
            return []
        tail = tuple(req.output_ids[-TAIL:].tolist())
        return self._cached_tokens(tail, text)[: len(req.token_ids) - req.known_len]

    def _tokens(self, tail: tuple[int, ...], text: str) -> list[int]:
        return next((found for k in range(len(tail)) if (found := self._after(tail[k:], text)) is not None), [])

    def _after(self, tail: Sequence[int], text: str) -> list[int] | None:
        """Return the stable tokens of ``text`` after ``tail``; None if the tokenizer would encode the text of ``tail``
        as other tokens."""
        before = self._bytes(tail)
        if before is None:
            return None
        try:
            whole = before.decode() + text
        except UnicodeDecodeError:
            return None
        ids = self._tokenizer.encode(whole, add_special_tokens=False)
        if ids[: len(tail)] != list(tail) or self._bytes(ids) != whole.encode():
            return None
        stable = len(ids) - 1  # the last token may merge with the text that follows
        for probe in PROBES:
            other = self._tokenizer.encode(whole + probe, add_special_tokens=False)
            stable = next((i for i in range(stable) if ids[i : i + 1] != other[i : i + 1]), stable)
        return ids[len(tail) : stable]

    def _bytes(self, ids: Sequence[int]) -> bytes | None:
        """Return the text of ``ids`` in bytes; None if one of them has no text."""
        vocabulary = self._tokenizer.token_bytes
        parts = [vocabulary[token] if token < len(vocabulary) else None for token in ids]
        return b"".join(part for part in parts if part is not None) if None not in parts else None
