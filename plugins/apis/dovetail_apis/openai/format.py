"""Write the parts that answers of OpenAI's APIs have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.api.meta import cached_json
from dovetail.interfaces.api import Acceptance, ApiProblem, Choice, Generation, Usage
from dovetail.interfaces.cache_groups import limiting_group
from dovetail.tokenizer import Tokenizer
from dovetail.types import FinishKind, FinishReason, TokenLogprob
from dovetail_apis.openai.types import OpenAIFields


def usage_json(usage: Usage, reasoning: bool = False) -> dict[str, Any]:
    """Return the token counts, including the tokens found in the prefix cache, those of a chat's ``reasoning``, and the numbers of drafted and accepted
    tokens if there were drafts. Rejected draft tokens are not included in any other count."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": _prompt_details(usage.cached, usage.cached_groups),
    }
    drafted, accepted, steps = usage.acceptance
    if reasoning or drafted:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    if drafted:
        counts["completion_tokens_details"] |= {
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


def choice_usage(choice: Choice) -> dict[str, Any]:
    """Return the token counts of one choice so far, for ``continuous_usage_stats``."""
    prompt, completion = len(choice.prompt_ids), len(choice.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": _prompt_details(choice.cached_tokens, choice.cached_groups),
    }


def _prompt_details(cached: int, groups: Sequence[int]) -> dict[str, Any]:
    """Return the prompt tokens found in the prefix cache and, with several cache groups, those that each group alone had."""
    details: dict[str, Any] = {"cached_tokens": cached}
    if groups:
        details["cached_tokens_by_group"] = list(groups)
        if (limiting := limiting_group(groups)) is not None:
            details["limited_by_group"] = limiting
    return details


def cached_details(usage: Usage) -> dict[str, Any]:
    """Return SGLang's field for the place where the cached tokens of the prompts were found (see ``cached_json``)."""
    return {"cached_tokens_details": cached_json(usage.cached, usage.cached_groups)}


def spec_details(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return SGLang's field for the draft tokens of each output that had any; a list if there are several."""
    found = [_speculation(choice.acceptance) for choice in choices if choice.acceptance.drafted]
    return {"spec_tokens_details": found[0] if len(found) == 1 else found} if found else {}


def _speculation(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "spec_accept_rate": acceptance.rate,
        "spec_accept_length": acceptance.length,
        "spec_num_correct_drafts": acceptance.accepted,
        "spec_num_proposed_drafts": acceptance.drafted,
        "spec_verify_ct": acceptance.steps,
    }


def extensions(body: OpenAIFields, outputs: Generation, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return SGLang's object ``sglext`` with what the request asks for and ``more``, or nothing."""
    found = dict(more or {})
    if body.return_cached_tokens_details:
        found |= cached_details(outputs.usage)
    if body.return_spec_tokens_details:
        found |= spec_details(outputs.choices)
    return {"sglext": found} if found else {}


def stop_fields(finish: FinishReason | None, stop_token_ids: Sequence[int] | None) -> dict[str, Any]:
    """Return what ended an output: as ``matched_stop`` (SGLang) a stop string, a stop token or an end-of-sequence token,
    as ``stop_reason`` (vLLM) the first two of them only."""
    matched = finish.matched if finish is not None else None
    requested = isinstance(matched, str) or matched in (stop_token_ids or ())
    return {"matched_stop": matched, "stop_reason": matched if requested else None}


def prompt_logprobs_json(tokenizer: Tokenizer, choice: Choice, top: int) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's form: for each position the prompt's token and the ``top``
    likeliest tokens by id, and None for the first position. ``rank`` is null for a token that is not among the likeliest
    ones."""

    def position(item: TokenLogprob) -> dict[str, Any] | None:
        if item.logprob is None:
            return None
        likeliest = {token: (value, rank) for rank, (token, value) in enumerate(item.top[:top], 1)}
        found = {item.token_id: (item.logprob, likeliest.get(item.token_id, (0, None))[1]), **likeliest}
        return {str(token): _ranked(tokenizer, token, value, rank) for token, (value, rank) in found.items()}

    return [position(item) for item in choice.prompt_logprobs]


def _ranked(tokenizer: Tokenizer, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
    text = tokenizer.bytes_of(token).decode("utf-8", "replace")
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


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


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], as_ids: bool = False) -> dict[str, Any]:
    """Return log-probabilities in the chat format: every token with its bytes and the likeliest alternatives. With
    ``as_ids``, tokens are named by their ids."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.bytes_of(token_id)
        name = f"token_id:{token_id}" if as_ids else data.decode("utf-8", "replace")
        return {"token": name, "logprob": logprob, "bytes": list(data)}

    content = [
        {
            **entry(item.token_id, item.logprob),
            "top_logprobs": [entry(token, value) for token, value in {**dict(item.top), **dict(item.given)}.items()],
        }
        for item in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Write log-probabilities in the completions format: parallel lists, where ``text_offset`` counts the characters of
    the choice's text."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
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
        return {self._name(token): value for token, value in (*item.top, *item.given)}

    def _name(self, token_id: int) -> str:
        """Return the token's text. Bytes that are not valid text alone are written like ``bytes:\\xe2``, so that names
        do not collide. With ``as_ids`` tokens are named by their ids."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
