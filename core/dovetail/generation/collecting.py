"""Collect the token outputs of one request: tokens, text, log-probabilities, pooled vectors and counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dovetail.types import Acceptance

if TYPE_CHECKING:
    from dovetail.interfaces.api import ChatDelta, ChatReader
    from dovetail.messages import TokenOutput
    from dovetail.tokenizer import IncrementalDetokenizer
    from dovetail.types import FinishReason, FloatArray, TokenLogprob


class Collected(Protocol):
    """Hold what one request has generated so far; ``collect`` adds to it."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: Any
    finish: FinishReason | None
    cached_tokens: int
    acceptance: Acceptance
    grammar_backend: str | None
    pooled: FloatArray | None


class Added(NamedTuple):
    """Describe what one token output added. ``shown`` is how many of its tokens are visible in the text: a stop token is not.
    ``parts`` is what the reader of a chat found in the text. ``stopped`` is True if the reader has ended the output, which the
    engine does not know."""

    text: str
    shown: int
    parts: list[ChatDelta]
    stopped: bool


def collect(
    into: Collected, output: TokenOutput, detokenizer: IncrementalDetokenizer | None, reader: ChatReader | None
) -> Added:
    """Add a token output of the engine to ``into`` and return what it added. Without a ``detokenizer`` there is no text."""
    into.token_ids += output.token_ids
    if output.cached_tokens:
        into.cached_tokens = output.cached_tokens
    into.grammar_backend = output.grammar_backend or into.grammar_backend
    if output.drafted:
        into.acceptance = Acceptance(output.drafted, output.accepted, output.verify_steps)
    if output.logprobs:
        into.logprobs += output.logprobs
    if output.prompt_logprobs is not None:
        into.prompt_logprobs = output.prompt_logprobs
    if output.pooled is not None:
        into.pooled = vector_of(output.pooled)
    into.finish = output.finish
    if detokenizer is None:
        return Added("", 0, [], False)
    text, shown = detokenizer.take(output)
    into.text += text
    if reader is None:
        return Added(text, shown, [], False)
    parts, into.finish = reader.take(text, output.finish, len(into.token_ids))
    return Added(text, shown, parts, output.finish is None and into.finish is not None)


def vector_of(data: bytes) -> FloatArray:
    """Return the float32 vector that ``TokenOutput.pooled`` holds."""
    return np.frombuffer(data, "<f4").astype(np.float32)
