"""Test OpenAI's responses with the official client against live servers. Its own models validate every answer and event
strictly.

.venv/bin/python -m pytest -q tests/e2e/test_server_responses.py
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pages import run_examples

from dovetail.config.checkpoint import locate
from dovetail.tokenizer import Tokenizer

TINY = Tokenizer.from_dir(locate("tiny"))
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
CITY = {"type": "string", "minLength": 1, "maxLength": 20}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False},
}
PARIS = "What is the weather in Paris?"


@pytest.fixture(scope="module")
def client(tiny_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def echo(fake_url: str) -> Iterator[openai.OpenAI]:
    """Return a client of a server that echoes the prompt."""
    with openai.OpenAI(base_url=f"{fake_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def make(client: openai.OpenAI, given: Any, **more: Any) -> Response:
    """Create a whole response, and check that it is valid and the same when it is fetched."""
    made = client.responses.create(**{"model": "tiny", "input": given, "temperature": 0, **more})
    Response.model_validate(made.model_dump(by_alias=True), strict=True)
    if more.get("store") is not False and not more.get("background"):
        assert client.responses.retrieve(made.id) == made
    return made


def events_of(client: openai.OpenAI, given: Any, **more: Any) -> list[dict[str, Any]]:
    """Return all events of a stream. Each of them is valid, and their numbers have no gaps."""
    asked = {"model": "tiny", "input": given, "temperature": 0, "stream": True, **more}
    with client.responses.with_streaming_response.create(**asked) as answer:
        return read_events(answer.read().decode())


def read_events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENTS.validate_python(event, strict=True)
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def names(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of the events, with each run of deltas as one."""
    short = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(short) if not (name.endswith(".delta") and short[i - 1] == name)]


MESSAGE = "output_item.added content_part.added output_text.delta output_text.done content_part.done output_item.done"
REASONED = MESSAGE.replace("output_text", "reasoning_text")
CALLED = "output_item.added function_call_arguments.delta function_call_arguments.done output_item.done"


def check_stream(events: list[dict[str, Any]], *items: str, end: str = "completed") -> dict[str, Any]:
    """Check that the events are those of ``items`` in OpenAI's order, and that they add up to the response of the last
    one."""
    assert names(events) == f"created in_progress {' '.join(items)} {end}".split()
    final = events[-1]["response"]
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
            assert event["item_id"] == final["output"][event["output_index"]]["id"]
    whole = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in final["output"]]
    assert [texts[i] for i in range(len(whole))] == whole
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == final["output"]
    assert final["status"] == end
    return final


def without(response: dict[str, Any]) -> Any:
    """Return the fields that two answers to the same request have in common."""
    text = json.dumps(response["output"])
    for item in response["output"]:
        for key in ("id", "call_id"):
            text = text.replace(item.get(key, "-"), key)
    return json.loads(text), response["usage"]["output_tokens"], response["status"], response["incomplete_details"]


def test_text(client: openai.OpenAI):
    made = make(client, "What is the capital of France?", instructions="Answer briefly.", metadata={"a": "b"})
    assert "Paris" in made.output_text
    assert (made.status, made.metadata, made.instructions) == ("completed", {"a": "b"}, "Answer briefly.")
    talk = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    chat = client.chat.completions.create(model="tiny", messages=talk, temperature=0)
    assert made.output_text == chat.choices[0].message.content
    assert made.usage
    assert (made.usage.input_tokens, made.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    again = make(client, "What is the capital of France?", instructions="Answer briefly.")
    assert again.usage
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert again.usage.output_tokens_details.reasoning_tokens == 0


def test_stream_of_text(client: openai.OpenAI):
    made = make(client, "What is the capital of France?")
    final = check_stream(events_of(client, "What is the capital of France?"), MESSAGE)
    assert without(final) == without(made.to_dict())
    assert client.responses.retrieve(final["id"]).output_text == made.output_text


def test_the_client_s_own_stream_helper(client: openai.OpenAI):
    with client.responses.stream(model="tiny", input=PARIS, temperature=0, tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output[0].type == "function_call"
    assert json.loads(final.output[0].arguments) == {"city": "Paris"}


def test_length(echo: openai.OpenAI):
    made = make(echo, "one two three four", max_output_tokens=3)
    assert made.status == "incomplete"
    assert made.incomplete_details
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete"
    final = check_stream(events_of(echo, "one two three four", max_output_tokens=3), MESSAGE, end="incomplete")
    assert without(final) == without(made.to_dict())


def test_a_call_and_its_result(client: openai.OpenAI):
    first = make(client, PARIS, tools=[WEATHER])
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Paris"}, "completed")
    check_stream(events_of(client, PARIS, tools=[WEATHER]), CALLED)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'}
    gone_on = make(client, [result], tools=[WEATHER], previous_response_id=first.id)
    stateless = make(client, [{"role": "user", "content": PARIS}, *first.output, result], tools=[WEATHER], store=False)
    assert gone_on.output_text == stateless.output_text
    assert gone_on.previous_response_id == first.id
    items = client.responses.input_items.list(gone_on.id, order="asc")
    assert [item.type for item in items.data] == ["message", "function_call", "function_call_output"]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
    ids=["required", "named", "allowed"],
)
def test_a_call_that_must_be(client: openai.OpenAI, choice: Any):
    add = {**WEATHER, "name": "add", "parameters": {"type": "object", "additionalProperties": False}}
    made = make(
        client, "Hello", tools=[WEATHER, add], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=80
    )
    (call,) = made.output
    assert call.type == "function_call"
    assert choice == "required" or call.name == "get_weather"
    assert not make(client, PARIS, tools=[WEATHER], tool_choice="none", max_output_tokens=8).tools[0].strict


def test_a_call_that_has_broken_off_does_not_end_the_conversation(client: openai.OpenAI):
    lengths = range(4, 30)
    made = (make(client, PARIS, tools=[WEATHER], tool_choice="required", max_output_tokens=n) for n in lengths)
    broken = next(one for one in made if any(item.type == "function_call" for item in one.output))
    assert broken.status == "incomplete"
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken.output[-1].arguments)
    assert make(client, "And now?", previous_response_id=broken.id, max_output_tokens=2).output


