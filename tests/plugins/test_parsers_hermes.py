"""The tool parser hermes: the suite, and what is its own. The suite fails for parsers that break its rules.

Run: python -m pytest -q tests/plugins/test_parsers_hermes.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase

from dovetail.errors import GrammarError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import CallDelta, ParserContext, Tool, ToolDelta, ToolParser, ToolRequest, ToolStream
from dovetail.testing.parsers import TOOLS, Call, Heard, ToolParserSuite, listen
from dovetail_parsers.config import HermesConfig
from dovetail_parsers.hermes import Hermes

TAGS = frozenset({Feature.GRAMMAR_STRUCTURAL_TAG})
STRICT = tuple(Tool(tool.name, tool.parameters, strict=True) for tool in TOOLS)


def hermes() -> Hermes:
    return Hermes(HermesConfig(), ParserContext())


def hear(text: str) -> Heard:
    return listen(hermes().stream(TOOLS), [text])


class TestHermes(ToolParserSuite):
    name = "hermes"

    def write(self, content: str, calls: Sequence[Call]) -> str:
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
    assert hear(text) == Heard("", (("add", '{"a": 1}'),))


def test_a_call_without_arguments():
    assert hear('<tool_call>{"name": "get"}</tool_call>').calls == (("get", "{}"),)


def test_content_before_between_and_behind():
    heard = hear('A <b> \n<tool_call>{"name": "get", "arguments": {}}</tool_call>\nB\n<tool_call>{"name": "add"}x')
    assert heard == Heard("A <b>\nBx", (("get", "{}"), ("add", "{}")))


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1x}}</tool_call>', "x}}</tool_call>", '{"a": 1'),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}]</tool_call>', "]</tool_call>", '{"a": 1}'),
        ('<tool_call>{"name": "add", "arguments": {"a": "b', "", '{"a": "b'),
    ],
)
def test_a_call_that_breaks_off(text: str, content: str, arguments: str):
    assert hear(text) == Heard(content, (("add", arguments),))


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
    assert hear(text) == Heard(text, ())


def test_a_broken_call_does_not_hide_the_next():
    heard = hear('<tool_call>{"na<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    assert heard == Heard('<tool_call>{"na', (("add", "{}"),))


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


class _Wrapped(ToolStream):
    def __init__(self, inner: ToolStream, change: Callable[[ToolDelta], ToolDelta]) -> None:
        self._inner, self._change = inner, change

    def feed(self, text: str) -> ToolDelta:
        return self._change(self._inner.feed(text))

    def finish(self) -> ToolDelta:
        return self._change(self._inner.finish())


class _Whole(ToolStream):
    """Looks at each piece alone."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> ToolDelta:
        heard = listen(self._parser.stream(TOOLS), [text])
        return ToolDelta(heard.content, tuple(CallDelta(i, f"c{i}", n, a) for i, (n, a) in enumerate(heard.calls)))

    def finish(self) -> ToolDelta:
        return ToolDelta()


class _Raises(ToolStream):
    """Reads the text at its end, as JSON."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> ToolDelta:
        self._text += text
        return ToolDelta()

    def finish(self) -> ToolDelta:
        parts = self._text.partition("<tool_call>")[2].partition("</tool_call>")
        call = json.loads(parts[0])
        return ToolDelta("", (CallDelta(0, "c", call["name"], json.dumps(call["arguments"])),))


def _no_space(delta: ToolDelta) -> ToolDelta:
    return delta._replace(content=delta.content.replace("<", ""))


def _one_index(delta: ToolDelta) -> ToolDelta:
    return delta._replace(calls=tuple(replace(call, index=0) for call in delta.calls))


class _Broken(TestHermes):
    __test__ = False
    phases = (Phase.generate,)
    max_examples = 300
    stream: Callable[[], ToolStream]

    def hear(self, *pieces: str) -> Heard:
        return listen(self.stream(), pieces)

    def make(self) -> ToolParser:
        parser = hermes()
        parser.stream = lambda tools: self.stream()  # type: ignore[method-assign]
        return parser


@pytest.mark.parametrize(
    ("stream", "failing"),
    [
        (lambda: _Whole(hermes()), "test_pieces_do_not_matter"),
        (lambda: _Wrapped(hermes().stream(TOOLS), _no_space), "test_text_without_calls_is_unchanged"),
        (lambda: _Wrapped(hermes().stream(TOOLS), _one_index), "test_calls_are_found_in_any_pieces"),
        (_Raises, "test_pieces_do_not_matter"),
        (_Raises, "test_arguments_come_as_they_grow"),
        (lambda: _Wrapped(hermes().stream(TOOLS), lambda d: d._replace(content="")), "test_no_word_is_lost"),
    ],
)
def test_the_suite_fails_for_a_broken_parser(stream: Callable[[], ToolStream], failing: str):
    suite = _Broken()
    suite.stream = stream
    with pytest.raises((AssertionError, ValueError, ExceptionGroup)):
        getattr(suite, failing)()
