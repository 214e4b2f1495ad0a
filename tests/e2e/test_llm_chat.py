"""Test LLM.chat with tools and reasoning, and calls that are enforced in every tool format, sampled at high
temperature.

.venv/bin/python -m pytest -q tests/e2e/test_llm_chat.py
"""

from __future__ import annotations

import collections
import inspect
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dovetail import LLM, SamplingParams
from dovetail.config.checkpoint import EMBEDDED
from dovetail.errors import RequestError
from dovetail.llm import ChatOutput, ChatStream
from dovetail.types import FinishKind

INTEGER = {"type": "integer"}


def function(name: str, strict: bool = False, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [key for key in properties if key != "note"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TAG = {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"], "additionalProperties": False}


def tools(strict: bool) -> list[dict[str, Any]]:
    return [
        function(
            "get_weather",
            strict,
            city={"type": "string", "minLength": 1, "maxLength": 8},
            unit={"enum": ["C", "F"]},
            note={"anyOf": [{"type": "null"}, {"type": "array", "items": TAG, "maxItems": 2}]},
        ),
        function("mul", strict, a=INTEGER, b=INTEGER),
    ]


PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
PRODUCT = [{"role": "user", "content": "Call the function to multiply 658 by 118."}]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
SUM = [{"role": "user", "content": "What is 2 + 3?"}]
GREEDY = SamplingParams(temperature=0, max_new_tokens=120)
MUL = function("mul", a=INTEGER, b=INTEGER)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("tiny", threads=1, grammar={"isolation": "thread"})
    yield made
    made.close()


def arguments(output: ChatOutput) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in output.tool_calls]


def test_a_call_and_its_result(llm: LLM):
    asked = llm.chat(PRODUCT, GREEDY, tools=[MUL])
    assert arguments(asked) == [("mul", {"a": 658, "b": 118})]
    assert (asked.content, asked.reasoning_content) == ("", "")
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0]["id"], "content": '{"result": 77644}'}
    assert llm.chat([*PRODUCT, asked.message, result], GREEDY, tools=[MUL]).content == "The result is 77644."


def test_reasoning_is_separated(llm: LLM):
    on = {"enable_thinking": True}
    separated = llm.chat(SUM, GREEDY, chat_template_kwargs=on)
    assert separated.reasoning_content
    assert separated.text == f"{separated.reasoning_content}\n</think>\n\n{separated.content}"
    raw = llm.chat(SUM, GREEDY, chat_template_kwargs=on, separate_reasoning=False)
    assert (raw.content, raw.reasoning_content) == (separated.text, "")
    called = llm.chat(SUM, GREEDY, chat_template_kwargs=on, tools=[MUL], tool_choice="required")
    assert called.reasoning_content
    assert [name for name, _ in arguments(called)][:1] == ["mul"]


def test_a_chat_without_tools_is_its_text(llm: LLM):
    for choice in (None, "none"):
        given = {"tools": [MUL], "tool_choice": choice} if choice else {}
        output = llm.chat(FRANCE, GREEDY, **given)
        assert output.content == output.text
        assert "Paris" in output.content
    assert "".join(llm.stream_chat_text(FRANCE, GREEDY)) == output.text


def test_a_stream_adds_up_to_the_answer_and_ends_where_it_is_closed(llm: LLM):
    on = {"enable_thinking": True}
    for messages, given in ((SUM, {"chat_template_kwargs": on}), (PRODUCT, {"tools": [MUL]}), (FRANCE, {})):
        whole, stream = llm.chat(messages, GREEDY, **given), llm.chat_stream(messages, GREEDY, **given)
        parts = list(stream)
        assert "".join(part.reasoning for part in parts) == whole.reasoning_content
        assert "".join(part.content for part in parts) == whole.content
        assert arguments(stream.output) == arguments(whole)
        assert stream.output.token_ids == whole.token_ids
        assert stream.output.finish is not None
        assert len(parts) > 3
    stream = llm.chat_stream(FRANCE, GREEDY)
    first = next(iter(stream))
    assert stream.output.content == first.content != ""
    stream.close()
    assert not llm.loop.has_work


