"""Check that every API refuses requests that are small to send but expensive to answer before they cost anything. Run:

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_api_attack.py
"""

import contextlib
import json
import socket

import httpx
import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MANY = ["a"] * 8193
BLOCKS = [{"type": "text", "text": "a"}] * 16_385
DEEP = json.loads('{"a":' * 130 + "1" + "}" * 130)
BODIES = {
    "/v1/completions": {"prompt": MANY},
    "/generate": {"text": MANY},
    "/v1/embeddings": {"input": MANY},
    "/api/embed": {"model": "tiny", "input": MANY},
    "/v1/rerank": {"query": "a", "documents": MANY},
    "/v1/score": {"text_1": "a", "text_2": MANY},
    "/v1/messages": {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": BLOCKS}]},
}


@pytest.mark.parametrize("path", BODIES)
def test_lists_of_more_than_could_ever_run_are_not_tokenized(fake: httpx.Client, path: str):
    answer = fake.post(path, json=BODIES[path])
    assert answer.status_code == 400
    assert "at most" in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": DEEP}]}),
        ("/v1/responses", {"input": "a", "tools": [DEEP], "tool_choice": "none", "background": True}),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": DEEP}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, **CHAT, "tools": [{"name": "f", "input_schema": DEEP}]}),
        ("/api/chat", {"model": "tiny", **CHAT, "format": DEEP}),
        ("/tokenize", {**CHAT, "tools": [DEEP]}),
    ],
)
def test_what_is_nested_too_deep_is_refused_and_leaves_nothing_open(fake: httpx.Client, path: str, body: dict):
    answer = fake.post(path, json=body)
    assert answer.status_code == 400
    assert "nested deeper than 128" in answer.text
    assert fake.get("/server_info").json()["open_requests"] == 0


def test_brackets_in_texts_are_no_nesting(fake: httpx.Client):
    assert fake.post("/v1/completions", json={"prompt": "[" * 300 + "{" * 300, "max_tokens": 1}).status_code == 200
    assert fake.post("/tokenize", json={"prompt": ["a", "[["] * 200}).status_code == 200


@pytest.mark.parametrize("line", [b"x: " + b"a" * 8000 + b"\r\n", b"a" * 8000], ids=["many", "one"])
def test_headers_without_an_end_are_not_kept(fake: httpx.Client, line: bytes):
    with socket.create_connection((fake.base_url.host, fake.base_url.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
        with contextlib.suppress(ConnectionError):  # it is reset while we write
            for _ in range(10_000):
                connection.sendall(line)
            pytest.fail("80 MB of headers were taken")
    assert fake.get("/health", headers={"x": "a" * 60_000}).status_code == 200
