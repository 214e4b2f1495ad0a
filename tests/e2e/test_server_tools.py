"""Test tool calls and reasoning of the chat API with the official openai client and a live server of the embedded
model.

.venv/bin/python -m pytest -q tests/e2e/test_server_tools.py
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming._deltas import accumulate_delta

from dovetail.config import Config
from dovetail.registry import setup
from dovetail.server.launch import running_server


def function(name: str, description: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    marked = {} if strict is None else {"strict": strict}
    inner = {"name": name, "description": description, "parameters": parameters, **marked}
    return {"type": "function", "function": inner}


CITY = {"type": "string", "minLength": 1, "maxLength": 20}
WEATHER = function("get_weather", "Get the weather of a city", city=CITY)
ADD = function("add", "Add two numbers", a={"type": "integer"}, b={"type": "integer"})
TOOLS = [WEATHER, ADD]
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
SUM = [{"role": "user", "content": "What is 2 + 3?"}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def client(tiny_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, stream: bool, messages: list[dict[str, Any]], **given: Any) -> dict[str, Any]:
    """Return one choice, whole or accumulated from its chunks as the client's library does."""
    given = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 120, **given}
    if not stream:
        return client.chat.completions.create(**given).choices[0].model_dump()
    total: dict[Any, Any] = {}
    for chunk in client.chat.completions.create(stream=True, **given):
        for choice in chunk.choices:
            assert len(choice.delta.tool_calls or []) <= 1
            accumulate_delta(total.setdefault("message", {}), choice.delta.to_dict())
            total["finish_reason"] = choice.finish_reason or total.get("finish_reason")
    for call in total["message"].get("tool_calls") or []:
        assert call.pop("index") >= 0
    return total


def only_call(choice: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments of the only call of a choice, which satisfy the function's schema."""
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name == "add":
        assert {key: type(value) for key, value in arguments.items()} == {"a": int, "b": int}
    else:
        assert list(arguments) == ["city"]
        assert 1 <= len(arguments["city"]) <= 20
    return name, arguments


each_way = pytest.mark.parametrize("stream", [False, True])


@each_way
def test_auto_calls_where_it_helps(client: openai.OpenAI, stream: bool):
    assert only_call(ask(client, stream, PARIS, tools=TOOLS)) == ("get_weather", {"city": "Paris"})


@each_way
def test_auto_answers_where_it_does_not(client: openai.OpenAI, stream: bool):
    choice = ask(client, stream, FRANCE, tools=TOOLS, tool_choice="auto")
    assert choice["finish_reason"] == "stop"
    assert "Paris" in choice["message"]["content"]
    assert not choice["message"].get("tool_calls")


@each_way
def test_none_neither_shows_nor_reads_tools(client: openai.OpenAI, stream: bool):
    choice = ask(client, stream, PARIS, tools=TOOLS, tool_choice="none", max_tokens=20)
    bare = ask(client, stream, PARIS, max_tokens=20)
    assert choice["message"]["content"] == bare["message"]["content"]
    assert not choice["message"].get("tool_calls")


@each_way
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_though_it_does_not_help(client: openai.OpenAI, stream: bool, parallel: bool):
    choice = ask(client, stream, FRANCE, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
    calls = choice["message"]["tool_calls"]
    assert len(calls) >= 1 if parallel else len(calls) == 1
    choice["message"]["tool_calls"] = calls[:1]
    only_call(choice)


@each_way
@pytest.mark.parametrize("name", ["add", "get_weather"])
def test_a_named_function_is_called(client: openai.OpenAI, stream: bool, name: str):
    named = {"type": "function", "function": {"name": name}}
    assert only_call(ask(client, stream, FRANCE, tools=TOOLS, tool_choice=named))[0] == name


@pytest.mark.parametrize("seed", range(12))
def test_required_holds_at_high_temperature(client: openai.OpenAI, seed: int):
    made = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    only_call(ask(client, bool(seed % 2), PARIS, temperature=1.5, seed=seed, **made))


@pytest.mark.parametrize("seed", range(6))
def test_a_strict_function_is_called_as_its_schema_says_or_not_at_all(client: openai.OpenAI, seed: int):
    north = function("get_weather", "Get the weather of a city", strict=True, city={"enum": ["Oslo", "Tromsø"]})
    choice = ask(client, bool(seed % 2), PARIS, tools=[north], temperature=1.0 * (seed > 1), seed=seed)
    for call in choice["message"].get("tool_calls") or []:
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Tromsø")
    assert seed > 1 or choice["finish_reason"] == "tool_calls"


def test_references_inside_of_parameters(client: openai.OpenAI):
    tree = function("get_weather", "Get the weather of a city", city={"$ref": "#/$defs/city"})
    tree["function"]["parameters"]["$defs"] = {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}}
    for parallel in (True, False):
        choice = ask(client, False, PARIS, tools=[tree, ADD], tool_choice="required", parallel_tool_calls=parallel)
        choice["message"]["tool_calls"] = choice["message"]["tool_calls"][:1]
        assert only_call(choice) == ("get_weather", {"city": "Paris"})


def test_arguments_arrive_in_fragments(client: openai.OpenAI):
    chunks = list(client.chat.completions.create(model="tiny", messages=PARIS, temperature=0, tools=TOOLS, stream=True))
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert [call.id is not None for call in calls] == [True] + [False] * (len(calls) - 1)
    assert [call.function.name for call in calls][:2] == ["get_weather", None]
    assert len(calls) >= 3
    assert all(call.index == 0 for call in calls)
    assert "".join(call.function.arguments for call in calls) == '{"city": "Paris"}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@each_way
def test_the_result_goes_back_into_the_conversation(client: openai.OpenAI, stream: bool):
    question = [{"role": "user", "content": "Call the function to multiply 6582 by 1185."}]
    multiply = function("mul", "Multiply two numbers", a={"type": "integer"}, b={"type": "integer"})
    message = ask(client, stream, question, tools=[multiply])["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 6582, "b": 1185}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"result": 35135}'}
    talk = [*question, {key: message[key] for key in ("role", "content", "tool_calls")}, result]
    choice = ask(client, stream, talk, tools=[multiply])
    assert choice["finish_reason"] == "stop"
    assert "35135" in choice["message"]["content"]


def test_a_call_cut_by_the_length_has_the_arguments_up_to_there(client: openai.OpenAI):
    for stream in (False, True):
        choice = ask(client, stream, PARIS, tools=TOOLS, max_tokens=16)
        assert choice["finish_reason"] == "length"
        (call,) = choice["message"]["tool_calls"]
        assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])


