"""Handle POST /api/chat and /api/generate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import parse
from dovetail.api.offload import offloaded, request_scope
from dovetail.api.requests import grammar_of, new_id, sampling_params, stop_strings
from dovetail.api.responses import json_response, streamed, until_disconnect
from dovetail.chat.requests import plain_message, read_tool_choice, template_tools
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost, ApiRequest, Prompt
from dovetail.sampling_params import GrammarSpec, SamplingParams
from dovetail_apis.chat_input import (
    ChatInput,
    RequestMetadata,
    past_call,
    plan_within_context,
    thinking,
    within_context,
)
from dovetail_apis.ollama.format import AnswerFormat, OutputParts, RequestTimes, Shape, common
from dovetail_apis.ollama.model import check_model, check_options, refuse_unload
from dovetail_apis.ollama.types import GenerateRequest, OllamaChatRequest, OllamaMessage, TextRequestFields

_NAMES = {"max_new_tokens": "num_predict", "repetition_penalty": "repeat_penalty", "logprobs": "top_logprobs"}
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's


async def chat(host: ApiHost, request: Request) -> Response:
    """Return the assistant's next message."""
    times = RequestTimes()
    body = await parse(request, OllamaChatRequest, host.max_body)
    check_model(host, body.model)
    if not body.messages:
        return _loaded(body, OutputParts.as_chat)
    calls = read_tool_choice(body.tools or (), None, True)
    messages = await offloaded(request_scope().large, _messages, body.messages)
    chat_input = ChatInput(messages, template_tools(body.tools or ()), calls, _variables(body))
    api_request, _ = await plan_within_context(host, chat_input, _params(host, body), _metadata(body))
    return await _answered(host, request, body, api_request, times, OutputParts.as_chat)


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    return [_plain(message, i) for i, message in enumerate(messages)]


async def generate(host: ApiHost, request: Request) -> Response:
    """Return the answer to a prompt, or its continuation if `raw` is set."""
    times = RequestTimes()
    body = await parse(request, GenerateRequest, host.max_body)
    check_model(host, body.model)
    if not body.prompt:
        return _loaded(body, OutputParts.as_text)
    api_request = await (_continued(host, body, body.prompt) if body.raw else _replied(host, body, body.prompt))
    return await _answered(host, request, body, api_request, times, OutputParts.as_text)


async def _continued(host: ApiHost, body: GenerateRequest, prompt: str) -> ApiRequest:
    for name in ("system", "think"):
        if getattr(body, name):
            raise RequestError(f"{name} needs the chat template, which raw does not use; give one of them", param=name)
    metadata, params = _metadata(body), _params(host, body)
    ids = await host.encode(prompt, add_special_tokens=True)
    prompts = (Prompt(ids, within_context(host, ids, params)),)
    return ApiRequest(metadata.rid, prompts, True, metadata.namespace, metadata.priority, session=metadata.session)


async def _replied(host: ApiHost, body: GenerateRequest, prompt: str) -> ApiRequest:
    system = [{"role": "system", "content": body.system}] if body.system else []
    chat_input = ChatInput([*system, {"role": "user", "content": prompt}], variables=_variables(body))
    api_request, _ = await plan_within_context(host, chat_input, _params(host, body), _metadata(body))
    return api_request


async def _answered(
    host: ApiHost, request: Request, body: TextRequestFields, api_request: ApiRequest, times: RequestTimes, shape: Shape
) -> Response:
    times.submitted = time.perf_counter_ns()
    outputs = host.submit(api_request)
    formatter = AnswerFormat(body.model, host.tokenizer, outputs, times, shape, raw=api_request.reader is None)
    if body.stream is not False:
        return await streamed(request, outputs, formatter)
    with outputs:
        await until_disconnect(request.receive, formatter.run())
        return json_response(formatter.whole(outputs))


def _loaded(body: TextRequestFields, shape: Shape) -> Response:
    """Return the answer to a request that only loads the model, which is always loaded."""
    refuse_unload(body.keep_alive)
    return json_response({**common(body.model), **shape(OutputParts()), "done": True, "done_reason": "load"})


def _metadata(body: TextRequestFields) -> RequestMetadata:
    return RequestMetadata.of(new_id("ollama-"), body)


def _variables(body: TextRequestFields) -> dict[str, Any]:
    """Return the variables of the chat template."""
    if body.think is None:
        return {}
    return thinking(bool(body.think), body.think if isinstance(body.think, str) else None)


def _plain(message: OllamaMessage, index: int) -> dict[str, Any]:
    """Return the message as chat templates expect it. Raises ``RequestError``."""
    if message.images:
        raise RequestError(
            f"messages.{index}.images is not supported by this server: it supports only text",
            param="messages",
            code="unsupported_parameter",
        )
    calls = [_past(call, f"messages.{index}.tool_calls.{i}") for i, call in enumerate(message.tool_calls or ())]
    given = {
        "role": message.role,
        "content": message.content or "",
        "reasoning_content": message.thinking or None,
        "name": message.tool_name or message.name or None,
        "tool_call_id": message.tool_call_id or None,
        "tool_calls": calls or None,
    }
    return plain_message(given, index)


def _past(call: dict[str, Any], where: str) -> dict[str, Any]:
    function, call_id = call.get("function"), call.get("id")
    if not (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
        and isinstance(call_id, str | None)
    ):
        raise RequestError(
            f"{where} is {call!r:.80}; allowed: {{'function': {{'name': ..., 'arguments': {{...}}}}}}", param="messages"
        )
    return past_call(function["name"], function["arguments"], call_id)


def _params(host: ApiHost, body: TextRequestFields) -> SamplingParams:
    given = check_options(host, body.options)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    same = "temperature top_k top_p min_p presence_penalty frequency_penalty"
    values: dict[str, Any] = {name: getattr(given, name) for name in same.split()}
    values |= {
        "max_new_tokens": given.num_predict if (given.num_predict or 0) > 0 else None,
        "repetition_penalty": given.repeat_penalty,
        "seed": None if given.seed == -1 else given.seed,
        "stop": stop_strings(given.stop),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "grammar": _grammar(body.format),
    }
    return sampling_params(values, _NAMES, {**_DEFAULTS, **host.sampling_defaults})


def _grammar(given: str | dict[str, Any] | None) -> GrammarSpec | None:
    if given == "json":
        return grammar_of({"response_format": {"type": "json_object"}})
    return grammar_of({"json_schema": given}) if isinstance(given, dict) else None
