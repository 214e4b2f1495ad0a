"""Anthropic's API: the official client and raw requests against live servers. What is answered is validated strictly by the
client's own models, and compared with what OpenAI's API answers to the same conversation.

.venv/bin/python -m pytest -q tests/e2e/test_api_anthropic.py
"""

import asyncio
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import msgspec
import pydantic
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.beta_error_response import BetaErrorResponse
from fake_engine import run_fake_engine
from hypothesis import given
from hypothesis import strategies as st
from pages import run_examples

from dovetail.config import Config
from dovetail.interfaces.api import ChatDelta, Choice, Delta, Usage
from dovetail.interfaces.parsers import CallDelta
from dovetail.server.launch import running_server
from dovetail.types import Acceptance, FinishKind, FinishReason
from dovetail_apis.anthropic.format import MessageFormat
from dovetail_apis.anthropic.types import MessageParam, MessagesRequest

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 2 + 3?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "minLength": 1, "maxLength": 20}}}
CITY |= {"required": ["city"], "additionalProperties": False}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city", "input_schema": CITY}
ADD = {"name": "add", "description": "Add two numbers", "input_schema": NUMBERS, "cache_control": {"type": "ephemeral"}}
TOOLS = [WEATHER, ADD]
THINK = {"type": "enabled", "budget_tokens": 1024}
EVENTS = pydantic.TypeAdapter(RawMessageStreamEvent)
PATIENCE = 30.0
QUIET = Config.model_validate({"server": {"port": 0, "log_level": "error"}})

each_way = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def client(tiny_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny_url, api_key="none", max_retries=0) as client:
        yield client


def body_of(messages: list[dict[str, Any]], **given: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 120, "temperature": 0, "messages": messages, **given}


def ask(client: anthropic.Anthropic, stream: bool, messages: list[dict[str, Any]], **given: Any) -> Message:
    """The message, whole or put together by the client."""
    given = {"model": "tiny", "max_tokens": 120, "messages": messages, "extra_body": {"temperature": 0}, **given}
    if not stream:
        return client.messages.create(**given)
    with client.messages.stream(**given) as events:
        return events.get_final_message()


def shown_fields(message: Message) -> dict[str, Any]:
    """What does not differ from one time to the next: neither ids, nor what the cache held."""
    shown = message.model_dump(include={"content", "stop_reason", "stop_sequence"}, exclude_none=True)
    blocks = [{k: v for k, v in block.items() if k not in ("id", "parsed_output")} for block in shown["content"]]
    usage = message.usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return {**shown, "content": blocks, "tokens": (total, usage.output_tokens)}


def text_of(message: Message) -> str:
    assert [block.type for block in message.content] == ["text"]
    return message.content[0].text


def openai_chat(http: httpx.Client, messages: list[dict[str, Any]], **given: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 120, **given}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Every event but pings, strictly valid; named in its line as in its data."""
    answer = http.post("/v1/messages", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = re.fullmatch(r"event: (.*)\ndata: (.*)", block).groups()
        event = json.loads(data)
        assert event["type"] == name
        if name != "ping":
            EVENTS.validate_json(data, strict=True)
        found.append(event)
    return found


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def test_a_message(client: anthropic.Anthropic, tiny: httpx.Client):
    message = ask(client, False, FRANCE)
    reference = openai_chat(tiny, FRANCE)
    assert text_of(message) == reference["choices"][0]["message"]["content"]
    assert "Paris" in text_of(message)
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "tiny",
        "end_turn",
        None,
    )
    assert shown_fields(message)["tokens"] == (
        reference["usage"]["prompt_tokens"],
        reference["usage"]["completion_tokens"],
    )
    assert message.id.startswith("msg_")
    assert message._request_id == message.id
    raw = tiny.post("/v1/messages", json=body_of(FRANCE))
    assert shown_fields(Message.model_validate_json(raw.content, strict=True)) == shown_fields(message)


def test_the_events_of_a_stream(tiny: httpx.Client):
    """https://platform.claude.com/docs/en/build-with-claude/streaming: their order, and that they add up."""
    events = events_of(tiny, **body_of(SUM, thinking=THINK))
    names = [event["type"] for event in events]
    assert names[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    text = " ".join(name for name in names if name != "ping")
    block = "content_block_start( content_block_delta)+ content_block_stop"
    assert re.fullmatch(f"message_start {block} {block} message_delta message_stop", text)
    whole = tiny.post("/v1/messages", json=body_of(SUM, thinking=THINK)).json()
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""}]
    deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    for i, (kind, field) in enumerate([("thinking_delta", "thinking"), ("text_delta", "text")]):
        said = [delta[field] for index, delta in deltas if index == i and delta["type"] == kind]
        assert "".join(said) == whole["content"][i][field]
        assert len(said) > 3
        assert all(said)
    assert [delta for index, delta in deltas if index == 0][-1]["type"] == "signature_delta"
    last = events[-2]
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


