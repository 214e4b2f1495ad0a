"""Write the parts that answers of OpenAI's APIs have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.interfaces.api import ApiProblem, Usage
from dovetail.tokenizer import Tokenizer
from dovetail.types import FinishKind, FinishReason, TokenLogprob


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the token counts, including the tokens found in the prefix cache, and the numbers of drafted and accepted
    tokens if there were drafts. Rejected draft tokens are not included in any other count."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
    drafted, accepted, steps = usage.acceptance
    if drafted:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
        counts["speculation"] = {
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "verify_steps": steps,
            "acceptance_length": usage.acceptance.length,
            "acceptance_rate": usage.acceptance.rate,
        }
    return counts


_KINDS = {403: "permission_error", 429: "rate_limit_error", 503: "service_unavailable"}


def error_json(problem: ApiProblem) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    status = problem.status
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def finish_name(finish: FinishReason | None, calls: int = 0) -> str | None:
    """Return ``stop``, ``length`` or ``abort``, or ``tool_calls`` for an output with ``calls`` that stopped. None: it
    has not finished."""
    if finish is None:
        return None
    return "tool_calls" if calls and finish.kind is FinishKind.STOP else finish.kind.value


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in the chat format: every token with its bytes and the likeliest alternatives."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.bytes_of(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        {**entry(item.token_id, item.logprob), "top_logprobs": [entry(token, value) for token, value in item.top]}
        for item in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Write log-probabilities in the completions format: parallel lists, where ``text_offset`` counts the characters of
    the choice's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def add(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the lists for the next tokens."""
        tokens = [self._name(item.token_id) for item in entries]
        offsets: list[int] = []
        for item in entries:
            offsets.append(self._offset)
            self._offset += len(self._tokenizer.bytes_of(item.token_id).decode("utf-8", "replace"))
        return {
            "tokens": tokens,
            "token_logprobs": [item.logprob for item in entries],
            "top_logprobs": [self._top(item) for item in entries],
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprob) -> dict[str, float] | None:
        """Return the likeliest tokens, or None for the first token of a prompt, which is not predicted."""
        if item.logprob is None:
            return None
        return {self._name(token): value for token, value in item.top}

    def _name(self, token_id: int) -> str:
        """Return the token's text. Bytes that are not valid text alone are written like ``bytes:\\xe2``, so that names
        do not collide."""
        data = self._tokenizer.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