def test_reasoning(client: openai.OpenAI):
    made = make(client, "What is 2 + 3?", reasoning={"effort": "low"})
    reasoning, message = made.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert "5" in made.output_text
    assert "think" not in made.output_text
    assert made.usage
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    final = check_stream(events_of(client, "What is 2 + 3?", reasoning={"effort": "low"}), REASONED, MESSAGE)
    assert without(final) == without(made.to_dict())
    assert make(client, "What is 2 + 3?", reasoning={"effort": "none"}).output[0].type == "message"
    hidden = {"reasoning": {"effort": "low"}, "extra_body": {"include_reasoning": False}}
    quiet = make(client, "What is 2 + 3?", **hidden)
    assert quiet.usage
    assert quiet.usage.output_tokens == made.usage.output_tokens
    assert [item.type for item in quiet.output] == ["message"]
    assert without(check_stream(events_of(client, "What is 2 + 3?", **hidden), MESSAGE)) == without(quiet.to_dict())
    make(client, [*made.output, {"role": "user", "content": "Sure?"}], max_output_tokens=4)


def test_a_format_is_enforced(client: openai.OpenAI):
    class Capital(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=10)
        big: bool

    parsed = client.responses.parse(model="tiny", input="What is the capital of France?", text_format=Capital)
    assert isinstance(parsed.output_parsed, Capital)
    made = make(client, "Tell me.", text={"format": {"type": "json_object"}}, max_output_tokens=60)
    assert made.output_text.lstrip().startswith("{")
    assert made.text
    assert made.text.format.type == "json_object"


def test_logprobs(echo: openai.OpenAI):
    made = make(echo, "one two", include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = made.output[0].content
    assert "".join(entry.token for entry in part.logprobs if not entry.token.startswith("<|")) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    events = events_of(echo, "one two", top_logprobs=2)
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert streamed == [entry.model_dump() for entry in part.logprobs]


def test_forms_of_input_that_mean_the_same(echo: openai.OpenAI):
    said = make(echo, "hello").output_text
    assert said == "user\nhello\nassistant\n"
    parts = [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]
    for item in (
        {"role": "user", "content": "hello"},
        {"type": "message", "role": "user", "content": parts, "id": None},
    ):
        assert make(echo, [item]).output_text == said
    turns = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    assert make(echo, turns).output_text == f"system\nBe kind.\n{said}"
    assert make(echo, "hello", instructions="Be kind.").output_text == f"system\nBe kind.\n{said}"


def test_instructions_are_not_carried_over(echo: openai.OpenAI):
    first = make(echo, "hello", instructions="Be kind.")
    second = make(echo, "again", previous_response_id=first.id)
    talk = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "again"},
    ]
    assert second.output_text == make(echo, talk).output_text


def test_items_by_page(echo: openai.OpenAI, fake: httpx.Client):
    talk = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(5)]
    made = make(echo, talk)
    path = f"/v1/responses/{made.id}/input_items"
    for order in ("asc", "desc"):
        pages = [
            ResponseItemList.model_validate(fake.get(path, params={"order": order, "limit": 2}).json(), strict=True)
        ]
        while pages[-1].has_more:
            more = {"order": order, "limit": 2, "after": pages[-1].last_id}
            pages.append(ResponseItemList.model_validate(fake.get(path, params=more).json(), strict=True))
        texts = [item.content[0].text for page in pages for item in page.data]
        assert texts == [f"turn {i}" for i in range(5)][:: 1 if order == "asc" else -1]
    assert len(list(echo.responses.input_items.list(made.id))) == 5
    for bad in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "none"}, {"colour": "red"}):
        assert fake.get(path, params=bad).status_code == 400


