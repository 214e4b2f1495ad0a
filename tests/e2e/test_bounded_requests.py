"""Test that requests are bounded before they cost anything: the size of their answers, the complexity of their bodies,
and the bytes of bodies that are held at the same time.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_bounded_requests.py
"""

import base64
import json
import select
import socket
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from fake_engine import run_fake_engine
from hypothesis import given
from hypothesis import strategies as st

from conftest import config_with
from dovetail.api import body as body_module
from dovetail.api.body import num_containers
from dovetail.interfaces.api import ApiRequest, Prompt
from dovetail.sampling_params import SamplingParams
from dovetail.server.answers import AnswerLimit
from dovetail.server.launch import running_server

LIMITS = {"answer_mib": 4, "bodies_mib": 1}
CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def bounded() -> Iterator[httpx.Client]:
    config = config_with(limits=LIMITS, drain_seconds=1, max_logprobs=100)
    with running_server(config, target=run_fake_engine) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def logprobs(n: int, tokens: int, top: int, new: int = 1) -> dict:
    return {
        "input_ids": [5 + i % 50 for i in range(tokens)],
        "sampling_params": {"max_new_tokens": new, "n": n},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top,
    }


def test_an_answer_that_would_be_too_large_is_refused_before_it_starts(bounded: httpx.Client):
    """A body of 10 KiB asked for 718 MiB, which took the front to 6 GiB."""
    before = bounded.get("/metrics").text
    answer = bounded.post("/generate", json=logprobs(128, 1900, 100))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "allowed: 4 MiB (server.limits.answer_mib)" in message
    assert all(word in message for word in ("Lower n", "logprob_start_len", "top log-probabilities", "max_tokens"))
    counted = "dovetail_time_to_first_token_seconds_count"
    assert [line for line in before.splitlines() if line.startswith(counted)] == [
        line for line in bounded.get("/metrics").text.splitlines() if line.startswith(counted)
    ]
    assert bounded.get("/server_info").json()["open_requests"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_allowed_is_answered_whole(bounded: httpx.Client, stream: bool):
    """An answer that may have more than 1 MiB is written on a thread, and is the same."""
    answer = bounded.post("/generate", json=logprobs(1, 400, 100, 2) | {"stream": stream})
    assert answer.status_code == 200, answer.text[:500]
    parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    meta = (parts[-1] if stream else answer.json())["meta_info"]
    assert len(answer.content) > 1 << 19
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [5 + i % 50 for i in range(400)]
    assert len(meta["input_top_logprobs"][-1]) == 100


def test_outputs_that_grow_beyond_the_limit_are_ended(bounded: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    """A request may set no limit on its output, and is then estimated with fewer tokens than the context holds."""
    from dovetail.server import answers

    monkeypatch.setattr(answers, "SURE_TOKENS", 8)
    body = {"prompt": [5] * 4, "max_tokens": 2000, "logprobs": 20, "n": 4}
    answer = bounded.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text[:200]
    assert "more than 4 MiB" in answer.text
    assert bounded.get("/server_info").json()["open_requests"] == 0


def test_large_answers_of_one_client_are_bounded_together(bounded: httpx.Client):
    body = logprobs(1, 500, 100, 100) | {"stream": True, "cache_salt": "slow"}
    with bounded.stream("POST", "/generate", json=body) as one, bounded.stream("POST", "/generate", json=body) as two:
        assert (one.status_code, two.status_code) == (200, 200)
        third = bounded.post("/generate", json=body)
        assert third.status_code == 429
        assert "retry-after" in third.headers
        assert bounded.post("/generate", json={"text": "one"}).status_code == 200
    deadline = time.monotonic() + 20
    while bounded.get("/server_info").json()["open_requests"] and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1)
    assert bounded.post("/generate", json=logprobs(1, 500, 100)).status_code == 200  # what was counted is given back


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL] * 60_000}]}),
        ("/v1/completions", {"prompt": [[]] * 70_000}),
    ],
)
def test_a_body_of_many_small_objects_is_refused(bounded: httpx.Client, path: str, body: dict):
    answer = bounded.post(path, json=body)
    assert answer.status_code == 400
    assert "arrays and objects; allowed: 65536" in answer.json()["error"]["message"]


def test_brackets_in_a_text_are_not_counted(bounded: httpx.Client):
    text = 'f({"a": [1, "\\"]}) ' * 20_000
    answer = bounded.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
    assert "context" in answer.json()["error"]["message"]


