"""Test Anthropic's API with the official client and raw requests against live servers.

The client's own models validate answers strictly, and the answers are compared with those of OpenAI's API to the same
conversation.

.venv/bin/python -m pytest -q tests/e2e/test_api_anthropic.py
"""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import msgspec
import pydantic
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic_calls import (
    FRANCE,
    PARIS,
    SUM,
    THINK,
    TOOLS,
    body_of,
    each_way,
)
from hypothesis import given
from hypothesis import strategies as st
from pages import run_examples

from dovetail.interfaces.api import Acceptance, ChatDelta, Choice, Delta, Usage
from dovetail.interfaces.parsers import CallDelta
from dovetail.types import FinishKind, FinishReason
from dovetail_apis.anthropic.format import MessageFormat
from dovetail_apis.anthropic.types import MessageParam, MessagesRequest

EVENTS = pydantic.TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def client(tiny_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny_url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, stream: bool, messages: list[dict[str, Any]], **given: Any) -> Message:
    """Return the message, whole or accumulated by the client."""
    given = {"model": "tiny", "max_tokens": 120, "messages": messages, "extra_body": {"temperature": 0}, **given}
    if not stream:
        return client.messages.create(**given)
    with client.messages.stream(**given) as events:
        return events.get_final_message()


def shown_fields(message: Message) -> dict[str, Any]:
    """Return the fields that are the same in every run: no ids, and no number of cached tokens."""
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
    """Return all events, which are strictly valid except pings. The event line has the same name as the data."""
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
    """https://platform.claude.com/docs/en/build-with-claude/streaming: check the order of events and their sum."""
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
    """Imitate a generation that has ended: one choice, divided into steps."""

    rid, usage = "msg_1", Usage(7, 5, 3, Acceptance())

    def __init__(self, parts: list[ChatDelta]) -> None:
        calls = sum(call.id is not None for part in parts for call in part.calls)
        finish = FinishReason(FinishKind.STOP)
        self.choices = [Choice(0, [1] * 7, token_ids=[1] * 5, finish=finish, parts=parts, calls=calls)]


def chat_parts(drawn: list[Any]) -> list[ChatDelta]:
    """Return the drawn parts of a chat. Calls have their index, and their arguments in the drawn number of fragments."""
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


def test_adjacent_messages_of_one_role_are_one_turn(client: anthropic.Anthropic):
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


def test_the_page_s_examples_work(tiny_url: str, capsys: pytest.CaptureFixture[str]):
    run_examples("apis.md", "Anthropic", tiny_url, capsys, at_least=2)["client"].close()
