"""Answer the routes that parse a text which a model has written: its reasoning and its tool calls."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import ApiModel, examples, parse
from dovetail.api.offload import offloaded
from dovetail.api.responses import json_response
from dovetail.chat.parsing import OutputParsers
from dovetail.chat.requests import ToolSpec, read_tool_choice
from dovetail.errors import ContextLengthError, RequestError, UnknownComponentError
from dovetail.interfaces.api import ApiHost
from dovetail.interfaces.parsers import CallDelta, ReasoningParser, ToolParser, ToolRequest
from dovetail.registry.specs import ComponentKind
from dovetail.server.service import Service
from dovetail.server.tenants.host import TenantHost

_LARGE = 4096
"""The length of texts from which on they are parsed on a thread: parsers take some microseconds for each character."""


class ReasoningRequest(ApiModel):
    """Describe the body of POST /separate_reasoning."""

    model_config = examples({"text": "<think>2 + 3 is 5.</think>5"})

    text: str
    reasoning_parser: str | None = Field(None, description="Name of a parser; by default that of the served model.")


class FunctionCallRequest(ApiModel):
    """Describe the body of POST /parse_function_call."""

    _CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    model_config = examples(
        {
            "text": _CALL,
            "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
        }
    )

    text: str
    tools: list[ToolSpec] = Field(min_length=1, max_length=1024, description="The functions that the model may call.")
    tool_call_parser: str | None = Field(None, description="Name of a parser; by default that of the served model.")


async def separate_reasoning(host: ApiHost, request: Request) -> Response:
    """Separate the reasoning in a text from the answer."""
    body = await parse(request, ReasoningRequest, host.max_body)
    parser = _parser(host, ComponentKind.REASONING_PARSER, body.reasoning_parser)
    return json_response(await offloaded(len(body.text) >= _LARGE, _separated, host, parser, body.text))


async def parse_function_call(host: ApiHost, request: Request) -> Response:
    """Separate the tool calls in a text from the rest."""
    body = await parse(request, FunctionCallRequest, host.max_body)
    parser = _parser(host, ComponentKind.TOOL_PARSER, body.tool_call_parser)
    tools = read_tool_choice(body.tools, None, True)
    assert tools is not None, "there is at least one tool"
    return json_response(await offloaded(len(body.text) >= _LARGE, _called, host, parser, tools, body.text))


def _check_length(host: ApiHost, text: str) -> None:
    """Raise ``ContextLengthError`` for a text that no output of the model can be."""
    if host.tokenizer.surely_exceeds(text, host.context_len):
        raise ContextLengthError(
            f"text has {len(text)} characters, which are more than {host.context_len} tokens; no output of the model "
            "is longer than its context",
            param="text",
        )


def _separated(host: ApiHost, parser: ReasoningParser, text: str) -> dict[str, str]:
    _check_length(host, text)
    stream = parser.stream("")
    parts = [stream.feed(text), stream.finish()]
    reasoning, rest = ("".join(part[i] for part in parts) for i in range(2))
    return {"reasoning_text": reasoning, "text": rest}


def _called(host: ApiHost, parser: ToolParser, tools: ToolRequest, text: str) -> dict[str, Any]:
    _check_length(host, text)
    stream = parser.stream(tools.tools)
    parts = [stream.feed(text), stream.finish()]
    calls: dict[int, dict[str, Any]] = {}
    for delta in (delta for part in parts for delta in part.calls):
        _grow(calls, delta)
    return {"normal_text": "".join(part.content for part in parts), "calls": list(calls.values())}


def _grow(calls: dict[int, dict[str, Any]], delta: CallDelta) -> None:
    call = calls.setdefault(delta.index, {"tool_index": delta.index, "name": delta.name, "parameters": ""})
    call["parameters"] += delta.arguments


def _parser(host: ApiHost, kind: ComponentKind, name: str | None) -> Any:
    """Return the parser of this name, or that of the served model if ``name`` is None. Raises ``RequestError``."""
    assert isinstance(host, Service | TenantHost)
    parsers: OutputParsers = host.parsers
    if name is not None:
        try:
            return parsers.named(kind, name)
        except UnknownComponentError as error:
            raise RequestError(str(error), param=_FIELDS[kind], code="unknown_parser") from None
    served = parsers.tool if kind is ComponentKind.TOOL_PARSER else parsers.reasoning
    if served is None:
        raise RequestError(
            f"the served model has no {kind}; give {_FIELDS[kind]}, the name of one", param=_FIELDS[kind]
        )
    return served


_FIELDS = {ComponentKind.TOOL_PARSER: "tool_call_parser", ComponentKind.REASONING_PARSER: "reasoning_parser"}