def test_not_stored_or_deleted_is_gone(echo: openai.OpenAI):
    kept, gone = make(echo, "one"), make(echo, "one", store=False)
    echo.responses.delete(kept.id)
    for made in (kept, gone):
        for ask in (
            echo.responses.retrieve,
            echo.responses.cancel,
            echo.responses.delete,
            echo.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError, match="no response"):
                ask(made.id)
        with pytest.raises(openai.NotFoundError, match="no response"):
            make(echo, "two", previous_response_id=made.id)


def until_done(client: openai.OpenAI, rid: str) -> Response:
    for _ in range(200):
        found = client.responses.retrieve(rid)
        Response.model_validate(found.model_dump(by_alias=True), strict=True)
        if found.status != "in_progress":
            return found
        time.sleep(0.02)
    raise AssertionError(f"{rid} never ends")


def test_background(echo: openai.OpenAI):
    made = make(echo, "one two three", background=True, extra_body={"cache_salt": "slow"})
    assert (made.status, made.background, made.usage) == ("in_progress", True, None)
    assert echo.responses.retrieve(made.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="has not finished yet"):
        make(echo, "two", previous_response_id=made.id)
    done = until_done(echo, made.id)
    assert (done.status, done.output_text) == ("incomplete", "user\none two three\nassistant\n")


def test_cancel(echo: openai.OpenAI, fake: httpx.Client):
    made = make(echo, "one " * 300, background=True, extra_body={"cache_salt": "slow"})
    time.sleep(0.1)
    ended = echo.responses.cancel(made.id)
    assert ended.status == "cancelled"
    assert 0 < len(ended.output_text) < 600
    assert echo.responses.cancel(made.id) == ended == echo.responses.retrieve(made.id)
    slow = {"extra_body": {"cache_salt": "slow"}}
    with echo.responses.create(model="tiny", input="one " * 300, background=True, stream=True, **slow) as stream:
        rid = next(iter(stream)).response.id
        echo.responses.cancel(rid)
        *_, last = stream
    assert (last.type, last.response.status, last.response.id) == ("response.incomplete", "cancelled", rid)
    with pytest.raises(openai.BadRequestError, match="background"):
        echo.responses.cancel(make(echo, "one").id)
    running = make(echo, "one " * 300, background=True, extra_body={"cache_salt": "slow"})
    echo.responses.delete(running.id)
    for _ in range(100):
        if fake.get("/server_info").json()["stats"]["running"] == 0:
            return
        time.sleep(0.02)
    pytest.fail("a cancelled response still runs")


def test_a_background_stream_can_be_taken_up_again(echo: openai.OpenAI, fake: httpx.Client):
    slow = {"extra_body": {"cache_salt": "slow"}}
    with echo.responses.create(
        model="tiny", input="one two three four", background=True, stream=True, **slow
    ) as stream:
        first = [event for event, _ in zip(stream, range(5), strict=False)]
    rid = first[0].response.id
    rest = [event.to_dict() for event in echo.responses.retrieve(rid, stream=True, starting_after=3)]
    whole = read_events(fake.get(f"/v1/responses/{rid}", params={"stream": "true"}).text)
    assert rest == whole[4:]
    check_stream(whole, MESSAGE, end="incomplete")
    with pytest.raises(openai.BadRequestError, match="no events"):
        echo.responses.retrieve(make(echo, "one").id, stream=True)


def test_what_fails_in_the_background_says_so(echo: openai.OpenAI):
    made = make(echo, "one", background=True, extra_body={"cache_salt": "status:503"})
    failed = until_done(echo, made.id)
    assert failed.status == "failed"
    assert failed.error
    assert failed.error.code == "server_error"
    with pytest.raises(openai.InternalServerError, match="scripted"):
        make(echo, "one", extra_body={"cache_salt": "status:503"})


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search', which this server does not host"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice", "get_weather"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools", "tools.0.name is 'a b'"),
        ({"input": [{"type": "computer_call"}]}, "input", "input.0 is of type 'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input.0.content.0 is of type"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input", "no function_call"),
        ({"input": []}, "input", "at least 1"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"background": True, "store": False}, "background", "store: true"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"colour": "red"}, "colour", "not a field"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused(fake: httpx.Client, change: dict[str, Any], param: str, words: str):
    answer = fake.post("/v1/responses", json={"input": "hi", **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_the_page_s_examples_work(tiny_url: str, capsys: pytest.CaptureFixture[str]):
    run_examples("apis.md", "OpenAI: responses", tiny_url, capsys)["client"].close()
