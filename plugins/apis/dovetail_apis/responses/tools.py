"""Convert tools and ``tool_choice`` to the form of ``dovetail.chat``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from dovetail.api.body import validate
from dovetail.chat.requests import FunctionName, NamedTool, ToolSpec, read_tool_choice
from dovetail.errors import RequestError
from dovetail.interfaces.parsers import ToolRequest
from dovetail_apis.responses.types import AllowedTools, FunctionChoice, FunctionTool, ToolChoice


def read_tools(given: Sequence[Mapping[str, Any]]) -> list[ToolSpec]:
    """Return ``tools``, all of which must be functions, as chat templates expect them. Raises ``RequestError`` for
    hosted tools."""
    return [_tool(tool, i) for i, tool in enumerate(given)]


def _tool(given: Mapping[str, Any], index: int) -> ToolSpec:
    if given.get("type") != "function":
        raise RequestError(
            f"tools.{index} is of type {given.get('type')!r:.80}, which this server does not host; allowed: 'function', which the "
            "client runs",
            param="tools",
            code="unsupported_parameter",
        )
    try:
        tool = validate({name: value for name, value in given.items() if value is not None}, FunctionTool)
        function = tool.model_dump(exclude={"type"}, exclude_none=True)
        return ToolSpec.model_validate({"type": "function", "function": function})
    except RequestError as error:
        raise RequestError(f"tools.{index}: {error}", param="tools", code=error.code) from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise RequestError(f"tools.{index}.name is {problem['input']!r:.80}: {problem['msg']}", param="tools") from None


def requested_calls(tools: Sequence[ToolSpec], choice: ToolChoice | None, parallel: bool) -> ToolRequest | None:
    """Return the tool calls that are allowed or required, or None if there must be none. Raises ``RequestError``."""
    match choice:
        case FunctionChoice(name=name):
            named = NamedTool(type="function", function=FunctionName(name=name))
            return read_tool_choice(tools, named, parallel)
        case AllowedTools():
            return read_tool_choice(_allowed(tools, choice), choice.mode, parallel)
    return read_tool_choice(tools, choice, parallel)


def _allowed(tools: Sequence[ToolSpec], choice: AllowedTools) -> list[ToolSpec]:
    names = {tool.name for tool in choice.tools}
    known = {tool.function.name for tool in tools}
    if names - known:
        raise RequestError(
            f"tool_choice allows {sorted(names - known)[0]!r:.80}, which is not one of the tools: {', '.join(sorted(known))}",
            param="tool_choice",
        )
    return [tool for tool in tools if tool.function.name in names]
