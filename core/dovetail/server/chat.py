"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dovetail.errors import RequestError
from dovetail.server.body import parse
from dovetail.server.openai_format import chat_logprobs, finish_name, usage_json
from dovetail.server.openai_types import ChatMessage, ChatRequest
from dovetail.server.outputs import Delta, Outputs
from dovetail.server.requests import ParsedRequest, Prompt, new_id
from dovetail.server.responses import event, streamed, whole
from dovetail.server.service import Service


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer one chat request."""
    body = await parse(request, ChatRequest, service.max_body)
    service.check_model(body.model)
    outputs = service.submit(await _parsed(service, body))
    formatter = ChatFormat(service, body, outputs)
    if body.stream:
        return await streamed(request, outputs, formatter)
    return await whole(request, outputs, formatter.whole)


async def _parsed(service: Service, body: ChatRequest) -> ParsedRequest:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    params = body.params(
        _max_tokens(body), (body.top_logprobs or 0) if body.logprobs else None, None, {"logprobs": "top_logprobs"}
    )
    messages = [_plain(message, i) for i, message in enumerate(body.messages)]
    ids = await service.encode_chat(messages, body.chat_template_kwargs or {})
    rid = body.rid or new_id("chatcmpl-")
    return ParsedRequest(rid, (Prompt(ids, params),), False, body.cache_salt or "", body.priority or 0)


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
    """Calls of an earlier turn; templates expect their arguments parsed."""
    try:
        return [{**call, "function": _parsed_arguments(call["function"])} for call in calls]
    except (TypeError, KeyError, msgspec.DecodeError, RecursionError) as error:
        raise RequestError(
            f"messages.{index}.tool_calls is not a list of {{'function': {{'name': ..., 'arguments': JSON}}}}: {error!r}",
            param="messages",
        ) from None


def _parsed_arguments(function: dict[str, Any]) -> dict[str, Any]:
    given = function["arguments"]
    return {**function, "arguments": msgspec.json.decode(given) if isinstance(given, str) else given}


class ChatFormat:
    """The answers to one chat request, whole or in chunks."""

    openai = True

    def __init__(self, service: Service, body: ChatRequest, outputs: Outputs) -> None:
        self._outputs = outputs
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
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(self._tokenizer, choice.visible_logprobs) if self._logprobs else None,
                "finish_reason": finish_name(choice.finish),
            }
            for choice in outputs.choices
        ]
        return {**self._common, "object": "chat.completion", "choices": choices, "usage": usage_json(outputs.usage)}

    def head(self) -> bytes:
        """The roles."""
        role = b'{"role":"assistant","content":"","refusal":null}'
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
        index, data = delta.choice.index, b""
        if delta.text or (self._logprobs and delta.logprobs):
            logprobs = chat_logprobs(self._tokenizer, delta.logprobs) if self._logprobs else None
            content = b'{"content":' + msgspec.json.encode(delta.text) + b"}"
            data = self._chunk(index, content, msgspec.json.encode(logprobs), b"null")
        if delta.finish is not None:
            data += self._chunk(index, b"{}", b"null", msgspec.json.encode(finish_name(delta.finish)))
        return data

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, finish: bytes) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._before, index, delta, logprobs, finish, self._after
        )  # fmt: skip
