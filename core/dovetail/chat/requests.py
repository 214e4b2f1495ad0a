"""Read the tools and messages of a chat request, and write them as chat templates expect them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.bounded import Bounded
from dovetail.errors import RequestError
from dovetail.interfaces.parsers import Tool, ToolRequest
from dovetail.templates.chat_template import Arguments

_CALL = "{'function': {'name': 'f', 'arguments': '{}'}}"


class FunctionSpec(Bounded):
    """Describe a function that the model may call. Further fields are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Bounded):
    """Describe one of ``tools``."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Bounded):
    """Name the function that ``tool_choice`` requires."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str


class NamedTool(Bounded):
    """Require a call of one function, as a value of ``tool_choice``."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
"""List the values of ``tool_choice``. None, which is allowed too, stands for ``auto``."""


def read_tool_choice(tools: Sequence[ToolSpec], choice: ToolChoice | None, parallel: bool) -> ToolRequest | None:
    """Return the calls that ``tools`` and ``tool_choice`` allow or require; None if they exclude calls. Raises
    ``RequestError``."""
    found = [Tool(t.function.name, t.function.parameters or {}, bool(t.function.strict)) for t in tools]
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return tool_request(found, choice if isinstance(choice, str) else None, named, parallel)


class _ToolFields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    tools: list[ToolSpec] = []
    tool_choice: ToolChoice | None = None


def read_tools(tools: Sequence[Mapping[str, Any]] | None, choice: object) -> tuple[list[ToolSpec], ToolChoice | None]:
    """Validate ``tools`` and ``tool_choice`` in the form of OpenAI's API, and return them. Raises ``RequestError``."""
    try:
        given = list(tools) if isinstance(tools, tuple) else tools or []
        fields = _ToolFields.model_validate({"tools": given, "tool_choice": choice})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(f"{where} is {first['input']!r:.80}: {first['msg']}", param=str(first["loc"][0])) from None
    return fields.tools, fields.tool_choice


def template_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the tools in the form that chat templates expect."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def tool_request(tools: Sequence[Tool], choice: str | None, named: str | None, parallel: bool) -> ToolRequest | None:
    """Return the calls that the client allows or requires; None if it excludes calls. ``choice`` is ``tool_choice`` if
    that is a word, ``named`` is the function that ``tool_choice`` names. Raises ``RequestError``."""
    if not tools and (named or choice == "required"):
        raise RequestError(f"tool_choice is {named or choice!r}, but there are no tools", param="tool_choice")
    if not tools or choice == "none":
        return None
    names = [tool.name for tool in tools]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise RequestError(f"tools has the function {doubled!r} twice", param="tools")
    for tool in tools:
        _check_parameters(tool)
    if named is not None and named not in names:
        raise RequestError(
            f"tool_choice names {named!r}, which is none of the tools: {', '.join(names)}", param="tool_choice"
        )
    selected = tuple(tool for tool in tools if named in (None, tool.name))
    return ToolRequest(selected, named is not None or choice == "required", parallel and named is None)


def _check_parameters(tool: Tool) -> None:
    """Raise ``RequestError`` if the parameters are not an object, because parsers read only calls whose arguments have
    names."""
    given = tool.parameters.get("type", "object")
    if given != "object":
        raise RequestError(
            f"the parameters of function {tool.name!r} have type {given!r:.80}; allowed: 'object'", param="tools"
        )


def plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a message in the form that chat templates expect: text content in one string, tool arguments parsed, no
    empty fields. ``index`` is its index among the messages. Raises ``RequestError``, also for a message without content
    unless its role is assistant or tool; the content of these is then an empty text."""
    role = message.get("role")
    if role not in ("assistant", "tool") and message.get("content") is None:
        raise RequestError(f"messages.{index}.content is missing", param="messages", code="missing_field")
    plain: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content"), index),
    }
    plain |= {name: value for name, value in message.items() if value is not None and name not in plain}
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], index)
    return plain


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    if isinstance(content, list):
        return "".join(_part(part, index) for part in content)
    return content or ""


def _part(part: object, index: int) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        given = f"of type {part.get('type')!r:.80}" if isinstance(part, Mapping) else repr(part)[:80]
        raise RequestError(
            f"messages.{index}.content has a part {given}; allowed: {{'type': 'text', 'text': '...'}}",
            param="messages",
        )
    return part["text"]


def _tool_calls(calls: Any, index: int) -> list[dict[str, Any]]:
    """Return the calls of an earlier turn. Their arguments can be used as an object and as a text, because some
    templates expect an object and some a text; they are ``{}`` if they are missing, null or an empty text. Raises
    ``RequestError``."""
    if not isinstance(calls, list | tuple):
        raise _wrong_call(f"messages.{index}.tool_calls", calls, f"[{_CALL}]")
    return [_plain_call(call, f"messages.{index}.tool_calls.{i}") for i, call in enumerate(calls)]


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise _wrong_call(where, call, _CALL)
    given = function.get("arguments")
    if given is None or given == "":  # how many clients write that there are none
        given = "{}"
    if isinstance(given, str):
        try:
            parsed = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"{where}.function.arguments is not JSON: {error}", param="messages") from None
        given = Arguments(parsed, given) if isinstance(parsed, dict) else parsed
    return {**call, "function": {**function, "arguments": given}}


def _wrong_call(where: str, given: object, allowed: str) -> RequestError:
    return RequestError(f"{where} is {given!r:.80}; allowed: {allowed}", param="messages")
