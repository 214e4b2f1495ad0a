"""Handle POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import parse
from dovetail.api.requests import new_id
from dovetail.api.responses import SSE, event, streamed, whole
from dovetail.chat.calls import call_json, whole_calls
from dovetail.chat.requests import plain_message, read_tool_choice, template_tools
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost, ApiProblem, ApiRequest, ChatDelta, ChatPlan, Choice, Delta, Generation
from dovetail_apis.chat_input import ChatInput, RequestMetadata, plan
from dovetail_apis.openai.format import chat_logprobs, error_json, finish_name, usage_json
from dovetail_apis.openai.types import ChatCompletionRequest


async def chat_completions(host: ApiHost, request: Request) -> Response:
    """Return the next message of a conversation."""
    body = await parse(request, ChatCompletionRequest, host.max_body)
    host.check_model(body.model)
    parsed, how = await _parsed(host, body)
    outputs = host.submit(parsed)
    formatter = ChatFormat(host, body, outputs, how)
    if body.stream:
        return await streamed(request, outputs, formatter)
    return await whole(request, outputs, formatter.whole)


async def _parsed(host: ApiHost, body: ChatCompletionRequest) -> tuple[ApiRequest, ChatPlan]:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    params = body.params(
        _max_tokens(body), (body.top_logprobs or 0) if body.logprobs else None, None, {"logprobs": "top_logprobs"}
    )
    messages = [plain_message(message.model_dump(), i) for i, message in enumerate(body.messages)]
    calls = read_tool_choice(body.tools or (), body.tool_choice, body.parallel_tool_calls is not False)
    chat_input = ChatInput(messages, template_tools(body.tools or ()), calls, body.chat_template_kwargs or {})
    metadata = RequestMetadata.of(body.rid or new_id("chatcmpl-"), body)
    return await plan(host, chat_input, params, metadata, separate_reasoning=body.separate_reasoning is not False)


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}; give one of them", param="max_tokens"
        )
    given = new if new is not None else old
    if given == 0:
        name = "max_tokens" if new is None else "max_completion_tokens"
        raise RequestError(f"{name} is 0; allowed: an integer of at least 1", param=name)
    return given


class ChatFormat:
    """Format the answers to one chat request, whole or in chunks."""

    media_type = SSE

    def __init__(self, host: ApiHost, body: ChatCompletionRequest, outputs: Generation, plan: ChatPlan) -> None:
        self._outputs = outputs
        self._plan = plan
        self._tokenizer = host.tokenizer
        self._logprobs = bool(body.logprobs)
        self._include_usage = body.include_usage
        self._common = {"id": outputs.rid, "created": int(time.time()), "model": host.model_name}
        chunk = msgspec.json.encode({**self._common, "object": "chat.completion.chunk"})[:-1]
        self._before = b"data: " + chunk + b',"choices":[{"index":'
        self._after = b"}]" + (b',"usage":null' if body.include_usage else b"") + b"}\n\n"

    def whole(self, outputs: Generation) -> object:
        """Return the complete answer."""
        choices = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": chat_logprobs(self._tokenizer, choice.visible_logprobs) if self._logprobs else None,
                "finish_reason": finish_name(choice.finish, choice.calls),
            }
            for choice in outputs.choices
        ]
        return {**self._common, "object": "chat.completion", "choices": choices, "usage": usage_json(outputs.usage)}

    def _message(self, choice: Choice) -> dict[str, Any]:
        reasoning = "".join(part.reasoning for part in choice.parts)
        content = "".join(part.content for part in choice.parts)
        calls = whole_calls([call for part in choice.parts for call in part.calls])
        return {
            "role": "assistant",
            "content": content or None if calls else content,
            "refusal": None,
            **({"reasoning_content": reasoning} if reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def head(self) -> bytes:
        """Return chunks with the role. ``content`` is null if there may be tool calls, since there may be no content
        then."""
        content = b"null" if self._plan.tools else b'""'
        role = b'{"role":"assistant","content":%b,"refusal":null}' % content
        return b"".join(self._chunk(choice.index, role, b"null", b"null") for choice in self._outputs.choices)

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return the chunks of one step."""
        return b"".join(self._delta(delta) for delta in deltas)

    def tail(self) -> bytes:
        """Return the token counts, if the client requests them, and the end marker."""
        usage = b""
        if self._include_usage:
            last = {"object": "chat.completion.chunk", "choices": [], "usage": usage_json(self._outputs.usage)}
            usage = event(msgspec.json.encode({**self._common, **last}))
        return usage + event(b"[DONE]")

    def failed(self, problem: ApiProblem) -> bytes:
        """Return the error as an event."""
        return event(msgspec.json.encode(error_json(problem)))

    def _delta(self, delta: Delta) -> bytes:
        index, logprobs = delta.choice.index, b"null"
        if self._logprobs and delta.logprobs:
            logprobs = msgspec.json.encode(chat_logprobs(self._tokenizer, delta.logprobs))
        fields = list(_fields(delta.parts))
        if not fields and logprobs != b"null":
            fields = [{"content": ""}]
        data = b""
        for field in fields:  # the first chunk of a step has the logprobs of all its tokens
            data += self._chunk(index, msgspec.json.encode(field), logprobs, b"null")
            logprobs = b"null"
        if delta.finish is not None:
            finish = finish_name(delta.finish, delta.choice.calls)
            data += self._chunk(index, b"{}", b"null", msgspec.json.encode(finish))
        return data

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, finish: bytes) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._before, index, delta, logprobs, finish, self._after
        )  # fmt: skip


def _fields(parts: Sequence[ChatDelta]) -> Iterator[dict[str, Any]]:
    """Yield the parsed text of a step as the fields of chunks."""
    for part in parts:
        if part.reasoning:
            yield {"reasoning_content": part.reasoning}
        if part.content:
            yield {"content": part.content}
        if part.calls:
            yield {"tool_calls": [call_json(call) for call in part.calls]}
