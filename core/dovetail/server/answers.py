"""Estimate the size of an answer before its request starts, and refuse requests whose answer would be too large."""

from __future__ import annotations

from dovetail.errors import RequestError
from dovetail.interfaces.api import JSON_NUMBER_BYTES, ApiRequest, Prompt
from dovetail.sampling_params import PoolingKind, SamplingParams

ENTRY_BYTES = 64
"""The JSON of one log-probability with its token, in bytes: 31 in /generate, about 80 in OpenAI's format."""

TOKEN_BYTES = 16
"""The JSON of a generated token: its text and its id."""

SURE_TOKENS = 4096
"""Outputs are estimated with at most this number of tokens: clients that set no limit rarely mean the rest of a long
context. What an output has beyond them is counted while it grows."""


def bytes_per_token(top: int | None, params: SamplingParams) -> int:
    """Return the size of one token with the log-probabilities of its ``top`` best tokens; None for none at all."""
    return TOKEN_BYTES if top is None else TOKEN_BYTES + ENTRY_BYTES * (1 + top + len(params.token_ids_logprob or ()))


class AnswerLimit:
    """Refuse requests whose answer may have more than ``most`` bytes. ``context_len`` and ``vector_size`` are the model's."""

    def __init__(self, most: float, context_len: int, vector_size: int) -> None:
        self.most = most
        self._context_len = context_len
        self._vector_size = vector_size

    def check(self, request: ApiRequest, outputs: int) -> int:
        """Return the estimated size of the answer in bytes, of which its outputs take ``outputs``. Raises ``RequestError``
        if it is too large."""
        size = request.more_bytes + outputs
        if size > self.most:
            raise self._error(request, size)
        return size

    def outputs(self, prompt: Prompt, number_bytes: int = JSON_NUMBER_BYTES) -> int:
        """Return the estimated size of the outputs of ``prompt``."""
        return prompt.params.n * self._output(prompt, number_bytes)

    def _output(self, prompt: Prompt, number_bytes: int) -> int:
        params, length = prompt.params, len(prompt.ids)
        if params.pooling is not None:
            labels = params.pooling.kind is PoolingKind.LABELS
            return number_bytes * (len(params.pooling.token_ids) if labels else self._vector_size)
        free = max(self._context_len - length, 0)
        made = free if params.max_new_tokens is None else min(params.max_new_tokens, free)
        size = min(made, SURE_TOKENS) * bytes_per_token(params.logprobs, params)
        if params.prompt_logprobs is not None:
            size += max(length - params.prompt_logprobs_start, 0) * bytes_per_token(params.prompt_logprobs, params)
        return size

    def _error(self, request: ApiRequest, size: int) -> RequestError:
        params = [prompt.params for prompt in request.prompts]
        asked = [f"{request.num_outputs} outputs"] if request.num_outputs > 1 else []
        lower = ["n" if max(p.n for p in params) > 1 else "the number of prompts"] if asked else []
        prompts = [p for p in params if p.prompt_logprobs is not None]
        if prompts:
            asked.append("the log-probabilities of prompt tokens")
            lower.append("the part of the prompt whose log-probabilities are returned (logprob_start_len)")
        if any(p.logprobs is not None for p in params) or prompts:
            asked.append("log-probabilities of the best tokens")
            lower.append("the number of top log-probabilities")
        if any(p.pooling is None and p.max_new_tokens != 0 for p in params):
            lower.append("max_tokens")
        return RequestError(
            f"the answer ({', '.join(asked) or 'one output'}) may have {size / 2**20:.0f} MiB; allowed: "
            f"{self.most / 2**20:g} MiB (server.limits.answer_mib). Lower {' or '.join(lower) or 'the size of the request'}",
            param="n" if request.num_outputs > 1 else None,
            code="answer_too_large",
        )