PARTS = st.one_of(
    st.builds(ChatDelta, reasoning=st.text()),
    st.builds(ChatDelta, content=st.text()),
    st.tuples(st.integers(0, 3), st.text("ab")),
)


class Ended:
    """What a generation is at its end: one choice, cut into steps as it came."""

    rid, usage = "msg_1", Usage(7, 5, 3, Acceptance())

    def __init__(self, parts: list[ChatDelta]) -> None:
        calls = sum(call.id is not None for part in parts for call in part.calls)
        finish = FinishReason(FinishKind.STOP)
        self.choices = [Choice(0, [1] * 7, token_ids=[1] * 5, finish=finish, parts=parts, calls=calls)]


def chat_parts(drawn: list[Any]) -> list[ChatDelta]:
    """Calls have the index of their place, and their arguments in as many fragments as was drawn."""
    parts: list[ChatDelta] = []
    calls = itertools.count()
    for one in drawn:
        if isinstance(one, ChatDelta):
            parts.append(one)
            continue
        index, (fragments, value) = next(calls), one
        text = json.dumps({"key": value * fragments})
        cuts = [text[i : i + 4] for i in range(0, len(text), 4)]
        parts.append(ChatDelta(calls=(CallDelta(index, f"call_{index}", "f"),)))
        parts += [ChatDelta(calls=(CallDelta(index, arguments=cut),)) for cut in cuts]
    return parts


@given(st.lists(PARTS), st.integers(1, 5))
def test_a_stream_adds_up_to_the_whole_as_the_client_adds_it(drawn: list[Any], size: int):
    parts = chat_parts(drawn)
    ended: Any = Ended(parts)
    body = MessagesRequest(model="tiny", max_tokens=9, messages=[MessageParam(role="user", content="x")])
    formatter = MessageFormat("tiny", body, ended)
    steps = [parts[i : i + size] for i in range(0, len(parts), size)]
    data = formatter.head() + b"".join(formatter.deltas([Delta(ended.choices[0], "", [], [], None, s)]) for s in steps)
    snapshot, buffers = None, {}
    for line in (data + formatter.tail()).decode().split("\n"):
        if line.startswith("data: ") and "ping" not in line[:20]:
            event = EVENTS.validate_json(line[6:], strict=True)
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    whole = Message.model_validate_json(
        msgspec.json.encode(MessageFormat("tiny", body, ended).whole(ended)), strict=True
    )
    assert shown_fields(snapshot) == shown_fields(whole)
    assert "".join(b.text for b in whole.content if b.type == "text") == "".join(part.content for part in parts)
    assert [b.id for b in whole.content if b.type == "tool_use"] == [c.id for p in parts for c in p.calls if c.id]


