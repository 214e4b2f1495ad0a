"""Handle POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import parse
from dovetail.api.offload import for_each
from dovetail.api.requests import ID_BYTES, api_names, check_count, check_logprobs, with_output_limit
from dovetail.api.responses import streamed, whole
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost, ApiRequest, Prompt
from dovetail.sampling_params import SamplingParams
from dovetail_apis.adapters import placement
from dovetail_apis.openai.completion_format import CompletionFormat
from dovetail_apis.openai.infill import infill_prompt
from dovetail_apis.openai.types import CompletionRequest

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(host: ApiHost, request: Request) -> Response:
    """Return the continuation of one prompt or of several prompts."""
    body = await parse(request, CompletionRequest, host.max_body)
    host.check_model(body.model)
    texts = body.prompt if _many(body.prompt) else [body.prompt]
    check_count(host, len(texts), "prompt")
    parsed = await _parsed(host, body, texts)
    with api_names({"thinking_budget": "thinking_token_budget"}):
        outputs = await host.submit_in_parts(parsed)
    formatter = CompletionFormat(host, body, texts, outputs)
    if body.stream:
        return await streamed(request, outputs, formatter)
    return await whole(request, outputs, formatter.whole)


def _many(prompt: object) -> bool:
    """Return true for a list of prompts, and false for one prompt (a string, or a list of token ids)."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


async def _parsed(host: ApiHost, body: CompletionRequest, texts: Sequence[Any]) -> ApiRequest:
    echoed = body.logprobs if body.echo else None
    params = _with_best_of(body, body.params(body.max_tokens, body.logprobs, echoed, {}, host.sampling_defaults))
    check_logprobs(host, params)
    rid, names = body.names(len(texts), "cmpl-")

    async def prompt_of(given: tuple[str | list[int], str, str, str]) -> Prompt:
        text, *own = given
        if not text:
            raise RequestError("the prompt is empty; give at least one token", param="prompt", code="empty_prompt")
        ids = await _encoded(host, body, text, params)
        return Prompt(ids, with_output_limit(params, host.output_limit(ids, _DEFAULT_MAX_TOKENS)), *own)

    where = placement(host, body.lora_path, body, len(texts))
    prompts = await for_each(list(zip(texts, names, *where, strict=True)), prompt_of)
    session = body.session_of(len(prompts) * params.n)
    more = ID_BYTES * params.n * sum(len(prompt.ids) for prompt in prompts) if body.return_token_ids else 0
    return ApiRequest(rid, tuple(prompts), True, priority=body.priority or 0, session=session, more_bytes=more)


async def _encoded(host: ApiHost, body: CompletionRequest, text: str | list[int], params: SamplingParams) -> list[int]:
    if not body.suffix:
        most = _DEFAULT_MAX_TOKENS if params.max_new_tokens is None else params.max_new_tokens
        return await body.encoded(host, text, body.add_special_tokens is not False, most)
    for field in ("echo", "truncate_prompt_tokens"):
        if getattr(body, field):
            raise RequestError(f"suffix and {field} cannot be combined; leave {field} out", param=field)
    if not isinstance(text, str):
        raise RequestError("suffix needs a prompt that is a text; token ids were given", param="suffix")
    return await infill_prompt(host, text, body.suffix)


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
