"""Convert Anthropic's messages, blocks and tools to the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from dovetail.api.body import ApiModel, validate
from dovetail.chat.requests import tool_request
from dovetail.errors import RequestError
from dovetail.interfaces.parsers import Tool, ToolRequest
from dovetail_apis.anthropic.types import (
    Block,
    CountRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from dovetail_apis.chat_input import ChatInput, past_call, thinking

_TEXT: Mapping[str, type[Block]] = {"text": TextBlock}
_BLOCKS: Mapping[str, Mapping[str, type[Block]]] = {
    "system": _TEXT,
    "user": {**_TEXT, "tool_result": ToolResultBlock},
    "assistant": {**_TEXT, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}
_PARAGRAPH = "\n\n"
_MOST_BLOCKS = 16_384

Part = TypeVar("Part", bound=ApiModel)


def chat_input_of(body: CountRequest) -> ChatInput:
    """Return the chat input of a request body. Raises ``RequestError``."""
    _check_blocks(body)
    turns = _Turns()
    for block in _blocks(body.system or [], "system", _TEXT):
        turns.add("system", block, "system")
    for i, message in enumerate(body.messages):
        where = f"messages.{i}.content"
        for block in _blocks(message.content, where, _BLOCKS[message.role]):
            turns.add(message.role, block, where)
    tools = [_tool(f"tools.{i}", raw) for i, raw in enumerate(body.tools or ())]
    reasons = body.thinking is not None and body.thinking.type != "disabled"
    opening = turns.opening(body, reasons)
    variables = thinking(reasons, body.output_config and body.output_config.effort)
    return ChatInput(turns.plain, [_shown(tool) for tool in tools], _calls(tools, body), variables, opening)


def _check_blocks(body: CountRequest) -> None:
    """Limit the number of blocks, because each is validated separately, which delays other requests. Raises
    ``RequestError``."""
    contents = (body.system, *(message.content for message in body.messages))
    count = sum(len(content) for content in contents if isinstance(content, list))
    if count > _MOST_BLOCKS:
        raise RequestError(
            f"messages and system have {count} blocks; at most {_MOST_BLOCKS} are read", param="messages"
        )


class _Turns:
    """Assemble blocks into the messages that chat templates expect."""

    def __init__(self) -> None:
        self.plain: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def add(self, role: str, block: Block, where: str) -> None:
        """Add the next block."""
        match block:
            case TextBlock(text=text):
                turn = self._turn(role)
                between = _PARAGRAPH if turn["content"] and role != "assistant" else ""
                turn["content"] += between + text
            case ThinkingBlock(thinking=text):
                turn = self._turn(role)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
            case ToolUseBlock():
                self._names[block.id] = block.name
                self._turn(role).setdefault("tool_calls", []).append(past_call(block.name, block.input, block.id))
            case ToolResultBlock():
                self.plain.append(self._result(block, where))

    def opening(self, body: CountRequest, reasons: bool) -> str:
        """Remove a final assistant's turn, and return its text, which the answer continues. Raises ``RequestError`` if
        it cannot be continued."""
        if not self.plain or self.plain[-1]["role"] != "assistant":
            return ""
        turn = self.plain.pop()
        if turn.keys() > {"role", "content"}:
            raise RequestError(
                "the last message has the role assistant and contains tool_use or thinking; allowed there: text, which the "
                "answer continues. Send a user message with a tool_result after a tool_use",
                param="messages",
            )
        for used, name in ((reasons, "thinking"), (body.output_config and body.output_config.format, "output_config")):
            if turn["content"] and used:
                raise RequestError(
                    f"{name} applies from the beginning of an answer, but the last message has the role assistant, so the "
                    "answer would continue it; end with a user message",
                    param=name,
                )
        return turn["content"]

    def _turn(self, role: str) -> dict[str, Any]:
        """Return the last turn if it has the role ``role``, else a new one."""
        if not self.plain or self.plain[-1]["role"] != role:
            self.plain.append({"role": role, "content": ""})
        return self.plain[-1]

    def _result(self, block: ToolResultBlock, where: str) -> dict[str, Any]:
        name = self._names.get(block.tool_use_id)
        if name is None:
            raise RequestError(
                f"{where} has a tool_result for {block.tool_use_id!r:.80}, which is not the id of an earlier tool_use",
                param="messages",
            )
        inner = f"{where}.tool_result.content"
        texts = [part.text for part in _blocks(block.content or [], inner, _TEXT) if isinstance(part, TextBlock)]
        failed = {"is_error": True} if block.is_error else {}
        call = {"tool_call_id": block.tool_use_id, "name": name}
        return {"role": "tool", "content": _PARAGRAPH.join(texts), **call, **failed}


def _blocks(content: str | list[dict[str, Any]], where: str, allowed: Mapping[str, type[Block]]) -> Iterator[Block]:
    """Yield validated blocks. Raises a ``RequestError`` that names the position of an invalid block."""
    if isinstance(content, str):
        yield TextBlock(type="text", text=content)
        return
    for i, raw in enumerate(content):
        kind = raw.get("type")
        model = allowed.get(kind) if isinstance(kind, str) else None
        if model is None:
            raise RequestError(
                f"{where}.{i} is a block of type {kind!r:.80}, which this server does not support there; allowed: "
                f"{', '.join(allowed)}",
                param=where.partition(".")[0],
                code="unsupported_block",
            )
        yield _located(f"{where}.{i}", model, raw)


def _located(where: str, model: type[Part], raw: dict[str, Any]) -> Part:
    try:
        return validate(raw, model)
    except RequestError as error:
        raise RequestError(f"{where}: {error}", param=where.partition(".")[0], code=error.code) from None


def _tool(where: str, raw: dict[str, Any]) -> ToolParam:
    if raw.get("type") not in (None, "custom"):
        raise RequestError(
            f"{where} has type {raw['type']!r:.80}, a tool that Anthropic runs; allowed here: custom tools, which the client "
            "runs",
            param="tools",
            code="unsupported_tool",
        )
    return _located(where, ToolParam, raw)


def _shown(tool: ToolParam) -> dict[str, Any]:
    """Return the tool as chat templates expect it."""
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _calls(tools: list[ToolParam], body: CountRequest) -> ToolRequest | None:
    found = [Tool(tool.name, tool.input_schema, bool(tool.strict)) for tool in tools]
    choice = body.tool_choice or ToolChoice(type="auto")
    if (choice.name is not None) != (choice.type == "tool"):
        raise RequestError("tool_choice must have a name if its type is 'tool', and only then", param="tool_choice")
    kinds = {"any": "required", "none": "none", "auto": "auto"}
    return tool_request(found, kinds.get(choice.type), choice.name, not choice.disable_parallel_tool_use)
