"""Check the token ids of requests. The server checks a request before it sends the request to the engine, and the
scheduler checks it again when it adds the request."""

from __future__ import annotations

from collections.abc import Collection

from dovetail.errors import ContextLengthError, RequestError
from dovetail.sampling_params import SamplingParams


def check_prompt(input_ids: Collection[int], params: SamplingParams, context_len: int, vocab_size: int) -> None:
    """Check that a prompt has at least one token, that it fits into the context (with one token of output unless
    ``max_new_tokens`` is 0), and that the model has every token id of the prompt and of ``params``.

    Raises ``RequestError``, or ``ContextLengthError`` for a prompt that is too long.
    """
    if not input_ids:
        raise RequestError("the prompt is empty; give at least one token", param="prompt", code="empty_prompt")
    length, output = len(input_ids), params.max_new_tokens != 0
    if length + output > context_len:
        raise ContextLengthError(
            f"the prompt has {length} tokens; the context holds {context_len}{', one of them for output' * output}"
        )
    check_token_ids("prompt", input_ids, vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_token_ids("token_ids_logprob", params.token_ids_logprob or (), vocab_size)
    check_token_ids("label_token_ids", params.pooling.token_ids if params.pooling else (), vocab_size)


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int, param: str | None = None) -> None:
    """Raise ``RequestError`` if the model has no token for one of ``token_ids``. ``field`` names the request field that
    holds them, or its entry, such as ``input.3``; then ``param`` is the name of the request field."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(
            f"{field} has the token id {wrong}, which is outside of the model's vocabulary; token ids must be in "
            f"[0, {vocab_size})",
            param=param or field,
        )
