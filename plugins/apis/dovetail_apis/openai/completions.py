"""Handle POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import parse
from dovetail.api.requests import check_count, new_id, with_output_limit
from dovetail.api.responses import SSE, event, streamed, whole
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost, ApiProblem, ApiRequest, Choice, Delta, Generation, Prompt
from dovetail.sampling_params import SamplingParams
from dovetail.types import TokenLogprob
from dovetail_apis.openai.format import CompletionLogprobs, error_json, finish_name, usage_json
from dovetail_apis.openai.types import CompletionRequest

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(host: ApiHost, request: Request) -> Response:
    """Return the continuation of one prompt or of several prompts."""
    body = await parse(request, CompletionRequest, host.max_body)
    host.check_model(body.model)
    texts = body.prompt if _many(body.prompt) else [body.prompt]
    check_count(host, len(texts), "prompt")
    outputs = host.submit(await _parsed(host, body, texts))
    formatter = CompletionFormat(host, body, texts, outputs)
    if body.stream:
        return await streamed(request, outputs, formatter)
    return await whole(request, outputs, formatter.whole)


def _many(prompt: object) -> bool:
    """Return true for a list of prompts, and false for one prompt (a string, or a list of token ids)."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


async def _parsed(host: ApiHost, body: CompletionRequest, texts: Sequence[Any]) -> ApiRequest:
    params = _with_best_of(body, body.params(body.max_tokens, body.logprobs, body.logprobs if body.echo else None, {}))
    prompts: list[Prompt] = []
    for text in texts:
        if not text:
            raise RequestError("the prompt is empty; give at least one token", param="prompt", code="empty_prompt")
        ids = await host.encode(text, add_special_tokens=True) if isinstance(text, str) else text
        prompts.append(Prompt(ids, with_output_limit(params, host.output_limit(ids, _DEFAULT_MAX_TOKENS))))
    rid = body.rid or new_id("cmpl-")
    return ApiRequest(rid, tuple(prompts), True, body.cache_salt or "", body.priority or 0, session=body.session or "")


def _with_best_of(body: CompletionRequest, params: SamplingParams) -> SamplingParams:
    """Return ``params`` that generate ``best_of`` outputs with log-probabilities. Raises ``RequestError``."""
    if body.best_of is None or body.best_of == params.n:
        return params
    if body.best_of < params.n:
        raise RequestError(f"best_of is {body.best_of} and n is {params.n}; allowed: at least n", param="best_of")
    if body.stream:
        raise RequestError(
            f"best_of is {body.best_of} and stream is true, but the best outputs are known only at the end; give best_of: "
            f"{params.n}",
            param="best_of",
        )
    return replace(params, n=body.best_of, logprobs=params.logprobs or 0)


def best(choices: Sequence[Choice], n: int) -> list[Choice]:
    """Return the ``n`` choices whose tokens have the highest average log-probability, the best first."""

    def unlikely(choice: Choice) -> float:
        return -fmean(one.logprob or 0.0 for one in choice.logprobs) if choice.logprobs else 0.0

    return sorted(choices, key=unlikely)[:n]


class CompletionFormat:
    """Format the answers to one completion request, whole or in chunks."""

    media_type = SSE

    def __init__(self, host: ApiHost, body: CompletionRequest, texts: Sequence[Any], outputs: Generation) -> None:
        self._outputs = outputs
        self._tokenizer = host.tokenizer
        self._echo = [self._text(text) for text in texts] if body.echo else None
        self._n = body.n or 1
        self._made = max(body.best_of or 1, self._n)
        self._with_logprobs = body.logprobs is not None
        self._logprobs = [CompletionLogprobs(host.tokenizer) for _ in outputs.choices]
        self._started: set[int] = set()
        self._include_usage = body.include_usage
        self._common = {
            "id": outputs.rid,
            "object": "text_completion",
            "created": int(time.time()),
            "model": host.model_name,
        }
        self._before = b"data: " + msgspec.json.encode(self._common)[:-1] + b',"choices":[{"index":'
        self._after = b"}]" + (b',"usage":null' if body.include_usage else b"") + b"}\n\n"

    def whole(self, outputs: Generation) -> object:
        """Return the complete answer."""
        choices = [
            {
                "index": index,
                "text": self._echoed(choice) + choice.text,
                "logprobs": self._lists(choice, [*choice.prompt_logprobs, *choice.visible_logprobs]),
                "finish_reason": finish_name(choice.finish),
            }
            for index, choice in enumerate(self._chosen(outputs.choices))
        ]
        return {**self._common, "choices": choices, "usage": usage_json(outputs.usage)}

    def _chosen(self, choices: Sequence[Choice]) -> list[Choice]:
        if self._made == self._n:
            return list(choices)
        return [
            choice for i in range(0, len(choices), self._made) for choice in best(choices[i:][: self._made], self._n)
        ]

    def head(self) -> bytes:
        """Return nothing: the prompt is sent with the first token, because its logprobs are known only then."""
        return b""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return the chunks of one step."""
        return b"".join(self._delta(delta) for delta in deltas)

    def tail(self) -> bytes:
        """Return the token counts, if the client requests them, and the end marker."""
        usage = b""
        if self._include_usage:
            usage = event(
                msgspec.json.encode({**self._common, "choices": [], "usage": usage_json(self._outputs.usage)})
            )
        return usage + event(b"[DONE]")

    def failed(self, problem: ApiProblem) -> bytes:
        """Return the error as an event."""
        return event(msgspec.json.encode(error_json(problem)))

    def _delta(self, delta: Delta) -> bytes:
        choice, text, entries = delta.choice, delta.text, delta.logprobs
        if choice.index not in self._started:
            self._started.add(choice.index)
            text, entries = self._echoed(choice) + text, [*choice.prompt_logprobs, *entries]
        if not (text or delta.finish or (self._with_logprobs and entries)):
            return b""
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._before,
            choice.index,
            msgspec.json.encode(text),
            msgspec.json.encode(self._lists(choice, entries)),
            msgspec.json.encode(finish_name(delta.finish)),
            self._after,
        )

    def _lists(self, choice: Choice, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._logprobs[choice.index].add(entries) if self._with_logprobs else None

    def _echoed(self, choice: Choice) -> str:
        return self._echo[choice.index // self._made] if self._echo else ""

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)
