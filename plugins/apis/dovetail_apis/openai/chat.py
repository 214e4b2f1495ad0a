"""Handle POST /v1/chat/completions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import parse
from dovetail.api.offload import offloaded, request_scope
from dovetail.api.requests import ID_BYTES, api_names, check_logprobs, prompt_in
from dovetail.api.responses import streamed, whole
from dovetail.chat.requests import plain_message, read_tool_choice, template_tools
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost, ApiRequest, ChatPlan, Prompt
from dovetail_apis.adapters import adapters_of
from dovetail_apis.chat_input import ChatInput, turn_of
from dovetail_apis.openai.chat_format import ChatFormat
from dovetail_apis.openai.types import ChatCompletionRequest

_NAMES = {"logprobs": "top_logprobs"}


async def chat_completions(host: ApiHost, request: Request) -> Response:
    """Return the next message of a conversation."""
    body = await parse(request, ChatCompletionRequest, host.max_body)
    host.check_model(body.model)
    parsed = await _parsed(host, body)
    with api_names({"thinking_budget": body.budget_name}), _prompt_in(body):
        outputs = host.submit(parsed.request)
    formatter = ChatFormat(host, body, outputs, parsed.plan, parsed.text, _echoed(body))
    if body.stream:
        return await streamed(request, outputs, formatter)
    return await whole(request, outputs, formatter.whole)


class ParsedChat(NamedTuple):
    """Hold the request to the engine, the plan of how its output is read, and the text of its prompt."""

    request: ApiRequest
    plan: ChatPlan
    text: str


async def _parsed(host: ApiHost, body: ChatCompletionRequest) -> ParsedChat:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.params(_max_tokens(body), logprobs, None, _NAMES, host.sampling_defaults)
    check_logprobs(host, params, _NAMES)
    chat_input = await offloaded(request_scope().large, _chat_input, body)
    if body.input_ids is None:
        text = await chat_input.prompt(host)
    else:
        text = host.tokenizer.decode(body.input_ids, skip_special_tokens=False)
    with api_names({"thinking_budget": body.budget_name}):
        plan = host.plan_chat(params, text, chat_input.calls, body.separate_reasoning is not False)
    with _prompt_in(body):
        ids = await body.encoded(host, text if body.input_ids is None else body.input_ids, False, params.max_new_tokens)
    rid, _ = body.names(1, "chatcmpl-")
    (adapter,) = adapters_of(host, body.lora_path, "lora_path", 1)
    returned = body.return_token_ids or body.return_prompt_token_ids or body.return_input_ids_in_sglext
    copies = params.n + 1 if returned else 0
    more = ID_BYTES * copies * len(ids) + (len(text) if body.return_prompt_text else 0)
    request = ApiRequest(
        rid,
        (Prompt(ids, plan.params, adapter=adapter),),
        bool(chat_input.opening),
        body.namespace,
        body.priority or 0,
        plan.reader,
        session=body.session_of(params.n),
        more_bytes=more,
    )
    return ParsedChat(request, plan, str(text))


def _prompt_in(body: ChatCompletionRequest) -> AbstractContextManager[None]:
    return prompt_in("messages" if body.input_ids is None else "input_ids")


def _chat_input(body: ChatCompletionRequest) -> ChatInput:
    messages = [plain_message(message.model_dump(), i) for i, message in enumerate(body.messages)]
    calls = read_tool_choice(body.tools or (), body.tool_choice, body.parallel_tool_calls is not False)
    documents = {} if body.documents is None else {"documents": body.documents}
    variables = {**documents, **body.reasoning_variables(), **(body.chat_template_kwargs or {})}
    continued = bool(body.continue_final_message)
    messages, opening, opened = turn_of(messages, continued, body.add_generation_prompt)
    return ChatInput(messages, template_tools(body.tools or ()), calls, variables, opening, opened)


def _echoed(body: ChatCompletionRequest) -> str:
    """Return the text that precedes the answer."""
    if not body.echo or body.messages[-1].role != "assistant":
        return ""
    return plain_message(body.messages[-1].model_dump(), len(body.messages) - 1)["content"]


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}; give one of them", param="max_tokens"
        )
    given = new if new is not None else old
    if given is not None and given < 1:
        name = "max_tokens" if new is None else "max_completion_tokens"
        raise RequestError(f"{name} is {given}; allowed: an integer of at least 1", param=name)
    return given
