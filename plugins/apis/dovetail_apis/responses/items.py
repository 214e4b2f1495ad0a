"""Read the input items of a response, convert them to their stored form, and to the messages of a chat for the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field

from dovetail.api.body import ApiModel, validate
from dovetail.api.requests import new_id
from dovetail.errors import RequestError

ItemDict = dict[str, Any]
"""Type of one item in the form in which it is stored and listed: with an id, and with its content as parts."""

_NOTES = frozenset(["status", "phase", "caller", "namespace", "async", "created_by", "parsed_arguments"])
_CONTENT = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class _Item(ApiModel):
    ignored: ClassVar[frozenset[str]] = _NOTES

    id: str | None = Field(None, max_length=256)


class _Message(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class _Call(_Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class _CallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: str | list[dict[str, Any]]
    name: str | None = None


class _Reasoning(_Item):
    type: Literal["reasoning"]
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


_KINDS: Mapping[str, type[_Item]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _CallOutput,
    "reasoning": _Reasoning,
}


def read_items(given: str | Sequence[Mapping[str, Any]]) -> list[ItemDict]:
    """Return the items of ``input`` in their stored form. Raises a ``RequestError`` that names the invalid item."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    return [_read(item, f"input.{i}") for i, item in enumerate(given)]


def _read(raw: Mapping[str, Any], where: str) -> ItemDict:
    kind = raw.get("type") or "message"
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise RequestError(
            f"{where} is of type {kind!r:.80}; allowed: {', '.join(_KINDS)}",
            param="input",
            code="unsupported_parameter",
        )
    try:
        item = validate({name: value for name, value in raw.items() if value is not None}, model)
    except RequestError as error:
        raise RequestError(f"{where}: {error}", param="input", code=error.code) from None
    match item:
        case _Message():
            return _message(item, where)
        case _Call():
            return _call(item, where)
        case _CallOutput():
            return _call_output(item, where)
    assert isinstance(item, _Reasoning)
    return _reasoning(item, where)


def _message(item: _Message, where: str) -> ItemDict:
    mine = item.role == "assistant"
    parts = [{"type": "text", "text": item.content}] if isinstance(item.content, str) else item.content
    content = [_part(part, mine, f"{where}.content.{i}") for i, part in enumerate(parts)]
    head = {"id": item.id or new_id("msg_"), "type": "message", "role": item.role}
    return {**head, "content": content, "status": "completed"}


def _part(part: object, mine: bool, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = _CONTENT.get(kind) if isinstance(kind, str) else None
    text = part.get(field) if isinstance(part, Mapping) and field else None
    if not isinstance(text, str):
        given = f"of type {kind!r:.80}" if isinstance(part, Mapping) else repr(part)[:80]
        allowed = "output_text" if mine else "input_text"
        raise RequestError(
            f"{where} is {given}; allowed: {{'type': '{allowed}', 'text': '...'}}; images, audio and files are not "
            "supported by this server",
            param="input",
        )
    if not mine:
        return {"type": "input_text", "text": text}
    return {"type": "refusal", "refusal": text} if kind == "refusal" else output_text(text)


def output_text(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a text part of the assistant's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _call(item: _Call, where: str) -> ItemDict:
    try:
        msgspec.json.decode(item.arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{where}.arguments is not valid JSON: {error}", param="input") from None
    head = {"id": item.id or new_id("fc_"), "type": "function_call", "call_id": item.call_id}
    return {**head, "name": item.name, "arguments": item.arguments, "status": "completed"}


def is_whole(item: ItemDict) -> bool:
    """Return false for a call whose arguments are not valid JSON."""
    try:
        return item["type"] != "function_call" or msgspec.json.decode(item["arguments"]) is not None
    except (msgspec.DecodeError, RecursionError):
        return False


def _call_output(item: _CallOutput, where: str) -> ItemDict:
    output: Any = item.output
    if not isinstance(output, str):
        output = [_part(part, False, f"{where}.output.{i}") for i, part in enumerate(output)]
    head = {"id": item.id or new_id("fco_"), "type": "function_call_output", "call_id": item.call_id}
    return {**head, "output": output, "status": "completed"}


def _reasoning(item: _Reasoning, where: str) -> ItemDict:
    if item.encrypted_content and not item.content:
        raise RequestError(
            f"{where}.encrypted_content was not created by this server and cannot be read; give content, or leave the item out",
            param="input",
        )
    texts = [_reasoning_text(part, f"{where}.content.{i}") for i, part in enumerate(item.content or ())]
    summary = [{"type": "summary_text", "text": str(part.get("text", ""))} for part in item.summary or ()]
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"id": item.id or new_id("rs_"), "type": "reasoning", "summary": summary, "content": content}


def _reasoning_text(part: Mapping[str, Any], where: str) -> str:
    if part.get("type") != "reasoning_text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f"{where} is {part!r:.80}; allowed: {{'type': 'reasoning_text', 'text': '...'}}", param="input"
        )
    return part["text"]


def chat_messages(instructions: str | None, items: Iterable[ItemDict]) -> list[dict[str, Any]]:
    """Return the conversation as the messages of a chat. Consecutive reasoning, content and calls of the assistant
    become one message. Raises ``RequestError`` for the result of a call that is not in the conversation."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    for item in items:
        match item["type"]:
            case "message" if item["role"] != "assistant":
                messages.append({"role": item["role"], "content": _joined(item["content"])})
            case "function_call_output":
                messages.append(_result(item, names))
            case "message":
                _turn(messages, ("content", "tool_calls"))["content"] = _joined(item["content"])
            case "reasoning":
                _turn(messages, ("role",))["reasoning_content"] = _joined(item["content"] or item["summary"])
            case _:
                names[item["call_id"]] = item["name"]
                _turn(messages, ()).setdefault("tool_calls", []).append(_tool_call(item))
    return messages


def _turn(messages: list[dict[str, Any]], ended_by: Sequence[str]) -> dict[str, Any]:
    """Return the last message if it is the assistant's and has none of the fields ``ended_by``, else append a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(field in last for field in ended_by):
        messages.append({"role": "assistant"})
    return messages[-1]


def _joined(parts: str | Iterable[Mapping[str, Any]]) -> str:
    return parts if isinstance(parts, str) else "".join(part.get("text") or part.get("refusal", "") for part in parts)


def _tool_call(item: ItemDict) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _result(item: ItemDict, names: Mapping[str, str]) -> dict[str, Any]:
    call = item["call_id"]
    if call not in names:
        raise RequestError(
            f"there is no function_call with call_id {call!r:.80} before its function_call_output", param="input"
        )
    return {"role": "tool", "tool_call_id": call, "name": names[call], "content": _joined(item["output"])}