def test_streams_that_are_read_in_turns_lose_nothing(llm: LLM):
    hot = [SamplingParams(temperature=1.0, max_new_tokens=40, ignore_eos=True, seed=i) for i in range(3)]
    streams = [llm.chat_stream(FRANCE, params) for params in hot]
    heard, readers = [""] * 3, [iter(stream) for stream in streams]
    for i in [0, 1, 2] * 5 + [0] * 99 + [1] * 99 + [2] * 99:
        part = next(readers[i], None)
        heard[i] += part.content if part else ""
    assert heard == [stream.output.content for stream in streams]
    assert all(stream.output.finish for stream in streams)


def test_the_arguments_of_a_chat_are_shown_and_checked(llm: LLM):
    whole, stream = inspect.signature(llm.chat), inspect.signature(llm.chat_stream)
    kinds = {name: parameter.kind for name, parameter in whole.parameters.items()}
    positional = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["messages", "params"]
    assert {"sampling_params", "tools", "tool_choice", "session"} <= kinds.keys()
    assert whole.parameters == stream.parameters
    assert (whole.return_annotation, stream.return_annotation) == ("ChatOutput", "ChatStream")
    for chat in (llm.chat, llm.chat_stream):
        with pytest.raises(TypeError, match="unexpected keyword argument 'toolz'"):
            chat(FRANCE, toolz=[])
        with pytest.raises(RequestError, match="params and sampling_params are both given"):
            chat(FRANCE, GREEDY, sampling_params=GREEDY)
    assert llm.chat(FRANCE, sampling_params={"max_tokens": 2, "temperature": 0}).token_ids == (
        llm.chat(FRANCE, SamplingParams(max_tokens=2, temperature=0)).token_ids
    )


def test_stop_strings_end_the_content_and_no_call(llm: LLM):
    hot = SamplingParams(temperature=0, max_new_tokens=120, stop=('"', "\n", "is"))
    assert arguments(llm.chat(PRODUCT, hot, tools=[MUL])) == [("mul", {"a": 658, "b": 118})]
    output = llm.chat(FRANCE, hot, tools=[MUL])
    assert (output.content, output.finish.kind, output.finish.matched) == (
        "The capital of France ",
        FinishKind.STOP,
        "is",
    )
    assert not llm.loop.has_work


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [MUL, MUL]}, "tools"),
        ({"params": SamplingParams(n=2)}, "n"),
    ],
)
def test_what_cannot_hold_is_refused(llm: LLM, given: dict[str, Any], param: str):
    with pytest.raises(RequestError) as error:
        llm.chat(PARIS, **{"tools": [MUL], **given})
    assert error.value.param == param


FORMATS = ("hermes", "llama3_json", "mistral", "deepseek", "pythonic", "gpt_oss")
LIKELY = {"llama3_json": "{", "pythonic": "[", "hermes": "<tool_call>", "gpt_oss": "<|end|>"}
"""The token that begins a call, or that ends what comes before, where it is one: made likely, as training would."""
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


def with_marks(directory: Path, marks: tuple[str, ...]) -> Path:
    """Rename the spare special tokens of the embedded model."""
    shutil.copytree(EMBEDDED["tiny"], directory)
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    for i, mark in enumerate(marks):
        text = text.replace(f"<|reserved_{i}|>", mark)
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    return directory


