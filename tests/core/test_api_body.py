"""Test bodies of requests that arrive slowly, or that take long to parse.

Run: .venv/bin/python -m pytest -q tests/core/test_api_body.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from dovetail.api import body
from dovetail.api.problems import problem_of
from dovetail.bounded import MAX_ENTRIES
from dovetail.errors import RequestError
from dovetail_apis.openai.types import ChatCompletionRequest, CompletionRequest

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}


def trickle(pieces: int, pause: float):
    """Return what a client sends that pauses before each piece and sends another piece after the last."""
    left = pieces

    async def receive():
        nonlocal left
        await asyncio.sleep(pause)
        left -= 1
        return {"type": "http.request", "body": b"x", "more_body": left > 0}

    return receive


def read(receive) -> bytes:
    return asyncio.run(body.read_body(Request(SCOPE, receive), 1000))


def test_a_body_in_pieces():
    assert read(trickle(3, 0.0)) == b"xxx"


def test_a_body_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05)
    with pytest.raises(HTTPException) as refused:
        read(trickle(1000, 0.01))  # a few bytes at a time, without a long pause
    problem = problem_of(refused.value)
    assert (problem.status, problem.code) == (408, "request_timeout")
    assert "0.05 seconds" in problem.message


WRONG = 50_000
HOSTILE = {
    "lists": [[] for _ in range(WRONG)],
    "numbers": [1.5] * WRONG,
    "objects": [{} for _ in range(WRONG)],
    "members": {str(i): [] for i in range(2 * MAX_ENTRIES)},
}


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("field", ["stop", "logit_bias", "messages", "stream_options", "tool_choice", "tools"])
def test_of_a_million_wrong_entries_not_each_is_an_error(monkeypatch: pytest.MonkeyPatch, field: str, hostile: str):
    """To report each of them would take seconds, in which no other client is answered."""
    found = []
    monkeypatch.setattr(body, "_explain", lambda error, *_: found.append(error.error_count()) or RequestError("wrong"))
    with pytest.raises(RequestError):
        body.validate({"model": "m", "messages": [], field: HOSTILE[hostile]}, ChatCompletionRequest)
    assert found == [] or found[0] < 20


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize(
    "nest",
    [
        lambda wrong: {"messages": [{"role": "user", "content": wrong}]},
        lambda wrong: {"messages": [], "tool_choice": {"type": "function", "function": wrong}},
        lambda wrong: {"messages": [], "tools": [{"type": "function", "function": wrong}]},
        lambda wrong: {"messages": [], "tools": [wrong]},
        lambda wrong: {"messages": [wrong]},
    ],
)
def test_nor_where_they_are_inside_of_something(monkeypatch: pytest.MonkeyPatch, nest, hostile: str):
    found = []
    monkeypatch.setattr(body, "_explain", lambda error, *_: found.append(error.error_count()) or RequestError("wrong"))
    with contextlib.suppress(RequestError):  # the entries of content may be any objects
        body.validate({"model": "m", **nest(HOSTILE[hostile])}, ChatCompletionRequest)
    assert found == [] or found[0] < 20


def test_a_body_of_thousands_of_unknown_fields():
    with pytest.raises(RequestError, match="the body is invalid: input should have at most 1024 members"):
        body.validate({f"k{i}": 0 for i in range(2000)}, ChatCompletionRequest)


def test_a_large_body_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch):
    threads = []
    real = body.decode
    monkeypatch.setattr(body, "decode", lambda raw: threads.append(threading.current_thread()) or real(raw))
    for size in (10, 2 * body.LARGE):
        content = json.dumps({"model": "m", "prompt": "x" * size}).encode()

        async def receive(content: bytes = content):
            return {"type": "http.request", "body": content, "more_body": False}

        parsed = asyncio.run(body.parse(Request(SCOPE, receive), CompletionRequest, 1 << 30))
        assert parsed.prompt == "x" * size
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