@each_way
def test_system_and_turns_as_text_and_as_blocks(client: anthropic.Anthropic, tiny: httpx.Client, stream: bool):
    def blocks(text: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]

    turns = [("user", "My name is Anna."), ("assistant", "Hello Anna."), ("user", "What is my name?")]
    plain = [{"role": role, "content": text} for role, text in turns]
    boxed = [{"role": role, "content": blocks(text)} for role, text in turns]
    reference = openai_chat(tiny, [{"role": "system", "content": "Be brief."}, *plain])
    for system, messages in (("Be brief.", plain), (blocks("Be brief."), boxed)):
        message = ask(client, stream, messages, system=system)
        assert text_of(message) == reference["choices"][0]["message"]["content"]
        assert shown_fields(message)["tokens"][0] == reference["usage"]["prompt_tokens"]


def test_neighbours_of_one_role_are_one_turn(client: anthropic.Anthropic):
    def count(messages: list[dict[str, Any]]) -> int:
        return client.messages.count_tokens(model="tiny", messages=messages).input_tokens

    split = [{"role": "user", "content": "one"}, {"role": "user", "content": [{"type": "text", "text": "two"}]}]
    assert count(split) == count([{"role": "user", "content": "one\n\ntwo"}])
    said = [{"role": "assistant", "content": text} for text in ("a", "b")]
    assert count([*FRANCE, *said, *SUM]) == count([*FRANCE, {"role": "assistant", "content": "ab"}, *SUM])


def only_call(message: Message) -> tuple[str, object]:
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["tool_use"]
    return message.content[0].name, message.content[0].input


@each_way
def test_tools(client: anthropic.Anthropic, stream: bool):
    assert only_call(ask(client, stream, PARIS, tools=TOOLS)) == ("get_weather", {"city": "Paris"})
    answer = ask(client, stream, FRANCE, tools=TOOLS, tool_choice={"type": "auto"})
    assert (answer.stop_reason, "Paris" in text_of(answer)) == ("end_turn", True)
    none = ask(client, stream, PARIS, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=20)
    assert shown_fields(none) == shown_fields(ask(client, stream, PARIS, max_tokens=20))
    for name in ("add", "get_weather"):
        called = ask(client, stream, FRANCE, tools=TOOLS, tool_choice={"type": "tool", "name": name})
        assert only_call(called)[0] == name
    once = {"type": "any", "disable_parallel_tool_use": True}
    name, given = only_call(ask(client, stream, FRANCE, tools=TOOLS, tool_choice=once))
    assert isinstance(given, dict)
    assert set(given) == ({"a", "b"} if name == "add" else {"city"})


def test_the_input_of_a_call_arrives_in_fragments(tiny: httpx.Client):
    events = events_of(tiny, **body_of(PARIS, tools=TOOLS))
    (start,) = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert (start["type"], start["name"], start["input"]) == ("tool_use", "get_weather", {})
    parts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {part["type"] for part in parts} == {"input_json_delta"}
    assert len(parts) > 2
    assert "".join(part["partial_json"] for part in parts) == '{"city": "Paris"}'


@each_way
def test_the_result_goes_back_into_the_conversation(client: anthropic.Anthropic, tiny: httpx.Client, stream: bool):
    made = ask(client, stream, PARIS, tools=TOOLS)
    (call,) = made.content
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": '{"weather": "sunny"}'}],
    }
    talk = [*PARIS, made.to_param(), {"role": "user", "content": [result]}]
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    shown = [{"name": t["name"], "description": t["description"], "parameters": t["input_schema"]} for t in TOOLS]
    reference = openai_chat(
        tiny,
        [
            *PARIS,
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c", "content": '{"weather": "sunny"}'},
        ],
        tools=[{"type": "function", "function": function} for function in shown],
    )
    answer = ask(client, stream, talk, tools=TOOLS)
    assert text_of(answer) == reference["choices"][0]["message"]["content"]
    assert shown_fields(answer)["tokens"][0] == reference["usage"]["prompt_tokens"]


