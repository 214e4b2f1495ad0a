"""Write constraints for calls that are JSON, and check that a grammar backend supports them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import GrammarError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import Tool, ToolRequest
from dovetail.sampling_params import GrammarKind, GrammarSpec

STRICT_AUTO = "strict functions with tool_choice 'auto'"
SEVERAL = "the choice between functions"
LOOSEN = "drop strict, or set tool_choice to 'required'"
NAME_ONE = "name one function in tool_choice, or start the server with such a backend"


def dumps(value: object) -> str:
    """Return ``value`` as JSON in which characters beyond ASCII are not escaped, as constraints need it."""
    return json.dumps(value, ensure_ascii=False)


def call_schema(tools: Sequence[Tool], arguments: str = "arguments") -> dict[str, Any]:
    """Return the schema of one call of any of ``tools``: an object with the key ``name`` and the key that ``arguments``
    names. References inside the parameters are adjusted to their new position."""
    calls = [_call(tool, index, arguments) for index, tool in enumerate(tools)]
    schemas = {str(index): _moved(object_schema(tool), f"#/$defs/{index}") for index, tool in enumerate(tools)}
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": schemas}


def _call(tool: Tool, index: int, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, arguments: {"$ref": f"#/$defs/{index}"}},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(value: Any, root: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _pointer(part, root) if key == "$ref" else _moved(part, root) for key, part in value.items()}
    return [_moved(part, root) for part in value] if isinstance(value, list) else value


def _pointer(ref: object, root: str) -> object:
    return root + ref[1:] if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")) else ref


def json_spec(schema: Mapping[str, Any]) -> GrammarSpec:
    """Return the constraint to one JSON text of ``schema``."""
    return GrammarSpec(GrammarKind.JSON_SCHEMA, dumps(schema))


def tag_spec(structures: Sequence[Mapping[str, Any]], trigger: str) -> GrammarSpec:
    """Return the constraint to free text in which every part that begins with ``trigger`` must be one of
    ``structures``."""
    return GrammarSpec(GrammarKind.STRUCTURAL_TAG, dumps({"structures": list(structures), "triggers": [trigger]}))


def object_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, which are an object."""
    return {"type": "object", **tool.parameters}


def must_enforce(request: ToolRequest) -> bool:
    """Return True if a call or the schema of a strict function must be enforced."""
    return request.required or any(tool.strict for tool in request.tools)


def enforced_tools(request: ToolRequest) -> list[Tool]:
    """Return the tools with the schemas that must be enforced. If no call is required, functions that are not strict
    get a schema that allows any arguments."""
    keep = request.required
    return [tool if keep or tool.strict else Tool(tool.name, {"type": "object"}) for tool in request.tools]


def require_feature(parser: str, offers: frozenset[Feature], feature: Feature, what: str, instead: str) -> None:
    """Raise ``GrammarError`` unless a backend offers ``feature``, without which ``what`` cannot be enforced.
    ``instead`` describes what the client can do."""
    if feature not in offers:
        raise GrammarError(
            f"{what} in the tool format {parser!r} cannot be enforced without a grammar backend that offers "
            f"{feature}, and this server has none; {instead}",
            param="tools",
            keyword=feature.removeprefix("grammar."),
        )


def lark_spec(lines: Sequence[str]) -> GrammarSpec:
    """Return the constraint to a Lark grammar with these lines."""
    return GrammarSpec(GrammarKind.LARK, "\n".join([*lines, ""]))
