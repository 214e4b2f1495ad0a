"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dovetail.errors import RequestError
from dovetail.interfaces.parsers import Tool, ToolRequest
from dovetail.server.body import parse
from dovetail.server.openai_format import call_json, chat_logprobs, finish_name, usage_json, whole_calls
from dovetail.server.openai_types import ChatMessage, ChatRequest, NamedTool
from dovetail.server.outputs import Choice, Delta, Outputs
from dovetail.server.parsing import ChatPlan, tool_request
from dovetail.server.requests import ParsedRequest, Prompt, new_id
from dovetail.server.responses import event, streamed, whole
from dovetail.server.service import Service


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer one chat request."""
    body = await parse(request, ChatRequest, service.max_body)
    service.check_model(body.model)
    parsed, plan = await _parsed(service, body)
    outputs = service.submit(parsed)
    formatter = ChatFormat(service, body, outputs, plan)
    if body.stream:
        return await streamed(request, outputs, formatter)
    return await whole(request, outputs, formatter.whole)


async def _parsed(service: Service, body: ChatRequest) -> tuple[ParsedRequest, ChatPlan]:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    params = body.params(
        _max_tokens(body), (body.top_logprobs or 0) if body.logprobs else None, None, {"logprobs": "top_logprobs"}
    )
    messages = [_plain(message, i) for i, message in enumerate(body.messages)]
    request = _tool_request(body)
    shown = [tool.model_dump(exclude_unset=True) for tool in (body.tools or ()) if request is not None]
    text = await service.render_chat(messages, shown, body.chat_template_kwargs or {})
    plan = service.parsers.plan(params, text, request, body.separate_reasoning is not False)
    ids = await service.encode(text, add_special_tokens=False)
    rid = body.rid or new_id("chatcmpl-")
    return ParsedRequest(rid, (Prompt(ids, plan.params),), False, body.cache_salt or "", body.priority or 0), plan


def _tool_request(body: ChatRequest) -> ToolRequest | None:
    tools = [
        Tool(tool.function.name, tool.function.parameters or {}, bool(tool.function.strict))
        for tool in body.tools or ()
    ]
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    choice = body.tool_choice if isinstance(body.tool_choice, str) else None
    return tool_request(tools, choice, named, body.parallel_tool_calls is not False)


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(f"max_tokens is {old} and max_completion_tokens {new}; give one", param="max_tokens")
    return new if new is not None else old


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message as chat templates expect it: text content in one string, tool arguments parsed, no empty fields."""
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, index),
    }
    plain |= {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], index)
    return plain


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    if isinstance(content, list):
        return "".join(_part(part, index) for part in content)
    return content or ""


def _part(part: dict[str, Any], index: int) -> str:
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        given = part.get("type")
        raise RequestError(
            f"messages.{index}.content has a part of type {given!r}; allowed: {{'type': 'text', 'text': '...'}}",
            param="messages",
        )
    return part["text"]


def _tool_calls(calls: Any, index: int) -> list[dict[str, Any]]:
    """Calls of an earlier turn. Some templates expect their arguments parsed, others as text."""
    try:
        return [{**call, "function": _parsed_arguments(call["function"])} for call in calls]
    except (TypeError, KeyError, msgspec.DecodeError, RecursionError) as error:
        raise RequestError(
            f"messages.{index}.tool_calls is not a list of {{'function': {{'name': ..., 'arguments': JSON}}}}: {error!r}",
            param="messages",
        ) from None


def _parsed_arguments(function: dict[str, Any]) -> dict[str, Any]:
    given = function["arguments"]
    if not isinstance(given, str):
        return {**function, "arguments": given}
    parsed = msgspec.json.decode(given)
    return {**function, "arguments": Arguments(parsed, given) if isinstance(parsed, dict) else parsed}