@pytest.mark.parametrize("parser", FORMATS)
def test_enforced_calls_are_valid_in_every_format(parser: str, tmp_path: Path):
    """The model was trained on one of the formats; in the others only the constraint makes it call."""
    model = str(with_marks(tmp_path / "tiny", HARMONY)) if parser == "gpt_oss" else "tiny"
    llm = LLM(model, threads=1, tool_parser=parser, grammar={"isolation": "thread"})
    named = {"type": "function", "function": {"name": "get_weather"}}
    modes: list[dict[str, Any]] = [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": named},
        {"tool_choice": "auto", "tools": tools(strict=True)},
    ]
    assert llm.tokenizer is not None
    ends = llm.tokenizer.eos_token_ids  # likely, as are quotes and brackets: texts end sooner, and more calls are whole
    ends = [*ends, *(token for end in '"}])' for token in llm.tokenizer.encode(end, add_special_tokens=False))]
    likely = llm.tokenizer.encode(LIKELY[parser], add_special_tokens=False) if parser in LIKELY else []
    streams: list[list[ChatStream]] = []
    for mode in modes:
        strict = mode["tool_choice"] == "auto"
        streams.append([])
        for seed in range(6):
            bias = dict.fromkeys(ends, 4.0)
            if likely and seed % 2 and (strict or parser == "gpt_oss"):
                bias |= {likely[0]: 25.0 if parser == "gpt_oss" else 60.0}
            params = SamplingParams(temperature=1.5, max_new_tokens=300, seed=seed, logit_bias=bias)
            streams[-1].append(llm.chat_stream(PARIS, params, **{"tools": tools(strict=False), **mode}))
    collections.deque(itertools.zip_longest(*itertools.chain(*streams)), maxlen=0)  # all of them in the same steps
    calls_by_mode = []
    for mode, outputs in zip(modes, ([stream.output for stream in some] for some in streams), strict=True):
        for output in outputs:
            whole = output.finish.kind is FinishKind.STOP
            assert output.tool_calls or not whole or mode["tool_choice"] == "auto", output.text
            check(output.tool_calls if whole else output.tool_calls[:-1])
            if mode["tool_choice"] == named:
                assert {call["function"]["name"] for call in output.tool_calls} <= {"get_weather"}
            assert len(output.tool_calls) <= 1 or mode.get("parallel_tool_calls") is None
        calls_by_mode.append(sum(o.finish.kind is FinishKind.STOP and bool(o.tool_calls) for o in outputs))
    llm.close()
    assert min(calls_by_mode[:3]) >= 2, f"too few calls are complete for a conclusion: {calls_by_mode}"
    assert parser not in ("hermes", "llama3_json", "pythonic") or calls_by_mode[3] >= 1, calls_by_mode


def check(calls: list[dict[str, Any]]) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools(strict=False)}
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])


@pytest.mark.parametrize(
    ("messages", "given", "message"),
    [
        ("hi", {}, "messages is 'hi'; allowed: a list"),
        (None, {}, "messages is None"),
        ([], {}, r"messages is \[\]; allowed: a list"),
        (PARIS[0], {}, "messages is {"),
        (["hi"], {}, r"messages is \['hi'\]"),
        ([{"role": "user", "content": ["x"]}], {}, "has a part 'x'; allowed"),
        ([{"role": "user", "content": "\ud800"}], {}, "half of a surrogate pair"),
        (PARIS, {"tools": 5}, "tools is 5"),
        (PARIS, {"tools": "x"}, "tools is 'x'"),
        (PARIS, {"tools": {"type": "function"}}, "tools is {"),
        (PARIS, {"tools": ["x"]}, "tools.0 is 'x'"),
        (PARIS, {"tools": [MUL], "tool_choice": 5}, "tool_choice"),
        (PARIS, {"chat_template_kwargs": 5}, "chat_template_kwargs is 5; allowed: a mapping"),
        (PARIS, {"tools": [function("f", x={"const": "\ud800"})], "tool_choice": "required"}, "half of a surrogate"),
    ],
)
def test_wrong_types_are_refused_and_said(llm: LLM, messages: Any, given: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY, **given)


def test_no_tools_may_be_none(llm: LLM):
    assert llm.chat(FRANCE, GREEDY, tools=None).content == llm.chat(FRANCE, GREEDY).content


def test_the_page_s_offline_example_works(capsys: pytest.CaptureFixture[str]):
    """docs/tools.md: the blocks below "Offline" run, and print what is shown."""
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    part = page.partition("\n## Offline\n")[2]
    names: dict[str, Any] = {}
    blocks = re.findall(r"```(python|text)\n(.*?)```", part, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text"]
    exec(blocks[0][1], names)
    assert capsys.readouterr().out == blocks[1][1]
