"""From Anthropic's messages, blocks and tools to a conversation as chat templates expect it."""

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
from dovetail_apis.conversation import Conversation, past_call, thinking

_TEXT: Mapping[str, type[Block]] = {"text": TextBlock}
_BLOCKS: Mapping[str, Mapping[str, type[Block]]] = {
    "system": _TEXT,
    "user": {**_TEXT, "tool_result": ToolResultBlock},
    "assistant": {**_TEXT, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}
_PARAGRAPH = "\n\n"
_MOST_BLOCKS = 16_384

Part = TypeVar("Part", bound=ApiModel)


def conversation_of(body: CountRequest) -> Conversation:
    """Raises ``RequestError``."""
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
    return Conversation(turns.plain, [_shown(tool) for tool in tools], _calls(tools, body), variables, opening)


def _check_blocks(body: CountRequest) -> None:
    """Each is validated by itself, which holds up other requests."""
    contents = (body.system, *(message.content for message in body.messages))
    count = sum(len(content) for content in contents if isinstance(content, list))
    if count > _MOST_BLOCKS:
        raise RequestError(
            f"messages and system have {count} blocks; at most {_MOST_BLOCKS} are read", param="messages"
        )


class _Turns:
    """The messages as chat templates expect them, as they come together out of blocks."""

    def __init__(self) -> None:
        self.plain: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def add(self, role: str, block: Block, where: str) -> None:
        """The next block."""
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
        """The text of an assistant's turn at the end, which the answer continues; takes that turn out."""
        if not self.plain or self.plain[-1]["role"] != "assistant":
            return ""
        turn = self.plain.pop()
        if turn.keys() > {"role", "content"}:
            raise RequestError(
                "the last message is the assistant's and has tool_use or thinking; allowed there: text, which the answer "
                "continues. A tool_use is followed by a user message with its tool_result",
                param="messages",
            )
        for held, name in ((reasons, "thinking"), (body.output_config and body.output_config.format, "output_config")):
            if turn["content"] and held:
                raise RequestError(
                    f"{name} needs an answer from its beginning, and the last message is the assistant's, which the answer "
                    "would continue; end with a user message",
                    param=name,
                )
        return turn["content"]

    def _turn(self, role: str) -> dict[str, Any]:
        """The last turn, where it is that of ``role``, else a new one."""
        if not self.plain or self.plain[-1]["role"] != role:
            self.plain.append({"role": role, "content": ""})
        return self.plain[-1]

    def _result(self, block: ToolResultBlock, where: str) -> dict[str, Any]:
        name = self._names.get(block.tool_use_id)
        if name is None:
            raise RequestError(
                f"{where} has a tool_result for {block.tool_use_id!r:.80}, which is the id of no tool_use before it",
                param="messages",
            )
        inner = f"{where}.tool_result.content"
        texts = [part.text for part in _blocks(block.content or [], inner, _TEXT) if isinstance(part, TextBlock)]
        failed = {"is_error": True} if block.is_error else {}
        call = {"tool_call_id": block.tool_use_id, "name": name}
        return {"role": "tool", "content": _PARAGRAPH.join(texts), **call, **failed}


def _blocks(content: str | list[dict[str, Any]], where: str, allowed: Mapping[str, type[Block]]) -> Iterator[Block]:
    """Validated. Raises ``RequestError`` that says where."""
    if isinstance(content, str):
        yield TextBlock(type="text", text=content)
        return
    for i, raw in enumerate(content):
        kind = raw.get("type")
        model = allowed.get(kind) if isinstance(kind, str) else None
        if model is None:
            raise RequestError(
                f"{where}.{i} is a block of type {kind!r:.80}, which this server does not read there; allowed: "
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
    """As chat templates expect it."""
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _calls(tools: list[ToolParam], body: CountRequest) -> ToolRequest | None:
    found = [Tool(tool.name, tool.input_schema, bool(tool.strict)) for tool in tools]
    choice = body.tool_choice or ToolChoice(type="auto")
    if (choice.name is not None) != (choice.type == "tool"):
        raise RequestError("tool_choice has a name where its type is 'tool', and only there", param="tool_choice")
    kinds = {"any": "required", "none": "none", "auto": "auto"}
    return tool_request(found, kinds.get(choice.type), choice.name, not choice.disable_parallel_tool_use)