class Arguments(dict[str, Any]):
    """Arguments of a call that are a mapping to templates that look into them, and their text to those that print them or
    join them to other text."""

    def __init__(self, parsed: dict[str, Any], text: str) -> None:
        super().__init__(parsed)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class ChatFormat:
    """The answers to one chat request, whole or in chunks."""

    openai = True

    def __init__(self, service: Service, body: ChatRequest, outputs: Outputs, plan: ChatPlan) -> None:
        self._outputs = outputs
        self._plan = plan
        self._readers = [plan.reader() for _ in outputs.choices]
        self._tokenizer = service.tokenizer
        self._logprobs = bool(body.logprobs)
        self._include_usage = body.include_usage
        self._common = {"id": outputs.rid, "created": int(time.time()), "model": service.model_name}
        chunk = msgspec.json.encode({**self._common, "object": "chat.completion.chunk"})[:-1]
        self._before = b"data: " + chunk + b',"choices":[{"index":'
        self._after = b"}]" + (b',"usage":null' if body.include_usage else b"") + b"}\n\n"

    def whole(self, outputs: Outputs) -> object:
        """The answer at once."""
        choices = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": chat_logprobs(self._tokenizer, choice.visible_logprobs) if self._logprobs else None,
                "finish_reason": finish_name(choice.finish, self._readers[choice.index].calls),
            }
            for choice in outputs.choices
        ]
        return {**self._common, "object": "chat.completion", "choices": choices, "usage": usage_json(outputs.usage)}

    def _message(self, choice: Choice) -> dict[str, Any]:
        reader = self._readers[choice.index]
        parts = [reader.feed(choice.text), reader.finish()]
        reasoning = "".join(part.reasoning for part in parts)
        content = "".join(part.content for part in parts)
        calls = whole_calls([call for part in parts for call in part.calls])
        return {
            "role": "assistant",
            "content": content or None if calls else content,
            "refusal": None,
            **({"reasoning_content": reasoning} if reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }

    def head(self) -> bytes:
        """The roles. Where there may be calls, there need not be content."""
        content = b"null" if self._plan.tools else b'""'
        role = b'{"role":"assistant","content":%b,"refusal":null}' % content
        return b"".join(self._chunk(choice.index, role, b"null", b"null") for choice in self._outputs.choices)

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """The chunks of one step."""
        return b"".join(self._delta(delta) for delta in deltas)

    def tail(self) -> bytes:
        """Token counts, where asked for, and the end mark."""
        usage = b""
        if self._include_usage:
            last = {"object": "chat.completion.chunk", "choices": [], "usage": usage_json(self._outputs.usage)}
            usage = event(msgspec.json.encode({**self._common, **last}))
        return usage + event(b"[DONE]")

    def _delta(self, delta: Delta) -> bytes:
        index, logprobs = delta.choice.index, b"null"
        if self._logprobs and delta.logprobs:
            logprobs = msgspec.json.encode(chat_logprobs(self._tokenizer, delta.logprobs))
        fields = [{"content": delta.text}] if delta.text else []
        if not self._plan.plain:
            fields = list(self._fields(index, delta))
        if not fields and logprobs != b"null":
            fields = [{"content": ""}]
        data = b""
        for field in fields:  # the logprobs of all of a step's tokens are in its first chunk
            data += self._chunk(index, msgspec.json.encode(field), logprobs, b"null")
            logprobs = b"null"
        if delta.finish is not None:
            finish = finish_name(delta.finish, self._readers[index].calls)
            data += self._chunk(index, b"{}", b"null", msgspec.json.encode(finish))
        return data

    def _fields(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """What a step's text turned out to be, as the fields of chunks."""
        reader = self._readers[index]
        for part in [reader.feed(delta.text), *([reader.finish()] if delta.finish is not None else [])]:
            if part.reasoning:
                yield {"reasoning_content": part.reasoning}
            if part.content:
                yield {"content": part.content}
            if part.calls:
                yield {"tool_calls": [call_json(call) for call in part.calls]}

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, finish: bytes) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._before, index, delta, logprobs, finish, self._after
        )  # fmt: skip