def test_arguments_that_break_off(client: anthropic.Anthropic):
    message = ask(client, False, PARIS, tools=TOOLS, max_tokens=16)
    assert message.stop_reason == "max_tokens"
    (block,) = message.content
    assert (block.type, block.name) == ("tool_use", "get_weather")
    assert block.input in ({}, {"city": "Paris"})


@each_way
def test_why_it_stopped(client: anthropic.Anthropic, stream: bool):
    free = text_of(ask(client, stream, FRANCE))
    stopped = ask(client, stream, FRANCE, stop_sequences=["never", " of Fr"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " of Fr")
    assert text_of(stopped) == free.partition(" of Fr")[0]
    with_tools = ask(client, stream, FRANCE, stop_sequences=[" of Fr"], tools=TOOLS)
    assert (with_tools.stop_reason, with_tools.stop_sequence) == ("stop_sequence", " of Fr")
    short = ask(client, stream, FRANCE, max_tokens=3)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    assert free.startswith(text_of(short))


def test_the_context_bounds_what_max_tokens_leaves(fake: httpx.Client):
    body = body_of([{"role": "user", "content": "one"}], max_tokens=100_000)
    counted = fake.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": body["messages"]}).json()
    answer = fake.post("/v1/messages", json=body).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 2048
    assert answer["usage"]["input_tokens"] == counted["input_tokens"]


@each_way
def test_max_tokens_0_fills_the_cache(client: anthropic.Anthropic, stream: bool):
    question = [{"role": "user", "content": f"A prefix worth keeping, {stream}. " * 20}]
    empty = ask(client, stream, question, max_tokens=0)
    assert (empty.content, empty.stop_reason, empty.usage.output_tokens) == ([], "max_tokens", 0)
    assert empty.usage.cache_read_input_tokens == 0
    usage = ask(client, stream, question, max_tokens=1).usage
    assert usage.cache_read_input_tokens > 100
    assert usage.input_tokens + usage.cache_read_input_tokens == empty.usage.input_tokens


@each_way
def test_thinking(client: anthropic.Anthropic, tiny: httpx.Client, stream: bool):
    reference = openai_chat(tiny, SUM, chat_template_kwargs={"enable_thinking": True})["choices"][0]["message"]
    for how in (THINK, {"type": "adaptive"}):
        thought, said = ask(client, stream, SUM, thinking=how).content
        assert (thought.type, thought.thinking) == ("thinking", reference["reasoning_content"])
        assert (said.type, said.text) == ("text", reference["content"])
        assert thought.signature
    hidden, said = ask(client, stream, SUM, thinking={"type": "adaptive", "display": "omitted"}).content
    assert (hidden.type, hidden.thinking, said.text) == ("thinking", "", reference["content"])
    off = ask(client, stream, SUM, thinking={"type": "disabled"})
    assert shown_fields(off) == shown_fields(ask(client, stream, SUM))
    assert "think" not in text_of(off)
    talk = [*SUM, {"role": "assistant", "content": [thought, said]}, *FRANCE]
    assert "Paris" in text_of(ask(client, stream, talk))


class Person(pydantic.BaseModel):
    name: str
    age: int


@each_way
def test_a_schema(client: anthropic.Anthropic, stream: bool):
    question = [{"role": "user", "content": "Extract the name and the age as JSON: Anna is 31 years old."}]
    given = {
        "model": "tiny",
        "max_tokens": 100,
        "messages": question,
        "output_format": Person,
        "extra_body": {"temperature": 0},
    }
    if stream:
        with client.messages.stream(**given) as events:
            message = events.get_final_message()
    else:
        message = client.messages.parse(**given)
    assert message.parsed_output == Person(name="Anna", age=31)


def test_an_answer_that_was_begun(client: anthropic.Anthropic):
    free = text_of(ask(client, False, FRANCE))
    begun = free[: len(free) // 2].rstrip()
    message = ask(client, True, [*FRANCE, {"role": "assistant", "content": begun}])
    assert begun + text_of(message) == free


def test_counting(client: anthropic.Anthropic, tiny: httpx.Client):
    for more in ({}, {"system": "Be brief."}, {"tools": TOOLS}, {"thinking": THINK}):
        counted = client.messages.count_tokens(model="tiny", messages=FRANCE, **more)
        assert counted.input_tokens == shown_fields(ask(client, False, FRANCE, max_tokens=1, **more))["tokens"][0]
    raw = tiny.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": FRANCE})
    MessageTokensCount.model_validate_json(raw.content, strict=True)


def test_what_changes_nothing(client: anthropic.Anthropic):
    free = shown_fields(ask(client, False, FRANCE))
    more = {"cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "me"}, "service_tier": "auto"}
    more |= {"output_config": {"effort": "low"}, "system": [], "tools": [], "stop_sequences": []}
    assert shown_fields(ask(client, False, FRANCE, **more)) == free


def test_sampling(tiny: httpx.Client):
    def text(**given: Any) -> str:
        body = body_of([{"role": "user", "content": "Write a short story about a fox."}], max_tokens=16, **given)
        return tiny.post("/v1/messages", json=body).json()["content"][0]["text"]

    assert text(temperature=2.0, seed=1) == text(temperature=2.0, seed=1) != text(temperature=2.0, seed=2)
    assert text(temperature=1.0, top_k=1) == text(temperature=1.0, top_p=1e-6) == text()


def block(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [fields]}]


PIXEL = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens is None"),
        ({"max_tokens": "5"}, "max_tokens is '5'"),
        ({"temperature": -1}, "temperature"),
        ({"nonsense": 1}, "nonsense is not a field"),
        ({"container": "c"}, "container is not supported"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": block(type="image", source=PIXEL)}, "messages.0.content.0 is a block of type 'image'"),
        ({"messages": block(type="document", source=PIXEL)}, "block of type 'document'"),
        ({"messages": block(type="text")}, "messages.0.content.0: text is missing"),
        ({"messages": block(type="text", text="x", colour="red")}, "messages.0.content.0: colour"),
        ({"messages": block(type=["text"])}, "messages.0.content.0"),
        ({"messages": block(type="tool_result", tool_use_id="t1", content="x")}, "'t1'"),
        ({"messages": [*FRANCE, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]}, "tool_result"),
        ({"messages": [*FRANCE, {"role": "assistant", "content": "It"}], "thinking": THINK}, "thinking"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "tools.0: input_schema is missing"),
        ({"tools": [{"name": "no spaces", "input_schema": CITY}]}, "tools.0"),
        ({"tools": [WEATHER, WEATHER]}, "twice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "fly"}}, "'fly'"),
        ({"tools": TOOLS, "tool_choice": {"type": "any", "name": "add"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "nonsense"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "2048"),
    ],
)  # fmt: skip
def test_what_is_refused(tiny: httpx.Client, change: dict[str, Any], words: str):
    for stream in (False, True):
        answer = tiny.post("/v1/messages", json={**body_of(FRANCE), "stream": stream, **change})
        assert answer.status_code == 400, answer.text
        error = BetaErrorResponse.model_validate_json(answer.content, strict=True)
        assert error.error.type == "invalid_request_error"
        assert words in error.error.message


def test_other_errors(fake: httpx.Client):
    def error(answer: httpx.Response, status: int, kind: str) -> str:
        assert answer.status_code == status, answer.text
        found = answer.json()
        assert found.keys() == {"type", "error", "request_id"}
        assert found["error"].keys() == {"type", "message"}
        assert (found["type"], found["error"]["type"]) == ("error", kind)
        return found["error"]["message"]

    good = body_of(FRANCE)
    post = fake.post
    assert "JSON" in error(post("/v1/messages", content=b'{"model": "tiny"'), 400, "invalid_request_error")
    assert "claude-9" in error(post("/v1/messages", json=good | {"model": "claude-9"}), 404, "not_found_error")
    assert "missing" in error(post("/v1/messages", json={"model": "tiny"}), 400, "invalid_request_error")
    error(fake.get("/v1/messages"), 405, "invalid_request_error")
    error(post("/v1/messages/batches", json={}), 404, "not_found_error")
    error(post("/v1/messages", json=good | {"system": "x" * 2**21}), 413, "request_too_large")
    for status, kind in ((400, "invalid_request_error"), (503, "overloaded_error")):
        for stream in (False, True):
            body = good | {"cache_salt": f"status:{status}", "stream": stream}
            assert "scripted refusal" in error(post("/v1/messages", json=body), status, kind)


def test_errors_of_the_client(client: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError, match="claude-9"):
        client.messages.create(model="claude-9", max_tokens=5, messages=FRANCE)
    with pytest.raises(anthropic.BadRequestError, match="nonsense") as caught:
        client.messages.create(model="tiny", max_tokens=5, messages=FRANCE, extra_body={"nonsense": 1})
    assert caught.value.type == "invalid_request_error"


@each_way
def test_a_client_that_leaves_frees_its_pages(fake: httpx.Client, stream: bool):
    body = body_of(FRANCE, max_tokens=2000, cache_salt="slow", stream=stream)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=fake.base_url, timeout=PATIENCE) as http:
            task = asyncio.ensure_future(http.post("/v1/messages", json=body))
            while (await http.get("/server_info")).json()["stats"]["running"] != 1:
                await asyncio.sleep(0.01)
            task.cancel()

    asyncio.run(leave())
    eventually(lambda: fake.get("/server_info").json()["stats"]["running"] == 0)
    assert fake.get("/server_info").json()["open_requests"] == 0


def test_a_message_that_is_aborted_is_an_error(fake_url: str, fake: httpx.Client):
    given = {"model": "tiny", "max_tokens": 2000, "messages": FRANCE, "extra_body": {"cache_salt": "slow"}}
    with anthropic.Anthropic(base_url=fake_url, api_key="none", max_retries=0) as client:
        events = client.messages.create(stream=True, **given)
        first = next(events)
        assert fake.post("/abort_request", json={"rid": first.message.id}).json() == {"aborted": True}
        with pytest.raises(anthropic.APIStatusError, match="aborted"):
            list(events)


def test_when_the_engine_dies():
    with (
        running_server(QUIET, target=run_fake_engine) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        given = {"model": "tiny", "max_tokens": 2000, "messages": FRANCE, "extra_body": {"cache_salt": "slow"}}
        failed: list[Exception] = []

        def whole() -> None:
            with pytest.raises(anthropic.APIStatusError) as caught:
                client.messages.create(**given)
            failed.append(caught.value)

        thread = threading.Thread(target=whole)
        thread.start()
        events = client.messages.create(stream=True, **given)
        assert [event.type for event in itertools.islice(events, 2)] == ["message_start", "content_block_start"]
        eventually(lambda: http.get("/server_info").json()["stats"]["running"] == 2)
        os.kill(http.get("/server_info").json()["engine_pid"], signal.SIGKILL)
        with pytest.raises(anthropic.APIStatusError, match="engine process has ended") as caught:
            list(events)
        thread.join(PATIENCE)
        assert caught.value.type == failed[0].type == "overloaded_error"
        assert failed[0].status_code == 503
        with pytest.raises(anthropic.APIStatusError, match="engine process has ended"):
            client.messages.create(model="tiny", max_tokens=5, messages=FRANCE)


def test_the_page_s_examples_work(tiny_url: str, capsys: pytest.CaptureFixture[str]):
    run_examples("apis.md", "Anthropic", tiny_url, capsys, at_least=2)["client"].close()