values = st.recursive(
    st.none() | st.integers() | st.text('[]{}"\\ a\n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('[{"\\', max_size=3), inner, max_size=4),
    max_leaves=30,
)


def count(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(count, value.values()))
    return 1 + sum(map(count, value)) if isinstance(value, list) else 0


@given(values)
def test_the_count_is_that_of_a_parser(value: object):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "MAX_CONTAINERS", -1)
        patch.setattr(body_module, "_COUNTED_AT_ONCE", 7)
        assert num_containers(json.dumps(value, ensure_ascii=False).encode()) == count(value)


def test_bodies_that_are_held_are_bounded(bounded: httpx.Client):
    """A client with two unfinished bodies of 400 KiB may hold no third one. A small body is refused as well, because the
    bytes are counted by client."""
    address = (bounded.base_url.host, bounded.base_url.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 600000\r\n\r\n"
    with socket.create_connection(address) as one, socket.create_connection(address) as two:
        one.sendall(head + b" " * 400_000)
        two.sendall(head + b" " * 400_000)
        refused, _, _ = select.select([one, two], [], [], 30)  # whichever arrived last
        assert [connection.recv(1000)[:12] for connection in refused] == [b"HTTP/1.1 503"]
    assert bounded.post("/v1/completions", json={"prompt": "one", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_the_estimate_of_vectors_follows_their_encoding(
    bounded: httpx.Client, encoding: str, monkeypatch: pytest.MonkeyPatch
):
    """Numbers in JSON take four times what they take in base64."""
    found: list[int] = []
    check = AnswerLimit.check

    def noted(self: AnswerLimit, request: ApiRequest, outputs: int) -> int:
        found.append(check(self, request, outputs))
        return found[-1]

    monkeypatch.setattr(AnswerLimit, "check", noted)
    vector = np.random.default_rng(0).normal(size=bounded.get("/server_info").json()["engine"]["embedding"]["size"])
    body = {"input": ["a text"] * 8, "encoding_format": encoding}
    answer = bounded.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    entries = answer.json()["data"]
    assert len(entries) == 8
    numbers = vector.astype("<f4")
    shown = base64.b64encode(numbers.tobytes()) if encoding == "base64" else json.dumps(numbers.tolist()).encode()
    assert len(shown) * 8 <= found[-1] <= 2 * len(shown) * 8


@pytest.mark.parametrize(
    "body",
    [
        {"query": "a" * 20_000, "items": ["b"] * 500, "label_token_ids": [5]},
        {"query": [5] * 5_000, "items": [[6]] * 500, "label_token_ids": [5]},
    ],
    ids=["text", "ids"],
)
def test_a_query_that_is_repeated_for_many_items_is_bounded(bounded: httpx.Client, body: dict):
    """A body of 1 MiB asked for 8 GiB of joined texts."""
    answer = bounded.post("/v1/score", json=body)
    assert answer.status_code == 400
    assert "for each of 500 items makes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/separate_reasoning", {"reasoning_parser": "qwen3"}),
        (
            "/parse_function_call",
            {"tool_call_parser": "hermes", "tools": [{"type": "function", "function": {"name": "f"}}]},
        ),
    ],
)
def test_texts_that_no_model_can_have_written_are_not_parsed(bounded: httpx.Client, path: str, more: dict):
    """A text of 3.5 MB occupied a thread for more than a minute, which outlasted the server."""
    answer = bounded.post(path, json={"text": "<think>a" * 100_000, **more})
    assert answer.status_code == 400, answer.text[:500]
    assert "800000 characters, which are more than 2048 tokens" in answer.json()["error"]["message"]


def test_the_estimate_is_not_below_what_an_answer_has(bounded: httpx.Client):
    for body in (logprobs(1, 100, 20), logprobs(2, 50, 5, 8)):
        params = SamplingParams(
            max_new_tokens=body["sampling_params"]["max_new_tokens"],
            n=body["sampling_params"]["n"],
            logprobs=body["top_logprobs_num"],
            prompt_logprobs=body["top_logprobs_num"],
        )
        limit, prompt = AnswerLimit(1e9, 2048, 4), Prompt(body["input_ids"], params)
        estimate = limit.check(ApiRequest("r", (prompt,)), limit.outputs(prompt))
        assert estimate >= len(bounded.post("/generate", json=body).content) - 1000
