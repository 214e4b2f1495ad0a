"""Restrict outputs to some tokens, keep words out of them, and end reasoning that is too long: by bitmasks, as constraints
do. A wrapper around the matcher of a request's constraint, or in place of one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dovetail.constraints.gated import pack_tokens
from dovetail.errors import RequestError
from dovetail.interfaces.grammar import Matcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.sampling_params import SamplingParams, ThinkingSpan
    from dovetail.tokenizer import Tokenizer
    from dovetail.types import IntArray

_BEFORE = ~0
"""The state of reasoning that has not begun: outside, and nothing is used."""


class Restrictions(NamedTuple):
    """Hold what a request's tokens must satisfy. ``always`` is a bitmask row of the tokens that are allowed wherever the
    text is. ``endings[t]`` lists tokens that must not follow a text that ends with t: pairs of the end of the text and
    the token. ``span`` is the reasoning that may have at most ``budget`` tokens; None if there is no limit."""

    always: IntArray
    endings: dict[int, list[tuple[tuple[int, ...], int]]]
    span: ThinkingSpan | None = None
    budget: int = 0


def restrictions_of(params: SamplingParams, vocab_size: int, tokenizer: Tokenizer | None) -> Restrictions | None:
    """Return the restrictions of a request, or None if it has none. Raises ``RequestError``."""
    allowed, budget = params.allowed_token_ids, params.thinking_budget
    if allowed is None and budget is None and not params.bad_words:
        return None
    if budget is not None and params.thinking_span is None:
        raise RequestError(
            "thinking_budget needs a model whose reasoning the server can find, and this one has no reasoning parser; "
            "`dovetail explain` shows which parsers there are",
            param="thinking_budget",
            code="unsupported_parameter",
        )
    always = pack_tokens(vocab_size, range(vocab_size) if allowed is None else allowed)
    endings: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for *prefix, last in _bad_sequences(params.bad_words, tokenizer):
        if prefix:
            endings.setdefault(prefix[-1], []).append((tuple(prefix), last))
        else:
            always[last // 32] &= ~_bit(last)
    if not always.any():
        raise RequestError("bad_words leave no token of allowed_token_ids", param="bad_words")
    return Restrictions(always, endings, params.thinking_span, budget or 0)


def _bad_sequences(words: Sequence[str], tokenizer: Tokenizer | None) -> Sequence[tuple[int, ...]]:
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and this model was loaded without one", param="bad_words")
    return _encoded(tuple(words), tokenizer)


@functools.lru_cache(maxsize=64)
def _encoded(words: tuple[str, ...], tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    """Return the token sequences of each word at the beginning of a text, and of the word after a space if the space
    changes its first token and not the number of tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        first = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if first:
            found[first] = None
        if len(spaced) == len(first) and spaced[:1] != first[:1]:
            found[spaced] = None
    return tuple(found)


class RestrictedMatcher(Matcher):
    """Match what ``restrictions`` allow and, if there is an ``inner`` matcher, what it allows too.

    The words that must not occur are those of the output: the prompt is not part of the text.

    Reasoning may begin again after its end. It then goes on with what is left of the budget, of which the token that
    ended it has used one. Once nothing is left, a single token that would begin it again is forbidden; reasoning that
    several tokens begin is ended at once.
    """

    def __init__(self, restrictions: Restrictions, inner: Matcher | None = None) -> None:
        self._restrictions, self._inner = restrictions, inner
        self._tokens: list[int] = []
        span = restrictions.span
        # the used budget before each token, and after the last one; outside of the reasoning its complement
        self._used = [0 if span is not None and span.begun else _BEFORE]

    @property
    def inner(self) -> Matcher | None:
        """Return None: the mask of the backend is not the whole mask."""
        return None

    def _forced(self) -> int | None:
        """Return the token that must follow, because the reasoning has used its budget."""
        span, budget = self._restrictions.span, self._restrictions.budget
        return span.until if span is not None and self._used[-1] >= budget else None

    def _forbidden(self) -> list[int]:
        """Return the tokens that would complete a word that must not occur, and the one that would begin the reasoning
        again after its budget was used."""
        tokens, span, used = self._tokens, self._restrictions.span, self._used[-1]
        endings = self._restrictions.endings.get(tokens[-1], ()) if tokens else ()
        found = [last for prefix, last in endings if tuple(tokens[-len(prefix) :]) == prefix]
        if span is not None and len(span.lead) == 1 and used < _BEFORE and ~used >= self._restrictions.budget:
            found.append(span.lead[0])
        return found

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``. Raises ``RequestError`` if no token is left."""
        forced = self._forced()
        if self._inner is not None:
            self._inner.fill_bitmask(bitmask, row)
            bitmask[row] &= self._restrictions.always
        else:
            bitmask[row] = self._restrictions.always
        for token in self._forbidden():
            bitmask[row, token // 32] &= ~_bit(token)
        if forced is not None:
            kept = bitmask[row, forced // 32] & _bit(forced)
            bitmask[row] = 0
            bitmask[row, forced // 32] = kept
        if not bitmask[row].any():
            raise RequestError(
                "bad_words, allowed_token_ids, thinking_budget and the constraint of this request leave no token that "
                f"may follow its {len(self._tokens)} output tokens"
            )

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        if not self._restrictions.always[token_id // 32] & _bit(token_id) or token_id in self._forbidden():
            return False
        if (forced := self._forced()) is not None and token_id != forced:
            return False
        if self._inner is not None and not self._inner.accept(token_id):
            return False
        self._tokens.append(token_id)
        self._used.append(self._after(token_id))
        return True

    def _after(self, token: int) -> int:
        """Return the used budget after ``token``, the newest one; outside of the reasoning its complement."""
        span, used = self._restrictions.span, self._used[-1]
        if span is None:
            return used
        if used < 0:
            begins = span.lead and token == span.lead[-1] and tuple(self._tokens[-len(span.lead) :]) == span.lead
            return ~used if begins else used
        return ~(used + 1) if token == span.until else used + 1

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        if not num_tokens:
            return
        del self._tokens[-num_tokens:], self._used[-num_tokens:]
        if self._inner is not None:
            self._inner.rollback(num_tokens)

    @property
    def is_terminated(self) -> bool:
        """See ``Matcher``."""
        return self._inner is not None and self._inner.is_terminated

    def jump_forward(self) -> str:
        """See ``Matcher``."""
        return self._inner.jump_forward() if self._inner is not None else ""


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token % 32)).view(np.int32)
