"""Collect the token outputs of one request: tokens, text, log-probabilities, pooled vectors and counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dovetail.interfaces.api import Acceptance

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    cached_groups: tuple[int, ...]
    acceptance: Acceptance
    grammar_backend: str | None
    pooled: FloatArray | None


def collect(
    into: Collected, output: TokenOutput, detokenizer: IncrementalDetokenizer | None, reader: ChatReader | None
) -> tuple[str, int, Sequence[ChatDelta]]:
    """Add a token output of the engine to ``into``. Return the text that it added, the number of its tokens that are
    visible in the text (a stop token is not), and the parts that the ``reader`` of a chat found in the text. Without a
    ``detokenizer`` there is no text.

    The reader may end the output at a stop string. ``into.finish`` is then set although the engine has not finished the
    output.
    """
    into.token_ids += output.token_ids
    if output.cached_tokens:
        into.cached_tokens = output.cached_tokens
    if output.cached_groups:
        into.cached_groups = output.cached_groups
    if output.grammar_backend:
        into.grammar_backend = output.grammar_backend
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
        return "", 0, ()
    text, shown = detokenizer.take(output)
    into.text += text
    if reader is None:
        return text, shown, ()
    parts, into.finish = reader.take(text, output.finish, len(into.token_ids))
    return text, shown, parts


def vector_of(data: bytes) -> FloatArray:
    """Return the float32 vector that ``TokenOutput.pooled`` holds."""
    return np.frombuffer(data, "<f4").astype(np.float32)
