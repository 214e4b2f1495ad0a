"""Test how the server plans and reads the outputs of a chat.

Run: python -m pytest -q tests/core/test_output_parsing.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.chat.parsing import OutputParsers
from dovetail.chat.requests import Arguments, tool_request
from dovetail.config.checkpoint import EMBEDDED
from dovetail.errors import GrammarError, RequestError
from dovetail.interfaces.api import ChatDelta
from dovetail.interfaces.parsers import CallDelta, ParserContext, ReasoningParser, Tool, ToolParser, ToolRequest
from dovetail.sampling_params import GrammarGate, GrammarKind, GrammarSpec, SamplingParams
from dovetail.templates.chat_template import ChatTemplate
from dovetail.tokenizer import IncrementalDetokenizer, Tokenizer
from dovetail_parsers.config import GptOssToolsConfig, HermesConfig, MistralToolsConfig, Qwen3ReasoningConfig
from dovetail_parsers.harmony import GptOssTools
from dovetail_parsers.hermes import Hermes
from dovetail_parsers.mistral import Mistral
from dovetail_parsers.think import Qwen3

TOKENIZER = Tokenizer.from_dir(EMBEDDED["tiny"])
THINK, THINK_END, CALL, CALL_END = (
    TOKENIZER.token_to_id(name) for name in ("<think>", "</think>", "<tool_call>", "</tool_call>")
)
ADD = Tool("add", {"type": "object"})
GET = Tool("get", {"type": "object"})
HERMES = Hermes(HermesConfig(), ParserContext())
QWEN = Qwen3(Qwen3ReasoningConfig(), ParserContext())
OPENED, BARE = "assistant\n<think>\n", "assistant\n"
PARAMS = SamplingParams()
WORD = SamplingParams(grammar=GrammarSpec(GrammarKind.REGEX, "a"))


def parsers(tool: ToolParser | None = HERMES, reasoning: ReasoningParser | None = QWEN) -> OutputParsers:
    return OutputParsers(TOKENIZER, tool, reasoning)


def test_a_constraint_on_the_answer_waits_for_the_reasoning():
    assert parsers().plan(WORD, OPENED, None).params.grammar_gate == GrammarGate(until=THINK_END)
    assert parsers().plan(WORD, BARE, None).params.grammar_gate == GrammarGate((THINK,), True, THINK_END)
    assert parsers(reasoning=None).plan(WORD, OPENED, None).params.grammar_gate is None
    assert parsers().plan(PARAMS, OPENED, None).params == PARAMS


def test_constraints_wait_for_reasoning_that_is_not_separated():
    plan = parsers().plan(WORD, OPENED, None, separate_reasoning=False)
    assert plan.params.grammar_gate == GrammarGate(until=THINK_END)
    assert plan.reader().feed("x</think>y") == ChatDelta(content="x</think>y")


def test_a_required_call_waits_for_the_reasoning_and_then_begins():
    plan = parsers().plan(PARAMS, OPENED, ToolRequest((ADD,), required=True))
    newline = TOKENIZER.encode("\n", add_special_tokens=False)
    assert plan.params.grammar_gate == GrammarGate(until=THINK_END, prefix=(CALL, *newline))
    assert plan.params.grammar is not None


def test_one_call_only_stops_at_its_end():
    plan = parsers().plan(PARAMS, BARE, ToolRequest((ADD, GET), parallel=False))
    assert plan.params.stop_token_ids == (CALL_END,)
    reader = plan.reader()
    text = '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "get"}</tool_call>tail'
    whole, last = reader.feed(text), reader.finish()
    assert [(call.name, call.arguments) for call in whole.calls] == [("add", "{}")]
    assert (whole.content + last.content, reader.calls) == ("tail", 1)


def test_reasoning_runs_through_before_the_calls():
    reader = parsers().plan(PARAMS, OPENED, ToolRequest((ADD,))).reader()
    delta = reader.feed('<tool_call> no\n</think>\n\nyes <tool_call>{"name": "add"}</tool_call>')
    last = reader.finish()
    assert (delta.reasoning, delta.content + last.content) == ("<tool_call> no", "yes")
    assert [replace(call, id="") for call in delta.calls] == [CallDelta(0, "", "add", "{}")]


@pytest.mark.parametrize("arguments", ['{"a": "1"}', '{"a": oops}', '{"a": "1"'])
def test_what_continues_a_call_comes_before_what_follows_it(arguments: str):
    """This must hold for any number of characters in a step: a client cannot add arguments to a call that content has
    ended."""
    call = '<tool_call>\n{"name": "add", "arguments": ' + arguments + "}\n</tool_call>"
    text = f"one {call} two {call} three"
    for size in range(1, len(text) + 1):
        reader = parsers(reasoning=None).plan(PARAMS, BARE, ToolRequest((ADD,))).reader()
        open_call = False
        for at in range(0, len(text), size):
            for part in reader.take(text[at : at + size], None, at)[0]:
                open_call = open_call and not part.content
                for delta in part.calls:
                    assert open_call or delta.id is not None, (size, part)
                    open_call = True


def test_marks_that_are_special_tokens_stay_in_the_text():
    parser = Hermes(HermesConfig(), ParserContext())
    parser.special_tokens = ("<|reserved_0|>", "<tool_call>")
    params = parsers(parser).plan(PARAMS, BARE, ToolRequest((ADD,))).params
    kept, other = TOKENIZER.token_to_id("<|reserved_0|>"), TOKENIZER.token_to_id("<|reserved_1|>")
    assert kept is not None
    assert other is not None
    assert params.keep_special == (kept,)
    shown = IncrementalDetokenizer.for_params(TOKENIZER, params)
    assert shown.push([kept, other, kept]) + shown.finish() == "<|reserved_0|><|reserved_0|>"
    hidden = IncrementalDetokenizer.for_params(TOKENIZER, PARAMS)
    assert hidden.push([kept, other]) + hidden.finish() == ""


def test_a_mark_that_is_no_token_cannot_be_waited_for():
    parser = GptOssTools(GptOssToolsConfig(), ParserContext())
    with pytest.raises(GrammarError, match=r"'<\|end\|>', which is not a token"):
        parsers(parser, None).plan(PARAMS, BARE, ToolRequest((ADD,), required=True))


def test_two_free_parts_are_refused():
    strict = ToolRequest((Tool("add", {}, strict=True),))
    parser = Mistral(MistralToolsConfig(), ParserContext())
    with pytest.raises(GrammarError, match="reasons first"):
        parsers(parser).plan(PARAMS, OPENED, strict)


def test_tools_and_another_constraint_are_refused():
    with pytest.raises(RequestError, match="cannot both hold"):
        parsers().plan(WORD, BARE, ToolRequest((ADD,)))


def test_arguments_are_text_and_mapping_to_templates():
    """DeepSeek's templates join the arguments to text, Qwen's write them by tojson, others read their fields."""
    arguments = Arguments({"a": [1]}, '{"a":  [1]}')
    source = "{{ '<' + x + '>' }}{{ x }}{{ x | tojson }}{{ x.a[0] }}{{ x is mapping }}{% for k, v in x.items() %}{{ k }}{% endfor %}"
    rendered = ChatTemplate(source, {"x": arguments}).render({})
    assert rendered == '<{"a":  [1]}>{"a":  [1]}{"a": [1]}1Truea'


@pytest.mark.parametrize(
    ("choice", "named", "parallel", "wanted"),
    [
        (None, None, True, ToolRequest((ADD, GET))),
        ("auto", None, False, ToolRequest((ADD, GET), parallel=False)),
        ("required", None, True, ToolRequest((ADD, GET), required=True)),
        ("none", None, True, None),
        (None, "get", True, ToolRequest((GET,), required=True, parallel=False)),
    ],
)
def test_what_tool_choice_asks_for(choice: str | None, named: str | None, parallel: bool, wanted: ToolRequest | None):
    assert tool_request([ADD, GET], choice, named, parallel) == wanted


@pytest.mark.parametrize("kind", ["string", "array", ["object", "null"], None, 3])
def test_parameters_that_are_no_object_are_refused(kind: object):
    odd = Tool("odd", {"type": kind})
    for choice in ("auto", "required"):
        with pytest.raises(RequestError, match=r"function 'odd' have type .*; allowed: 'object'"):
            tool_request([ADD, odd], choice, None, True)
    assert tool_request([ADD, odd], "none", None, True) is None
