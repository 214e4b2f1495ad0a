"""Every bad request is answered with a 4xx in its API's own format, and the server serves on.

.venv/bin/python -m pytest -q tests/e2e/test_server_bad_requests.py
"""

import json

import httpx
import pytest

COMPLETION = {"prompt": "one two", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
NATIVE = {"text": "one two", "sampling_params": {"max_new_tokens": 2}}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/generate": NATIVE}


@pytest.fixture(autouse=True)
def serves_on(fake: httpx.Client):
    """After each test: a good request works, and nothing is left behind."""
    yield
    assert fake.post("/v1/completions", json=COMPLETION).json()["choices"][0]["text"] == "one two"
    info = fake.get("/server_info").json()
    assert info["open_requests"] == info["stats"]["running"] == info["stats"]["pages_used"] == 0


def refused(answer: httpx.Response, status: int, param: str | None, *words: str) -> None:
    """The error has the API's own shape, names the field and says what is wrong."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    if answer.url.path.startswith("/v1"):
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == ("invalid_request_error" if status < 500 else error["type"])
        assert error["param"] == param
    else:
        assert set(error) == {"message"}
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"temperature": "1"}, "temperature", ["'1'", "number"]),
        ({"temperature": True}, "temperature", ["True"]),
        ({"temperature": -1}, "temperature", ["-1", "0 to 100"]),
        ({"max_tokens": -5}, "max_tokens", ["-5"]),
        ({"max_tokens": 2.5}, "max_tokens", ["2.5", "integer"]),
        ({"top_p": 0}, "top_p", ["(0, 1]"]),
        ({"top_p": 1.5}, "top_p", ["1.5"]),
        ({"top_k": -2}, "top_k", ["-2"]),
        ({"min_p": 2}, "min_p", ["2"]),
        ({"n": 0}, "n", ["1 to 128"]),
        ({"n": 1000}, "n", ["1 to 128"]),
        ({"stop": ""}, "stop", ["1 to 1024"]),
        ({"stop": [1]}, "stop", ["string"]),
        ({"stop": ["x"] * 33}, "stop", ["32"]),
        ({"seed": 2**64}, "seed", ["64-bit"]),
        ({"seed": "7"}, "seed", ["integer"]),
        ({"stream": "yes"}, "stream", ["boolean"]),
        ({"presence_penalty": 3}, "presence_penalty", ["[-2, 2]"]),
        ({"logit_bias": {"x": 1}}, "logit_bias", ["token ids"]),
        ({"logit_bias": {"5": 101}}, "logit_bias", ["[-100, 100]"]),
        ({"logit_bias": {str(2**70): 1}}, "logit_bias", ["4096"]),
        ({"stop_token_ids": [4096]}, "stop_token_ids", ["4096"]),
        ({"min_tokens": 3}, "min_tokens", ["max_tokens"]),
        ({"regex": "a", "ebnf": "root ::= 'a'"}, "ebnf", ["one constraint"]),
        ({"regex": ""}, "regex", ["empty"]),
        ({"json_schema": "{"}, "json_schema", ["not valid JSON"]),
        ({"json_schema": "[1]"}, "json_schema", ["object"]),
        ({"response_format": {"type": "xml"}}, "response_format", ["xml", "json_schema"]),
        ({"response_format": {"type": "json_schema"}}, "response_format", ["schema"]),
        ({"response_format": "json"}, "response_format", ["'json'"]),
        ({"unheard_of": 1}, "unheard_of", ["not a field", "allowed: "]),
        ({"stream_options": {"usage": True}}, "stream_options", ["usage"]),
        ({"priority": 2**40}, "priority", ["less than"]),
        ({"rid": ""}, "rid", ["at least 1 character"]),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_fields(fake: httpx.Client, path: str, change: dict, param: str, words: list[str]):
    refused(fake.post(path, json=PATHS[path] | change), 400, param, *words)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_unknown_model(fake: httpx.Client, path: str):
    answer = fake.post(path, json=PATHS[path] | {"model": "gpt-9"})
    refused(answer, 404, "model", "gpt-9", "tiny")
    assert answer.json()["error"]["code"] == "model_not_found"
    refused(fake.get("/v1/models/gpt-9"), 404, "model", "gpt-9")


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["x", ""]])
def test_empty_prompt(fake: httpx.Client, prompt: object):
    refused(fake.post("/v1/completions", json={"prompt": prompt}), 400, "prompt", "empty")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("one " * 3000, ["3001 tokens", "2048"]),
        ([5] * 2048, ["2048 tokens"]),
        ([4096], ["[0, 4096)"]),
        ([-1], ["[0, 4096)"]),
        ([2**80], ["[0, 4096)"]),
        ([1.5], ["integer"]),
        ([True], ["integer"]),
        ([["a"]], ["integer"]),
        (7, ["7"]),
        (None, ["None"]),
    ],
)
def test_bad_prompts(fake: httpx.Client, prompt: object, words: list[str]):
    refused(fake.post("/v1/completions", json={"prompt": prompt}), 400, "prompt", *words)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", ["missing"]),
        ({"messages": []}, "messages", ["at least 1"]),
        ({"messages": "hi"}, "messages", ["list"]),
        ({"messages": [{"content": "hi"}]}, "messages", ["messages.0.role is missing"]),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages", ["'robot'", "'assistant'"]),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", ["5"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", ["image_url", "text"]),
        (CHAT | {"top_logprobs": 2}, "top_logprobs", ["logprobs: true"]),
        (CHAT | {"logprobs": True, "top_logprobs": 101}, "top_logprobs", ["0 to 100"]),
        (CHAT | {"logprobs": 5}, "logprobs", ["boolean"]),
        (CHAT | {"max_completion_tokens": 3}, "max_tokens", ["give one"]),
        (CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", ["no tool parser"]),
        (CHAT | {"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools", ["tools.0.function.name"]),
        (CHAT | {"tools": [{"type": "retrieval"}]}, "tools", ["'function'"]),
        (CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools", ["'f' twice"]),
        (CHAT | {"tool_choice": "required"}, "tool_choice", ["there are no tools"]),
        (CHAT | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", ["no tools"]),
        (CHAT | {"tool_choice": "always"}, "tool_choice", ["'none', 'auto' or 'required'"]),
        (CHAT | {"modalities": ["audio"]}, "modalities", ["not supported"]),
        (CHAT | {"reasoning_effort": "huge"}, "reasoning_effort", ["'huge'", "'medium'"]),
        (CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ["messages"]),
    ],
)
def test_bad_chats(fake: httpx.Client, body: dict, param: str, words: list[str]):
    refused(fake.post("/v1/chat/completions", json=body), 400, param, *words)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", CHAT | {"input_ids": []}, "input_ids"),
        ("/v1/chat/completions", CHAT | {"input_ids": [5] * 2048}, "input_ids"),
        ("/v1/chat/completions", CHAT | {"input_ids": [4096]}, "input_ids"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one " * 3000}]}, "messages"),
        ("/v1/responses", {"input": "one " * 3000}, "input"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_field_that_holds_a_bad_prompt_is_named(fake: httpx.Client, path: str, body: dict, param: str):
    refused(fake.post(path, json=body), 400, param)


@pytest.mark.parametrize("change", [{"suffix": "end"}])
def test_completion_fields_that_are_not_supported(fake: httpx.Client, change: dict):
    refused(fake.post("/v1/completions", json=COMPLETION | change), 400, next(iter(change)), "not supported")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"best_of": 3, "stream": True}, "best_of: 1"),
        ({"best_of": 2, "n": 3}, "at least n"),
        ({"best_of": 0}, "greater than"),
    ],
)
def test_the_best_of_how_many(fake: httpx.Client, change: dict, words: str):
    refused(fake.post("/v1/completions", json=COMPLETION | change), 400, "best_of", words)


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [], "tool_choice": "none", "functions": None, "modalities": ["text"]},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False},
        {"temperature": None, "stop": None, "seed": None, "logit_bias": {}, "response_format": {"type": "text"}},
    ],
)
def test_fields_that_change_nothing_are_accepted(fake: httpx.Client, change: dict):
    assert fake.post("/v1/chat/completions", json=CHAT | change).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, ["one of text and input_ids"]),
        ({"text": "a", "input_ids": [1]}, ["one of text and input_ids"]),
        ({"text": ""}, ["empty"]),
        ({"input_ids": []}, ["empty"]),
        ({"input_ids": [[1], []]}, ["empty"]),
        ({"input_ids": [99999]}, ["[0, 4096)"]),
        ({"text": 5}, ["text is 5"]),
        (NATIVE | {"sampling_params": {"max_new_tokens": -1}}, ["max_new_tokens is -1", "at least 0"]),
        (NATIVE | {"sampling_params": {"temperature": "hot"}}, ["temperature is 'hot'"]),
        (NATIVE | {"sampling_params": {"warmth": 1}}, ["warmth", "allowed"]),
        (NATIVE | {"sampling_params": {"stop_regex": "(a"}}, ["stop_regex", "(a"]),
        (NATIVE | {"sampling_params": {"seed": 1, "sampling_seed": 2}}, ["seed"]),
        (NATIVE | {"sampling_params": [{}, {}]}, ["2 entries", "1 prompts"]),
        (NATIVE | {"sampling_params": "x"}, ["sampling_params"]),
        (NATIVE | {"stream": 1}, ["stream is 1"]),
        (NATIVE | {"top_logprobs_num": -1, "return_logprob": True}, ["top_logprobs_num is -1"]),
    ],
)
def test_native_fields(fake: httpx.Client, body: dict, words: list[str]):
    refused(fake.post("/generate", json=body), 400, None, *words)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b"[" * 100_000,
    ],
)
def test_wrong_json(fake: httpx.Client, path: str, content: bytes):
    refused(fake.post(path, content=content), 400, None, "JSON")


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_too_large(fake: httpx.Client, path: str):
    refused(fake.post(path, content=b'{"prompt":"' + b"x" * 10_000_000 + b'"}'), 413, None, "1 MiB", "max_body_mib")

    def endless():
        for _ in range(100):
            yield b" " * 100_000

    refused(fake.post(path, content=endless()), 413, None, "1 MiB")  # no content-length: counted while reading


@pytest.mark.parametrize(
    ("method", "path"), [("GET", p) for p in PATHS] + [("DELETE", "/v1/models"), ("POST", "/health")]
)
def test_wrong_methods(fake: httpx.Client, method: str, path: str):
    refused(fake.request(method, path), 405, None, f"no {method} {path}")


@pytest.mark.parametrize("path", ["/v1/engines", "/nothing", "/v1/chat/completions/"])
def test_unknown_routes(fake: httpx.Client, path: str):
    refused(fake.get(path), 404, None, path)


@pytest.mark.parametrize(("status", "expected"), [(400, 400), (503, 503), (500, 500)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_what_the_engine_refuses(fake: httpx.Client, path: str, status: int, expected: int, stream: bool):
    answer = fake.post(path, json=PATHS[path] | {"cache_salt": f"status:{status}", "stream": stream})
    refused(answer, expected, "prompt" if expected == 400 else None, "scripted refusal")
    assert ("retry-after" in answer.headers) == (expected == 503)
    if expected == 503 and path != "/generate":
        assert answer.json()["error"]["code"] == "queue_full"


def test_one_bad_prompt_fails_the_request(fake: httpx.Client):
    refused(fake.post("/v1/completions", json={"prompt": ["fine", "one " * 3000]}), 400, "prompt", "tokens")


def test_a_rid_in_use(fake: httpx.Client):
    long = {"text": "one two", "sampling_params": {"max_new_tokens": 1000}, "rid": "mine"}
    with fake.stream("POST", "/generate", json=long | {"stream": True, "cache_salt": "slow"}) as first:
        pieces = first.iter_raw()  # kept referenced, because releasing it closes the connection
        next(pieces)
        refused(fake.post("/generate", json=NATIVE | {"rid": "mine"}), 400, None, "mine", "in use")


def test_errors_are_json(fake: httpx.Client):
    answer = fake.post("/v1/completions", content=b"{")
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.text)["error"]["code"] == "invalid_json"
