"""Bodies of requests that arrive slowly, or not at all.

Run: .venv/bin/python -m pytest -q tests/core/test_api_body.py
"""

from __future__ import annotations

import asyncio

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from dovetail.api import body
from dovetail.api.problems import problem_of

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}


def trickle(pieces: int, pause: float):
    """What a client sends that pauses before each piece, and another piece after the last."""
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
        read(trickle(1000, 0.01))  # some bytes all the time
    problem = problem_of(refused.value)
    assert (problem.status, problem.code) == (408, "request_timeout")
    assert "0.05 seconds" in problem.message
