"""Test the tool parsers other than hermes: the suite for each, both notations where there are two, and what they
enforce.

Run: python -m pytest -q tests/plugins/test_parsers_formats.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.errors import GrammarError
from dovetail.interfaces.features import BUILT_IN_FEATURES, Feature
from dovetail.interfaces.parsers import ConstraintGate, ParserContext, Tool, ToolParser, ToolRequest
from dovetail.testing.parsers import TOOLS, ExpectedCall, ParsedOutput, ToolParserSuite, run_stream
from dovetail_parsers.config import (
    DeepseekConfig,
    GptOssToolsConfig,
    Llama3JsonConfig,
    MistralToolsConfig,
    PythonicConfig,
)
from dovetail_parsers.deepseek import Deepseek
from dovetail_parsers.harmony import GptOssTools
from dovetail_parsers.llama3_json import Llama3Json
from dovetail_parsers.mistral import Mistral
from dovetail_parsers.pythonic import Pythonic, as_json
from dovetail_parsers.reader import MalformedError

TAGS = frozenset({Feature.GRAMMAR_STRUCTURAL_TAG})
STRICT = tuple(Tool(tool.name, tool.parameters, strict=True) for tool in TOOLS)
V3 = ParserContext("... <｜tool▁sep｜>' + name + '\n```json\n' ...")

EVERY_FEATURE = frozenset(Feature(descriptor.name) for descriptor in BUILT_IN_FEATURES)


def as_text(call: ExpectedCall, arguments: str = "arguments") -> str:
    return json.dumps({"name": call.name, arguments: call.arguments}, ensure_ascii=False)


class TestMistral(ToolParserSuite):
    name = "mistral"

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        return f"{content}[TOOL_CALLS] [{', '.join(map(as_text, calls))}]"


@pytest.mark.sample(5)
class TestMistralNamed(ToolParserSuite):
    name = "mistral"

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        return content + "".join(f"[TOOL_CALLS]{c.name}[ARGS]{json.dumps(c.arguments)}" for c in calls)


class TestLlama3Json(ToolParserSuite):
    name = "llama3_json"
    mixed = False

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        return "; ".join(as_text(call, "parameters") for call in calls)


@pytest.mark.sample(5)
class TestLlama3Tagged(ToolParserSuite):
    name = "llama3_json"

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        return f"{content}<|python_tag|>" + ";".join(as_text(call, "parameters") for call in calls)


class TestDeepseekV3(ToolParserSuite):
    name = "deepseek"

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        made = "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{json.dumps(c.arguments)}\n```<｜tool▁call▁end｜>"
            for c in calls
        )
        return f"{content}<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


@pytest.mark.sample(5)
class TestDeepseekV31(ToolParserSuite):
    name = "deepseek"

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        made = "".join(
            f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{json.dumps(c.arguments)}<｜tool▁call▁end｜>" for c in calls
        )
        return f"{content}<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


class TestPythonic(ToolParserSuite):
    name = "pythonic"
    mixed = False

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        return f"[{', '.join(_python(call) for call in calls)}]"


@pytest.mark.sample(5)
class TestPythonicMarked(ToolParserSuite):
    name = "pythonic"
    context = ParserContext(special_tokens=frozenset({"<|python_start|>", "<|python_end|>"}))

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        return f"{content}<|python_start|>[{', '.join(_python(call) for call in calls)}]<|python_end|>"


class TestGptOss(ToolParserSuite):
    name = "gpt_oss"

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        return content + "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{c.name} <|constrain|>json<|message|>{json.dumps(c.arguments)}<|call|>"
            for c in calls
        )


@pytest.mark.sample(5)
class TestGptOssOtherHeader(ToolParserSuite):
    name = "gpt_oss"

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        return content + "".join(
            f"<|start|>assistant to=functions.{c.name}<|channel|>commentary json<|message|>{json.dumps(c.arguments)}<|call|>"
            for c in calls
        )


def _python(call: ExpectedCall) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def parse(parser: ToolParser, text: str) -> ParsedOutput:
    return run_stream(parser.stream(TOOLS), [text])


LLAMA = Llama3Json(Llama3JsonConfig(), ParserContext())
MISTRAL = Mistral(MistralToolsConfig(), ParserContext())
PYTHONIC = Pythonic(PythonicConfig(), ParserContext())
GPT_OSS = GptOssTools(GptOssToolsConfig(), ParserContext())


def test_an_answer_in_json_is_no_call():
    text = ' {"name": "Anna", "age": 31}'
    assert parse(LLAMA, text) == ParsedOutput(text, ())


def test_json_in_the_middle_of_an_answer_is_no_call():
    text = 'Like this: {"name": "add", "parameters": {}}'
    assert parse(LLAMA, text) == ParsedOutput(text, ())


def test_a_list_that_is_an_answer_is_no_call():
    for text in ("[1, 2]", "[add]", "[add(1)]", "See [add(a=1)]"):
        assert parse(PYTHONIC, text) == ParsedOutput(text, ())


def test_mistral_ids_are_what_its_template_takes():
    assert len(MISTRAL.new_id()) == 9
    assert MISTRAL.new_id().isalnum()
    assert parse(MISTRAL, "[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{}").calls == (("add", "{}"),)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"a" "b"', "ab"),
        ("(1, -2.5, None)", [1, -2.5, None]),
        ("{'a': [True, false], 'b': null}", {"a": [True, False], "b": None}),
        (r"'\d'", r"\d"),
        (r"'\ud800'", "\ud800"),
        ("{'a': 1, 'a': 2}", {"a": 2}),
        ("'é\n'", None),
    ],
)
def test_python_literals(text: str, value: Any):
    if value is None:
        with pytest.raises(MalformedError):
            as_json(text)
    else:
        assert json.loads(as_json(text)) == value


@pytest.mark.parametrize(
    "text", ["f(1)", "a", "1 + 2", "b'x'", "{1: 2}", "1e999", "[" * 5000, "1j", "", "f'{x}'", "..."]
)
def test_what_is_no_literal(text: str):
    with pytest.raises(MalformedError):
        as_json(text)


# constraints


def made(
    parser: ToolParser, *tools: Tool, offers: frozenset[Feature] = TAGS, **given: Any
) -> tuple[Any, ConstraintGate]:
    found = parser.constraint(ToolRequest(tools, **given), offers)
    assert found is not None
    return json.loads(found.grammar.text), found.gate


@pytest.mark.parametrize("parser", [LLAMA, MISTRAL, PYTHONIC, GPT_OSS, Deepseek(DeepseekConfig(), V3)])
def test_nothing_is_enforced_unless_asked(parser: ToolParser):
    assert parser.constraint(ToolRequest(TOOLS), TAGS) is None


def test_llama_required():
    schema, gate = made(LLAMA, *TOOLS[:2], required=True, offers=frozenset())
    assert gate == ConstraintGate()
    assert [option["required"] for option in schema["anyOf"]] == [["name", "parameters"]] * 2


def test_mistral_array():
    schema, gate = made(MISTRAL, *TOOLS[:1], required=True, parallel=False)
    assert gate == ConstraintGate(prefix="[TOOL_CALLS]")
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert schema["items"]["properties"]["arguments"] == {"$ref": "#/$defs/0"}
    schema, gate = made(MISTRAL, *STRICT, offers=frozenset())
    assert gate == ConstraintGate(until="[TOOL_CALLS]", may_end=True)
    assert "maxItems" not in schema
    tags, gate = made(MISTRAL, *STRICT)
    assert gate == ConstraintGate()
    assert [tag["begin"] for tag in tags["structures"]] == tags["triggers"] == ["[TOOL_CALLS]"]


def test_mistral_with_names_forces_the_one():
    parser = Mistral(MistralToolsConfig(), ParserContext("... [ARGS] ..."))
    one = made(parser, TOOLS[1], required=True, offers=frozenset())
    assert one == ({"type": "object"}, ConstraintGate(prefix="[TOOL_CALLS]add[ARGS]"))
    tags, gate = made(parser, *TOOLS[:2], required=True)
    assert gate == ConstraintGate(prefix="[TOOL_CALLS]", prefix_in_grammar=True)
    assert [tag["begin"] for tag in tags["structures"]] == ["[TOOL_CALLS]get_weather[ARGS]", "[TOOL_CALLS]add[ARGS]"]
    with pytest.raises(GrammarError, match="name one function"):
        parser.constraint(ToolRequest(TOOLS, required=True), frozenset())


def test_deepseek_tags_in_the_writing_of_the_template():
    old, new = Deepseek(DeepseekConfig(), V3), Deepseek(DeepseekConfig(), ParserContext())
    tags, gate = made(old, TOOLS[1], required=True)
    assert tags["structures"][0]["begin"] == "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    assert tags["structures"][0]["end"] == "\n```<｜tool▁call▁end｜>"
    assert gate == ConstraintGate(prefix="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", prefix_in_grammar=True)
    tags, gate = made(new, *STRICT)
    assert gate == ConstraintGate()
    assert tags["structures"][1]["begin"] == "<｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    _, gate = made(new, TOOLS[1], required=True, offers=frozenset())
    assert gate.prefix == "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"


def test_gpt_oss_forces_the_named_function_behind_its_reasoning():
    found = GPT_OSS.constraint(ToolRequest(TOOLS[1:2], required=True), frozenset())
    assert found is not None
    assert found.covers_reasoning
    assert found.gate == ConstraintGate(
        lead="<|channel|>analysis<|message|>",
        until="<|end|>",
        prefix="<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
    )


NAMED = Mistral(MistralToolsConfig(), ParserContext("... [ARGS] ..."))
DEEPSEEK = Deepseek(DeepseekConfig(), V3)


@pytest.mark.parametrize(
    ("parser", "request_", "feature"),
    [
        (LLAMA, ToolRequest(STRICT), "grammar.lark"),
        (NAMED, ToolRequest(TOOLS, required=True), "grammar.structural_tag"),
        (NAMED, ToolRequest(STRICT), "grammar.structural_tag"),
        (DEEPSEEK, ToolRequest(TOOLS, required=True), "grammar.structural_tag"),
        (DEEPSEEK, ToolRequest(STRICT), "grammar.structural_tag"),
        (PYTHONIC, ToolRequest(TOOLS[:1], required=True), "grammar.ebnf"),
        (GPT_OSS, ToolRequest(TOOLS, required=True), "grammar.lark"),
        (GPT_OSS, ToolRequest(STRICT), "grammar.lark"),
    ],
)
def test_what_no_backend_can_enforce_is_refused(parser: ToolParser, request_: ToolRequest, feature: str):
    with pytest.raises(
        GrammarError, match=f"cannot be enforced without a grammar backend that offers {feature}"
    ) as error:
        parser.constraint(request_, frozenset({Feature.GRAMMAR_JSON_SCHEMA}))
    assert (error.value.param, error.value.keyword) == ("tools", feature.removeprefix("grammar."))


def test_marks_that_are_special_tokens_are_written_by_stand_ins():
    marks = ("[TOOL_CALLS]", "[ARGS]")
    parser = Mistral(MistralToolsConfig(), ParserContext("... [ARGS] ...", frozenset(marks)))
    tags, gate = made(parser, TOOLS[1], required=True)
    assert gate == ConstraintGate(
        prefix=marks[0], prefix_in_grammar=True, marks=((marks[0], "\x0e"), (marks[1], "\x0f"))
    )
    assert (tags["structures"][0]["begin"], tags["triggers"]) == ("\x0eadd\x0f", ["\x0e"])


PROPERTIES: dict[str, dict[str, Any]] = {
    "pattern": {"type": "string", "pattern": "^a"},
    "minimum": {"type": "integer", "minimum": 3},
    "format": {"type": "string", "format": "date"},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "null"}]},
    "uniqueItems": {"type": "array", "items": {}, "uniqueItems": True},
    "maxLength": {"type": "string", "maxLength": 5000},
    "enum": {"type": "string", "enum": [1, 2]},
    "multipleOf": {"anyOf": [{"type": "number", "multipleOf": 2}]},
    "description2": {"type": "string", "description2": "not known"},
    "$ref": {"$ref": "#/properties/x"},
}


@pytest.mark.parametrize("keyword", PROPERTIES)
def test_keywords_that_python_literals_cannot_be_held_to_are_refused_by_name(keyword: str):
    tool = Tool("f", {"type": "object", "properties": {"x": PROPERTIES[keyword]}})
    with pytest.raises(GrammarError, match=r"'pythonic' \(Python literals\) cannot enforce") as error:
        PYTHONIC.constraint(ToolRequest((tool,), required=True), EVERY_FEATURE)
    assert error.value.keyword == keyword


MALFORMED: list[tuple[str, Any]] = [
    ("type", {}),
    ("type", [None]),
    ("properties", 5),
    ("properties", ["a"]),
    ("properties", {"\ud800": {}}),
    ("required", "x"),
    ("required", [1]),
    ("required", None),
    ("enum", "ab"),
    ("enum", []),
    ("anyOf", {"a": {}}),
    ("anyOf", []),
    ("$ref", 5),
]


@pytest.mark.parametrize(("keyword", "given"), MALFORMED)
def test_schemas_for_python_literals_that_are_none_are_refused_by_name(keyword: str, given: Any):
    inner = {"properties": {"x": {keyword: given}}}
    for parameters in (inner, {"properties": {"y": {"items": {keyword: given}}}}, {"additionalProperties": inner}):
        tool = Tool("f", {"type": "object", **parameters})
        with pytest.raises(GrammarError, match=r"'f' have .*; allowed: ") as error:
            PYTHONIC.constraint(ToolRequest((tool,), required=True), EVERY_FEATURE)
        assert error.value.keyword == keyword


def test_references_that_double_at_each_level_are_followed_once():
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(15)}
    parameters = {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": {**defs, "d15": {"type": "null"}}}
    found = PYTHONIC.constraint(ToolRequest((Tool("f", parameters),), required=True), EVERY_FEATURE)
    assert found is not None
    assert len(found.grammar.text) < 2500


def test_a_grammar_for_python_literals_has_bounded_size():
    tool = Tool("f", {"properties": {f"p{i}": {"type": "null"} for i in range(20_000)}})
    with pytest.raises(GrammarError, match="'size'"):
        PYTHONIC.constraint(ToolRequest((tool,), required=True), EVERY_FEATURE)