def test_several_choices_have_calls_of_their_own(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="tiny", messages=PARIS, tools=TOOLS, n=3, temperature=1, seed=1, tool_choice="required", max_tokens=80
    )
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == 3


@each_way
def test_reasoning_is_separated(client: openai.OpenAI, stream: bool):
    message = ask(client, stream, SUM, extra_body=THINK)["message"]
    raw = ask(client, stream, SUM, extra_body={**THINK, "separate_reasoning": False})["message"]
    assert "5" in message["content"]
    assert "think" not in message["content"] + message["reasoning_content"]
    assert raw["content"] == f"{message['reasoning_content']}\n</think>\n\n{message['content']}"
    assert not raw.get("reasoning_content")


@each_way
def test_a_constraint_waits_for_the_end_of_the_reasoning(client: openai.OpenAI, stream: bool):
    free = ask(client, stream, SUM, extra_body=THINK)["message"]
    held = ask(client, stream, SUM, extra_body={**THINK, "regex": "Answer: [0-9]"})["message"]
    assert held["reasoning_content"] == free["reasoning_content"]
    assert held["content"][:-1] == "Answer: "


def test_required_waits_for_the_end_of_the_reasoning(client: openai.OpenAI):
    choice = ask(client, False, SUM, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, extra_body=THINK)
    assert choice["message"]["reasoning_content"]
    only_call(choice)


def test_an_answer_that_is_constrained_without_reasoning_begins_at_once(client: openai.OpenAI):
    message = ask(client, False, SUM, extra_body={"regex": "Answer: [0-9]"})["message"]
    assert message["content"].startswith("Answer: ")
    assert not message.get("reasoning_content")


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "get_weather, add"),
        ({"response_format": {"type": "json_object"}}, "tools", "tool_choice: none"),
        ({"tools": [function("odd", "", x={"type": "nonsense"})], "tool_choice": "required"}, None, "nonsense"),
    ],
)
def test_what_cannot_hold_is_refused(tiny: httpx.Client, change: dict[str, Any], param: str | None, words: str):
    body = {"messages": PARIS, "tools": TOOLS, "max_tokens": 30, **change}
    answer = tiny.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert param in (None, error["param"])


