"""Test errors of Anthropic's API: refused requests, clients that disconnect, and an engine that dies.

.venv/bin/python -m pytest -q tests/e2e/test_api_anthropic_errors.py
"""

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.beta_error_response import BetaErrorResponse
from anthropic_calls import CITY, FRANCE, PATIENCE, THINK, TOOLS, WEATHER, body_of, each_way, eventually
from fake_engine import run_fake_engine

from dovetail.config import Config
from dovetail.server.launch import running_server

QUIET = Config.model_validate({"server": {"port": 0, "log_level": "error"}})


@pytest.fixture(scope="module")
def client(tiny_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tiny_url, api_key="none", max_retries=0) as client:
        yield client


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
