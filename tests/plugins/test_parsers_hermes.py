"""Test the tool parser hermes: the suite, and its own behaviour.

Run: python -m pytest -q tests/plugins/test_parsers_hermes.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from dovetail.errors import GrammarError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import ParserContext, Tool, ToolRequest
from dovetail.testing.parsers import TOOLS, ExpectedCall, ParsedOutput, ToolParserSuite, run_stream
from dovetail_parsers.config import HermesConfig
from dovetail_parsers.hermes import Hermes

TAGS = frozenset({Feature.GRAMMAR_STRUCTURAL_TAG})
STRICT = tuple(Tool(tool.name, tool.parameters, strict=True) for tool in TOOLS)


def hermes() -> Hermes:
    return Hermes(HermesConfig(), ParserContext())


def parse(text: str) -> ParsedOutput:
    return run_stream(hermes().stream(TOOLS), [text])


class TestHermes(ToolParserSuite):
    name = "hermes"

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        made = (json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False) for c in calls)
        return "\n".join([content, *(f"<tool_call>\n{call}\n</tool_call>" for call in made)])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "parameters": {"a": 1}}',
        '<tool_call> {"name" : "add" , "arguments": {"a": 1} } </tool_call>\n',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}',
    ],
)
def test_forms_of_one_call(text: str):
    assert parse(text) == ParsedOutput("", (("add", '{"a": 1}'),))


def test_a_call_without_arguments():
    assert parse('<tool_call>{"name": "get"}</tool_call>').calls == (("get", "{}"),)


def test_content_before_between_and_behind():
    parsed = parse('A <b> \n<tool_call>{"name": "get", "arguments": {}}</tool_call>\nB\n<tool_call>{"name": "add"}x')
    assert parsed == ParsedOutput("A <b>\nBx", (("get", "{}"), ("add", "{}")))


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1x}}</tool_call>', "x}}</tool_call>", '{"a": 1'),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}]</tool_call>', "]</tool_call>", '{"a": 1}'),
        ('<tool_call>{"name": "add", "arguments": {"a": "b', "", '{"a": "b'),
    ],
)
def test_a_call_that_breaks_off(text: str, content: str, arguments: str):
    assert parse(text) == ParsedOutput(content, (("add", arguments),))


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "name": "get"}</tool_call>',
        '<tool_call>{"name": "add", "argumentz": {}}</tool_call>',
        "<tool_call></tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call" * 3 + "\n \n",
    ],
)
def test_what_is_no_call_is_content(text: str):
    assert parse(text) == ParsedOutput(text, ())


def test_a_broken_call_does_not_hide_the_next():
    parsed = parse('<tool_call>{"na<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    assert parsed == ParsedOutput('<tool_call>{"na', (("add", "{}"),))


# constraints


def test_required_as_one_json_call_where_there_are_no_tags():
    made = hermes().constraint(ToolRequest(TOOLS[:2], required=True), frozenset())
    assert made is not None
    schema = json.loads(made.grammar.text)
    assert made.gate.prefix == "<tool_call>\n"
    assert [option["properties"]["name"]["const"] for option in schema["anyOf"]] == ["get_weather", "add"]


def test_references_move_with_their_schema():
    parameters = {"$defs": {"a": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#"}}}
    made = hermes().constraint(ToolRequest((Tool("f", parameters),), required=True), frozenset())
    assert made is not None
    schema = json.loads(made.grammar.text)
    assert schema["$defs"]["0"]["properties"] == {"x": {"$ref": "#/$defs/0/$defs/a"}, "y": {"$ref": "#/$defs/0"}}


def test_required_in_parallel_begins_with_the_mark():
    made = hermes().constraint(ToolRequest(TOOLS, required=True), TAGS)
    assert made is not None
    assert (made.gate.prefix, made.gate.prefix_in_grammar) == ("<tool_call>", True)
    tags = json.loads(made.grammar.text)
    assert tags["triggers"] == ["<tool_call>"]
    assert tags["structures"][0] == {
        "begin": '<tool_call>\n{"name": "get_weather", "arguments": ',
        "schema": {"type": "object"},
        "end": "}\n</tool_call>",
    }


def test_strict_needs_tags_unless_required():
    assert hermes().constraint(ToolRequest(TOOLS), frozenset()) is None
    assert hermes().constraint(ToolRequest(STRICT), TAGS) is not None
    with pytest.raises(GrammarError, match=r"structural_tag.*drop strict"):
        hermes().constraint(ToolRequest(STRICT), frozenset())


# the suite can fail
