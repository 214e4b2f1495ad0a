"""Test Ollama's API with the official client and raw requests against live servers.

The client's own models validate answers, unknown fields are errors, and the answers are compared with those of OpenAI's
API to the same conversation.

.venv/bin/python -m pytest -q tests/e2e/test_api_ollama.py
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import pytest
from fake_engine import run_fake_engine
from pages import run_examples
from pydantic import BaseModel
from safetensors.numpy import save_file

from dovetail.config import Config
from dovetail.server.launch import running_server
from dovetail_apis.ollama.checkpoint import read_checkpoint

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 2 + 3?"}]
COLD = {"temperature": 0, "num_predict": 120}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Get the weather of a city"}}
WEATHER["function"]["parameters"] = CITY
PATIENCE = 30.0
QUIET = Config.model_validate({"server": {"port": 0, "log_level": "error"}})

each_way = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def client(tiny_url: str) -> Iterator[ollama.Client]:
    with ollama.Client(tiny_url) as client:
        yield client


def chat(client: ollama.Client, stream: bool, messages: list[Any], **given: Any) -> ollama.ChatResponse:
    """Return the answer, whole or accumulated from its lines."""
    given = {"model": "tiny", "messages": messages, "options": COLD, **given}
    if not stream:
        return client.chat(**given)
    lines = list(client.chat(stream=True, **given))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    total = lines[-1]
    assert total.message.content == ""
    total.message.content = "".join(line.message.content or "" for line in lines)
    total.message.thinking = "".join(line.message.thinking or "" for line in lines) or None
    total.message.tool_calls = [call for line in lines for call in line.message.tool_calls or []] or None
    return total


def generate(client: ollama.Client, stream: bool, prompt: str, **given: Any) -> ollama.GenerateResponse:
    given = {"model": "tiny", "prompt": prompt, "options": COLD, **given}
    if not stream:
        return client.generate(**given)
    lines = list(client.generate(stream=True, **given))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    total = lines[-1]
    total.response = "".join(line.response or "" for line in lines)
    total.thinking = "".join(line.thinking or "" for line in lines) or None
    return total


def openai_chat(http: httpx.Client, messages: list[Any], **given: Any) -> dict[str, Any]:
    answer = http.post(
        "/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 120, **given}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def only_known(model: type[BaseModel], given: dict[str, Any], *more: str) -> None:
    """Check that the answer is valid and has only fields that the client defines, except ``more``."""
    model.model_validate(given)
    known = {field.alias or name for name, field in model.model_fields.items()}
    assert given.keys() <= known | set(more)


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.01)


@each_way
def test_chat(client: ollama.Client, tiny: httpx.Client, stream: bool):
    reference = openai_chat(tiny, FRANCE)
    for model in ("tiny", "tiny:latest"):
        answer = chat(client, stream, FRANCE, model=model)
        assert answer.message.content == reference["choices"][0]["message"]["content"]
        assert (answer.model, answer.message.role, answer.done_reason) == (model, "assistant", "stop")
        usage = reference["usage"]
        assert (answer.prompt_eval_count, answer.eval_count) == (usage["prompt_tokens"], usage["completion_tokens"])


def test_lines(tiny: httpx.Client):
    """Check that a stream is the default."""
    began = time.perf_counter_ns()
    answer = tiny.post("/api/chat", json={"model": "tiny", "messages": FRANCE, "options": COLD})
    took = time.perf_counter_ns() - began
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    for line in lines:
        only_known(ollama.ChatResponse, line)
        assert line["created_at"].endswith("Z")
    times = [datetime.fromisoformat(line["created_at"]) for line in lines]
    assert times == sorted(times)
    assert all(line.keys() == {"model", "created_at", "message", "done"} for line in lines[:-1])
    assert all(line["message"]["content"] for line in lines[:-1])
    last = lines[-1]
    assert last["prompt_eval_duration"] > 0 < last["eval_duration"]
    assert last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"] < took
    whole = tiny.post("/api/chat", json={"model": "tiny", "messages": FRANCE, "options": COLD, "stream": False})
    assert whole.headers["content-type"] == "application/json"
    only_known(ollama.ChatResponse, whole.json())
    assert whole.json().keys() == last.keys()
    assert whole.json()["eval_count"] == last["eval_count"] >= len(lines) - 1


@each_way
def test_times_are_measured(fake: httpx.Client, stream: bool):
    """Check the times of an engine that takes 20 ms per token."""
    body = {"model": "tiny", "prompt": "one", "raw": True, "cache_salt": "slow", "stream": stream}
    body["options"] = {"num_predict": 10}
    last = json.loads(fake.post("/api/generate", json=body).text.splitlines()[-1])
    assert last["eval_count"] == 10
    assert last["done_reason"] == "length"
    assert last["eval_duration"] > 9 * 18e6
    assert last["prompt_eval_duration"] > 18e6
    assert last["load_duration"] == 0


@each_way
def test_generate(client: ollama.Client, tiny: httpx.Client, stream: bool):
    reference = openai_chat(tiny, FRANCE)["choices"][0]["message"]["content"]
    assert generate(client, stream, FRANCE[0]["content"]).response == reference
    asked = [{"role": "system", "content": "Be brief."}, *FRANCE]
    brief = openai_chat(tiny, asked)
    answer = generate(client, stream, FRANCE[0]["content"], system="Be brief.", template="", suffix="")
    assert answer.response == brief["choices"][0]["message"]["content"]
    assert answer.prompt_eval_count == brief["usage"]["prompt_tokens"]
    body = {"prompt": "one two three four", "max_tokens": 24, "temperature": 0}
    raw = generate(client, stream, body["prompt"], raw=True, options={"temperature": 0, "num_predict": 24})
    assert raw.response == tiny.post("/v1/completions", json=body).json()["choices"][0]["text"]
    line = tiny.post(
        "/api/generate", json={"model": "tiny", "prompt": "x", "stream": stream, "options": {"num_predict": 3}}
    ).text.splitlines()[-1]
    only_known(ollama.GenerateResponse, json.loads(line))


@each_way
def test_thinking(client: ollama.Client, tiny: httpx.Client, stream: bool):
    reference = openai_chat(tiny, SUM, chat_template_kwargs={"enable_thinking": True})["choices"][0]["message"]
    for think in (True, "low"):
        message = chat(client, stream, SUM, think=think).message
        assert (message.thinking, message.content) == (reference["reasoning_content"], reference["content"])
    text = generate(client, stream, SUM[0]["content"], think=True)
    assert (text.thinking, text.response) == (reference["reasoning_content"], reference["content"])
    off = chat(client, stream, SUM, think=False).message
    assert off.thinking is None
    again = [*SUM, {**message.model_dump(exclude_none=True)}, *FRANCE]
    assert "Paris" in (chat(client, stream, again).message.content or "")


@each_way
def test_tools(client: ollama.Client, tiny: httpx.Client, stream: bool):
    made = chat(client, stream, PARIS, tools=[WEATHER])
    (call,) = made.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    assert (made.message.content, made.done_reason) == ("", "stop")
    result = {"role": "tool", "tool_name" if stream else "name": "get_weather", "content": '{"weather": "sunny"}'}
    answer = chat(client, stream, [*PARIS, made.message, result], tools=[WEATHER])
    called = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    reference = openai_chat(
        tiny,
        [*PARIS, {"role": "assistant", "tool_calls": [called]}, {**result, "tool_call_id": "c"}],
        tools=[ollama.Tool.model_validate(WEATHER).model_dump(exclude_none=True)],  # its fields in the client's order
    )
    assert answer.message.content == reference["choices"][0]["message"]["content"]
    assert answer.prompt_eval_count == reference["usage"]["prompt_tokens"]
    assert not chat(client, stream, FRANCE, tools=[WEATHER]).message.tool_calls
    cut = chat(client, stream, PARIS, tools=[WEATHER], options={"temperature": 0, "num_predict": 16})
    assert (cut.message.tool_calls, cut.done_reason) == (None, "length")


def test_a_function_as_tool(client: ollama.Client):
    def get_weather(city: str) -> str:
        """Get the weather of a city

        Args:
            city: its name
        """
        return city

    (call,) = chat(client, False, PARIS, tools=[get_weather]).message.tool_calls or []
    assert call.function.name == "get_weather"
    assert get_weather(**call.function.arguments)


class Person(BaseModel):
    name: str
    age: int


@each_way
def test_formats(client: ollama.Client, stream: bool):
    question = "Extract the name and the age as JSON: Anna is 31 years old."
    answer = chat(client, stream, [{"role": "user", "content": question}], format=Person.model_json_schema())
    assert Person.model_validate_json(answer.message.content or "") == Person(name="Anna", age=31)
    text = generate(client, stream, question, format="json", options={"temperature": 0, "num_predict": 24}).response
    assert text.lstrip().startswith("{")
    raw = generate(client, stream, "x", format={"enum": ["left", "right"]}, raw=True).response
    assert json.loads(raw) in ("left", "right")


def test_options(client: ollama.Client, tiny: httpx.Client):
    def text(**options: Any) -> str:
        return generate(
            client, False, "Write a short story about a fox.", options={"num_predict": 10, **options}
        ).response

    cold = text(temperature=0)
    assert text(temperature=2.0, seed=1) == text(temperature=2.0, seed=1) != text(temperature=2.0, seed=2)
    assert cold == text(top_k=1) == text(top_p=1e-6) == text(min_p=1.0, top_k=0, top_p=1.0)
    stop = cold[3:8]
    assert text(temperature=0, stop=[stop]) == text(temperature=0, stop=stop) == cold[: cold.index(stop)]
    assert text(temperature=0, num_ctx=2048, num_thread=4, repeat_last_n=-1, mirostat=0, seed=-1) == cold
    body = {"messages": [{"role": "user", "content": "Say one one one one one."}], "max_tokens": 16, "temperature": 0}
    for theirs, ours, value in [
        ("repeat_penalty", "repetition_penalty", 1.5),
        ("presence_penalty", "presence_penalty", 1.5),
        ("frequency_penalty", "frequency_penalty", 1.5),
    ]:
        reference = openai_chat(tiny, **{**body, ours: value})["choices"][0]["message"]["content"]
        options = {"temperature": 0, "num_predict": 16, theirs: value}
        assert chat(client, False, body["messages"], options=options).message.content == reference


@pytest.mark.parametrize(("asked", "total"), [(100_000, 2048), (2045, 2048), (2000, 2003)])
def test_an_output_ends_where_the_context_does(fake: httpx.Client, asked: int, total: int):
    body = {"model": "tiny", "prompt": "one two three", "raw": True, "stream": False, "options": {"num_predict": asked}}
    answer = fake.post("/api/generate", json=body).json()
    assert answer["done_reason"] == "length"
    assert answer["prompt_eval_count"] == 3
    assert 3 + answer["eval_count"] == total


def test_logprobs(client: ollama.Client, tiny: httpx.Client):
    reference = openai_chat(tiny, FRANCE, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    whole = chat(client, False, FRANCE, logprobs=True, top_logprobs=2).logprobs
    lines = list(client.chat("tiny", FRANCE, options=COLD, logprobs=True, top_logprobs=2, stream=True))
    for found in (whole, [entry for line in lines for entry in line.logprobs or ()]):
        assert [entry.token for entry in found] == [entry["token"] for entry in reference]
        assert [entry.logprob for entry in found] == pytest.approx([entry["logprob"] for entry in reference], abs=1e-3)
        assert all(len(entry.top_logprobs) == 2 for entry in found)


def test_the_model(client: ollama.Client, tiny: httpx.Client):
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    assert listed.model == loaded.model == loaded.name == "tiny:latest"
    assert listed.digest == loaded.digest
    assert len(listed.digest or "") == 64
    assert loaded.context_length == 2048
    assert listed.details.family == "llama"
    assert listed.details.quantization_level == "BF16"
    assert int(listed.size or 0) == int(loaded.size or 0) > 9_000_000
    shown = client.show("tiny:latest")
    assert shown.modelinfo["llama.context_length"] == 2048
    assert shown.modelinfo["general.parameter_count"] == 4_722_176  # MODEL_CARD.md
    assert "im_start" in shown.template
    assert set(shown.capabilities) == {"completion", "tools", "thinking", "embedding"}
    assert shown.modified_at == listed.modified_at
    assert tiny.post("/api/show", json={"name": "tiny"}).json()["details"] == listed.details.model_dump()
    for answer, model in (("/api/tags", ollama.ListResponse), ("/api/ps", ollama.ProcessResponse)):
        only_known(model.Model, tiny.get(answer).json()["models"][0], "name")
    only_known(ollama.ShowResponse, tiny.post("/api/show", json={"model": "tiny"}).json())
    version = tiny.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 9, 0)  # from which on clients send think
    assert tiny.head("/api/tags").status_code == tiny.head("/api/version").status_code == 200


def test_a_checkpoint_in_shards(tmp_path: Path):
    """Check that files which the index does not name are not part of the checkpoint."""
    config = {"model_type": "outer", "text_config": {"model_type": "inner", "hidden_size": 8}}
    (tmp_path / "none").mkdir()
    for directory in (tmp_path, tmp_path / "none"):
        (directory / "config.json").write_text(json.dumps(config))
    none = read_checkpoint(str(tmp_path / "none"))
    assert (none.parameters, none.size, none.dtype) == (0, 0, "")
    save_file({"a": np.zeros((3, 4), np.float16)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(5, np.float32), "c": np.zeros((), np.float32)}, tmp_path / "two.safetensors")
    save_file({"a": np.zeros((300, 4), np.float64)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_checkpoint(str(tmp_path))
    assert (found.parameters, found.dtype, found.family) == (18, "F16", "inner")
    assert found.config["hidden_size"] == 8
    assert found.size == sum((tmp_path / f"{name}.safetensors").stat().st_size for name in ("one", "two"))


def test_nothing_to_answer(client: ollama.Client):
    loaded = client.chat("tiny", [], keep_alive="5m")
    assert (loaded.done, loaded.done_reason, loaded.message.content) == (True, "load", "")
    (line,) = client.generate("tiny", "", stream=True)
    assert (line.done, line.done_reason, line.response) == (True, "load", "")
    for keep_alive in (0, "0s", "0"):
        with pytest.raises(ollama.ResponseError, match="unloaded"):
            client.generate("tiny", keep_alive=keep_alive)
    assert client.generate("tiny", "x", keep_alive=0, options={"num_predict": 1}).done


def test_embeddings(client: ollama.Client, tiny: httpx.Client):
    texts = ["A text", "Another one"]
    reference = [entry["embedding"] for entry in tiny.post("/v1/embeddings", json={"input": texts}).json()["data"]]
    answer = client.embed("tiny", texts)
    assert [list(vector) for vector in answer.embeddings] == [pytest.approx(vector, abs=1e-6) for vector in reference]
    assert client.embed("tiny", texts[0]).embeddings == [pytest.approx(reference[0], abs=1e-6)]
    assert [len(vector) for vector in client.embed("tiny", texts, dimensions=4).embeddings] == [4, 4]
    assert (
        answer.prompt_eval_count == tiny.post("/v1/embeddings", json={"input": texts}).json()["usage"]["prompt_tokens"]
    )
    assert (answer.total_duration or 0) > 0
    old = client.embeddings("tiny", texts[0]).embedding
    length = sum(x * x for x in old) ** 0.5
    assert [x / length for x in old] == pytest.approx(reference[0], abs=1e-6)
    assert (client.embed("tiny").embeddings, client.embeddings("tiny").embedding) == ([], [])
    raw = tiny.post("/api/embed", json={"model": "tiny", "input": "x"})
    only_known(ollama.EmbedResponse, raw.json())


def test_texts_that_are_too_long_to_embed(client: ollama.Client):
    for words in (2500, 30_000):
        assert client.embed("tiny", "word " * words).prompt_eval_count == 2047
        with pytest.raises(ollama.ResponseError, match=r"^input.* 2048"):
            client.embed("tiny", "word " * words, truncate=False)
    with pytest.raises(ollama.ResponseError, match=r"^prompt has 2501 tokens; the context holds 2048"):
        client.embeddings("tiny", "word " * 2500)


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("chat", {"model": None}, "model is None"),
        ("chat", {"nonsense": 1}, "nonsense is not a field"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ("chat", {"messages": [*FRANCE, {"role": "user", "content": "x", "images": ["AAAA"]}]}, f"messages.{len(FRANCE)}.images is not supported by this server: it supports only text"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]}, "messages.0.tool_calls.0"),
        ("chat", {"tools": [{"type": "function"}]}, "tools.0.function"),
        ("chat", {"tools": [WEATHER], "format": "json"}, "tools"),
        ("chat", {"format": "yaml"}, "format"),
        ("chat", {"format": {"type": "nonsense"}}, "nonsense"),
        ("chat", {"think": "deeply"}, "think"),
        ("chat", {"options": {"num_ctx": 4096}}, "num_ctx is 4096; allowed: up to 2048"),
        ("chat", {"options": {"mirostat": 2}}, "mirostat is not supported"),
        ("chat", {"options": {"repeat_penalty": -1}}, "repeat_penalty"),
        ("chat", {"options": {"temprature": 1}}, "temprature is not a field"),
        ("chat", {"options": {"num_predict": -3}}, "num_predict"),
        ("chat", {"top_logprobs": 2}, "logprobs: true"),
        ("chat", {"messages": [{"role": "user", "content": "word " * 3000}]}, "2048"),
        ("generate", {"suffix": "end"}, "suffix is not supported"),
        ("generate", {"template": "{{ .Prompt }}"}, "template is not supported"),
        ("generate", {"context": [1, 2]}, "context is not supported"),
        ("generate", {"images": ["AAAA"]}, "images is not supported"),
        ("generate", {"raw": True, "system": "x"}, "system needs the chat template"),
        ("generate", {"truncate": True}, "truncate is not supported"),
    ],
)  # fmt: skip
def test_what_is_refused(tiny: httpx.Client, path: str, change: dict[str, Any], words: str):
    good = {"messages": FRANCE} if path == "chat" else {"prompt": "x"}
    for stream in (False, True):
        answer = tiny.post(f"/api/{path}", json={"model": "tiny", "stream": stream, **good, **change})
        assert answer.status_code == 400, answer.text
        assert answer.json().keys() == {"error"}
        assert words in answer.json()["error"]


def test_other_errors(fake: httpx.Client):
    def error(answer: httpx.Response, status: int) -> str:
        assert answer.status_code == status, answer.text
        assert answer.json().keys() == {"error"}
        return answer.json()["error"]

    good = {"model": "tiny", "messages": FRANCE}
    assert "JSON" in error(fake.post("/api/chat", content=b'{"model": "tiny"'), 400)
    for path in ("chat", "generate", "show"):
        assert "llama9" in error(fake.post(f"/api/{path}", json={"model": "llama9"}), 404)
        assert "missing" in error(fake.post(f"/api/{path}", json={}), 400)
    assert "/api/pull" in error(fake.post("/api/pull", json={"model": "tiny"}), 404)
    error(fake.get("/api/chat"), 405)
    error(fake.post("/api/generate", json={"model": "tiny", "prompt": "x" * 2**21}), 413)
    for status in (400, 503):
        for stream in (False, True):
            body = good | {"cache_salt": f"status:{status}", "stream": stream}
            assert "scripted refusal" in error(fake.post("/api/chat", json=body), status)


def test_errors_of_the_client(client: ollama.Client):
    with pytest.raises(ollama.ResponseError, match="llama9") as caught:
        client.chat("llama9", FRANCE)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="top_p") as caught:
        list(client.chat("tiny", FRANCE, options={"top_p": 7}, stream=True))
    assert caught.value.status_code == 400


@each_way
def test_a_client_that_leaves_frees_its_pages(fake: httpx.Client, stream: bool):
    body = {"model": "tiny", "messages": FRANCE, "cache_salt": "slow", "stream": stream}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=fake.base_url, timeout=PATIENCE) as http:
            task = asyncio.ensure_future(http.post("/api/chat", json=body | {"options": {"num_predict": 2000}}))
            while (await http.get("/server_info")).json()["stats"]["running"] != 1:
                await asyncio.sleep(0.01)
            task.cancel()

    asyncio.run(leave())
    eventually(lambda: fake.get("/server_info").json()["stats"]["running"] == 0)
    assert fake.get("/server_info").json()["open_requests"] == 0


@pytest.fixture
def own() -> Iterator[httpx.Client]:
    """Return a server that the test may break."""
    with running_server(QUIET, target=run_fake_engine) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http:
        yield http


def test_when_the_engine_dies(own: httpx.Client):
    body = {"model": "tiny", "messages": FRANCE, "cache_salt": "slow", "options": {"num_predict": 2000}}
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda s=stream: answers.append(own.post("/api/chat", json=body | {"stream": s})))
        for stream in (False, True)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: own.get("/server_info").json()["stats"]["running"] == 2)
    time.sleep(0.1)  # so that the stream has begun
    os.kill(own.get("/server_info").json()["engine_pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE)
    whole, lines = sorted(answers, key=lambda answer: -answer.status_code)
    assert (whole.status_code, lines.status_code) == (503, 200)
    last = json.loads(lines.text.splitlines()[-1])
    assert last.keys() == whole.json().keys() == {"error"}
    assert "engine process has ended" in last["error"]
    assert len(lines.text.splitlines()) > 1
    with ollama.Client(str(own.base_url)) as client, pytest.raises(ollama.ResponseError, match="has ended"):
        client.generate("tiny", "x")


def test_the_page_s_examples_work(tiny_url: str, capsys: pytest.CaptureFixture[str]):
    run_examples("apis.md", "Ollama", tiny_url, capsys)["client"].close()