def test_a_server_without_parsers_says_so():
    config = Config.model_validate(
        {
            "threads": 1,
            "server": {"port": 0, "log_level": "warning"},
            "tool_parser": {"disabled": True},
            "reasoning_parser": {"disabled": True},
        }
    )
    with running_server(config) as url, httpx.Client(base_url=url, timeout=60) as http:
        answer = http.post("/v1/chat/completions", json={"messages": PARIS, "tools": TOOLS})
        assert answer.status_code == 400
        assert "no tool parser" in answer.json()["error"]["message"]
        body = {"messages": SUM, "temperature": 0, **THINK}
        assert "</think>" in http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("parser", ["llama3_json", "mistral", "deepseek"])
def test_a_named_function_in_the_other_formats(parser: str):
    """The model was not trained on these functions, so the call is due to the constraint."""
    quick = ("threads=1", "server.port=0", "server.log_level=warning", "grammar.isolation=thread")
    config, registry = setup(sets=[f"tool_parser={parser}", *quick])
    named = {"type": "function", "function": {"name": "get_weather"}}
    with (
        running_server(config, registry) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for stream in (False, True):
            choice = ask(client, stream, PARIS, tools=TOOLS, tool_choice=named)
            call = choice["message"]["tool_calls"][0]
            assert len(choice["message"]["tool_calls"]) == 1
            assert call["function"]["name"] == "get_weather"
            assert list(json.loads(call["function"]["arguments"])) == ["city"]


@each_way
@pytest.mark.parametrize("stop", ['"', "\n", "}", "Paris", "<tool_call>", "_"])
def test_a_stop_string_does_not_cut_a_call(client: openai.OpenAI, stream: bool, stop: str):
    assert only_call(ask(client, stream, PARIS, tools=TOOLS, stop=stop)) == ("get_weather", {"city": "Paris"})


@each_way
def test_a_stop_string_ends_content_where_there_are_tools(client: openai.OpenAI, stream: bool):
    free = ask(client, stream, FRANCE, tools=TOOLS)["message"]["content"]
    for stop in ("Paris", "is", " of Fr"):
        choice = ask(client, stream, FRANCE, tools=TOOLS, stop=[stop, "never"])
        assert choice["message"]["content"] == free.partition(stop)[0]
        assert choice["finish_reason"] == "stop"
        kept = ask(client, stream, FRANCE, tools=TOOLS, stop=stop, extra_body={"include_stop_str_in_output": True})
        assert kept["message"]["content"] == free.partition(stop)[0] + stop


def test_choices_stop_each_for_itself(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="tiny", messages=FRANCE, tools=TOOLS, n=4, temperature=1.2, seed=3, stop="a", max_tokens=40
    )
    assert all("a" not in (choice.message.content or "") for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 160
    after = client.chat.completions.create(model="tiny", messages=FRANCE, temperature=0, max_tokens=5)
    assert after.choices[0].message.content


@each_way
def test_a_call_required_of_one_who_reasons_ends_at_a_stop_string_in_the_reasoning(client: openai.OpenAI, stream: bool):
    free = ask(client, stream, SUM, extra_body=THINK)["message"]["reasoning_content"]
    choice = ask(client, stream, SUM, tools=TOOLS, tool_choice="required", stop="So", extra_body=THINK)
    assert choice["message"]["reasoning_content"] == free.partition("So")[0]
    assert choice["finish_reason"] == "stop"
    assert not choice["message"].get("tool_calls")


def test_the_page_s_examples_work(tiny_url: str, capsys: pytest.CaptureFixture[str]):
    """Run every Python block of docs/tools.md; each prints what the following block shows."""
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    page = page.partition("\n## Offline\n")[0]  # test_llm_chat.py runs that part
    names: dict[str, Any] = {}
    blocks = re.findall(r"```(python|text)\n(.*?)```", page, re.DOTALL)
    assert [kind for kind, _ in blocks].count("python") >= 4
    for kind, block in blocks:
        if kind == "python":
            exec(block.replace("http://127.0.0.1:30000", tiny_url), names)
        else:
            assert capsys.readouterr().out == block
