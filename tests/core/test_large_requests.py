"""Test that requests with thousands of prompts, and their answers, leave the event loop to others.

.venv/bin/python -m pytest -q -p no:xdist tests/core/test_large_requests.py
"""

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dovetail.api import json_parts, offload, responses
from dovetail.api.json_parts import encode_in_parts
from dovetail.api.offload import INPUTS_OF_PART, Intake, Parts, RequestScope, entered, in_parts
from dovetail.config import ServerSection
from dovetail.config.tenants import key_digest
from dovetail.errors import QueueFullError, RequestError
from dovetail.interfaces.api import Api, ApiRequest, Prompt
from dovetail.sampling_params import Pooling, PoolingKind, SamplingParams
from dovetail.server import outputs
from dovetail.server.tenants.host import TenantHost
from dovetail.server.tenants.keys import Caller
from dovetail.server.tenants.tenancy import Tenancy
from dovetail.testing.api_server import EchoServer
from dovetail_apis.config import OpenAIConfig, ScoreConfig
from dovetail_apis.embeddings import Embeddings
from dovetail_apis.native import Native
from dovetail_apis.ollama import Ollama
from dovetail_apis.openai import OpenAIApi
from dovetail_apis.score import Score

PROMPTS = 20 * INPUTS_OF_PART


class NoConfig(BaseModel):
    pass


def request(count: int = PROMPTS, last: int = 5) -> ApiRequest:
    params = SamplingParams(max_new_tokens=0, pooling=Pooling(PoolingKind.LAST))
    ids = [[1 + i % 7] for i in range(count - 1)] + [[last]]
    return ApiRequest("r", tuple(Prompt(each, params, f"p{i}") for i, each in enumerate(ids)))


def cycles_during(work: Callable[[], Coroutine[Any, Any, object]]) -> int:
    """Return how often another task of the event loop runs while ``work`` is done."""
    cycles = 0

    async def scenario() -> None:
        nonlocal cycles
        task = asyncio.ensure_future(work())
        while not task.done():
            cycles += 1
            await asyncio.sleep(0)
        await task

    asyncio.run(scenario())
    return cycles


def most_calls_during(work: Callable[[], Coroutine[Any, Any, object]]) -> int:
    """Return the largest number of calls of functions between two turns of the event loop while ``work`` is done."""
    calls = [0]

    def count(frame: object, event: str, arg: object) -> None:
        calls[-1] += event in ("call", "c_call")

    async def scenario() -> None:
        task = asyncio.ensure_future(work())
        while not task.done():
            await asyncio.sleep(0)
            calls.append(0)
        await task

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        asyncio.run(scenario())
    finally:
        sys.setprofile(before)
    return max(calls)


def full_queue(group: str, msgs: object) -> None:
    raise QueueFullError("full")


def test_others_run_while_a_large_request_is_prepared():
    async def submit() -> None:
        service = EchoServer(Embeddings(NoConfig())).service
        with await service.submit_in_parts(request()) as generation:
            assert [choice.prompt_ids for choice in generation.choices] == [p.ids for p in request().prompts]
            assert [choice.index for choice in generation.choices] == list(range(PROMPTS))
            await generation.wait()
            assert all(choice.pooled is not None for choice in generation.choices)

    async def at_once() -> None:
        with EchoServer(Embeddings(NoConfig())).service.submit(request()) as generation:
            await generation.wait()

    assert cycles_during(submit) >= cycles_during(at_once) + 2 * PROMPTS // INPUTS_OF_PART - 2


MANY = 1000
TEXTS = [f"text {i}" for i in range(MANY)]
LABELS = {"query": "a", "items": TEXTS}


@pytest.mark.parametrize(
    ("api", "path", "body"),
    [
        (Score(ScoreConfig()), "/v1/score", LABELS | {"label_token_ids": [5, 6]}),
        (Score(ScoreConfig()), "/v1/score", LABELS | {"label_token_ids": [[5, 6, i] for i in range(MANY)]}),
        (Embeddings(NoConfig()), "/v1/embeddings", {"input": TEXTS, "cache_salt": TEXTS, "lora_path": [""] * MANY}),
        (OpenAIApi(OpenAIConfig()), "/v1/completions", {"prompt": TEXTS}),
        (Native(NoConfig()), "/generate", {"text": TEXTS, "sampling_params": [{"max_new_tokens": 2}] * MANY}),
    ],
)
def test_prompts_are_made_one_after_the_other_while_others_run(
    monkeypatch: pytest.MonkeyPatch, api: Api, path: str, body: dict[str, Any]
):
    """Between two turns of the event loop there are few calls for each prompt of a request (such as to measure its length), and
    not the many that make or check an object."""
    server = EchoServer(api)
    monkeypatch.setattr(server.engine, "open", full_queue)

    async def refused() -> None:
        assert (await server.request("POST", path, body)).status == 503

    assert most_calls_during(refused) <= 10 * MANY


def test_prompts_of_tenants_get_their_namespaces_while_others_run(monkeypatch: pytest.MonkeyPatch):
    server = EchoServer(Embeddings(NoConfig()))
    monkeypatch.setattr(server.engine, "open", full_queue)
    keys = json.dumps({"tenants": {"one": {"keys": [key_digest(b"a key")]}}})
    tenancy = Tenancy(ServerSection(keys="env:KEYS"), {"KEYS": keys})
    host = TenantHost(server.service, tenancy, Caller("one", False, ""), "/v1/embeddings", counted=True)
    prompts = tuple(replace(prompt, namespace="salt") for prompt in request(MANY).prompts)

    async def refused() -> None:
        with pytest.raises(QueueFullError):
            await host.submit_in_parts(ApiRequest("r", prompts))

    assert most_calls_during(refused) <= 10 * MANY


def test_a_small_request_is_prepared_without_a_pause():
    async def submit() -> None:
        (await EchoServer(Embeddings(NoConfig())).service.submit_in_parts(request(INPUTS_OF_PART))).close()

    assert cycles_during(submit) <= 2


def test_a_wrong_prompt_refuses_the_whole_request():
    async def submit() -> None:
        server = EchoServer(Embeddings(NoConfig()))
        with pytest.raises(RequestError, match="outside of the model's vocabulary"):
            await server.service.submit_in_parts(request(last=10**6))
        assert not server.engine.num_open

    asyncio.run(submit())


def test_a_request_that_a_full_queue_refuses_is_not_prepared(monkeypatch: pytest.MonkeyPatch):
    async def submit() -> None:
        server = EchoServer(Embeddings(NoConfig()))

        def full(tenant: str, count: int) -> None:
            assert (tenant, count) == ("greedy", PROMPTS)
            raise QueueFullError("full")

        monkeypatch.setattr(server.engine, "check", full)
        monkeypatch.setattr(outputs.GrowingChoice, "__init__", lambda *_: pytest.fail("a choice was made"))
        with entered(RequestScope(tenant="greedy")), pytest.raises(QueueFullError):
            await server.service.submit_in_parts(request())

    asyncio.run(submit())


def test_large_requests_of_a_tenant_are_prepared_one_after_the_other_and_those_of_others_in_between():
    order: list[str] = []

    def work(name: str) -> Parts[str]:
        for _ in range(50):
            order.append(name)
            yield
        return name

    async def prepare(intake: Intake, tenant: str, name: str, count: int) -> str:
        with entered(RequestScope(intake, tenant)):
            return await in_parts(work(name), count)

    async def scenario() -> None:
        intake, many = Intake(), INPUTS_OF_PART + 1
        mine = [prepare(intake, "greedy", name, many) for name in "abc"]
        results = await asyncio.gather(*mine, prepare(intake, "other", "o", many), prepare(intake, "greedy", "s", 1))
        assert results == list("abcos")

    asyncio.run(scenario())
    assert [name for name in order if name in "abc"] == ["a"] * 50 + ["b"] * 50 + ["c"] * 50
    assert order.index("o") < order.index("b"), "another tenant does not wait for a request of the first one"
    assert "".join(order).find("s" * 50) >= 0


def test_a_cancelled_request_ends_its_turn_and_gives_back_what_it_holds():
    given_back: list[str] = []

    def work() -> Parts[None]:
        try:
            while True:
                yield
        finally:
            given_back.append("lease")

    async def scenario() -> None:
        with entered(RequestScope(Intake(), "one")):
            task = asyncio.ensure_future(in_parts(work(), PROMPTS))
            for _ in range(5):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert given_back == ["lease"]
            await asyncio.wait_for(in_parts(iter_none(), PROMPTS), 30)

    asyncio.run(scenario())


def iter_none() -> Parts[None]:
    yield


leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5)
values = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=60
)


@given(values, st.sampled_from([0.0, 1e-6, 1.0]))
def test_json_in_parts_is_the_json(value: object, long: float):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_parts, "_LONG", long)
        assert encode_in_parts(value) == msgspec.json.encode(value)


@pytest.mark.parametrize(
    "value",
    [
        {"data": [{"index": i, "embedding": [i / 7] * 8} for i in range(1000)], "model": 'a"b'},
        [{"meta_info": {"logprobs": [[0.5, i, None] for i in range(1000)]}, "é": ()}],
        [[1.5] * 500 for _ in range(7)],
    ],
)
def test_no_part_is_long(monkeypatch: pytest.MonkeyPatch, value: object):
    sizes: list[int] = []
    encode = json_parts._encode

    def noted(buffer: bytearray, part: object) -> None:
        sizes.append(-len(buffer))
        encode(buffer, part)
        sizes[-1] += len(buffer)

    monkeypatch.setattr(json_parts, "_encode", noted)
    monkeypatch.setattr(json_parts, "_LONG", 0.0)  # every call is too long
    assert encode_in_parts(value) == msgspec.json.encode(value)
    assert max(sizes) <= 8 * 500


def test_arrays_are_written_as_lists():
    vector = np.linspace(0, 1, 9).astype(np.float32)
    value = {"data": [{"index": i, "embedding": vector + i} for i in range(5)]}
    plain = {"data": [{"index": i, "embedding": (vector + i).tolist()} for i in range(5)]}
    assert encode_in_parts(value) == msgspec.json.encode(plain)
    assert responses.json_response(value).body == msgspec.json.encode(plain)
    with pytest.raises(TypeError, match="a range is in an answer"):
        responses.json_response({"a": range(3)})


@pytest.mark.parametrize(
    ("api", "path", "field"),
    [(Embeddings, "/v1/embeddings", "input"), (Embeddings, "/encode", "text"), (Ollama, "/api/embed", "input")],
)
def test_a_large_answer_of_vectors_is_written_on_a_thread_and_never_a_list_of_all_their_numbers(
    monkeypatch: pytest.MonkeyPatch, api: type[Any], path: str, field: str
):
    """To free such a list stops all threads for as long as it takes."""
    seen: list[tuple[bool, object]] = []

    def noted(value: object) -> memoryview:
        seen.append((threading.current_thread() is threading.main_thread(), value))
        return encode_in_parts(value)

    monkeypatch.setattr(offload, "LARGE_ANSWER", 0)
    monkeypatch.setattr(responses, "encode_in_parts", noted)
    body = {"model": "tiny", field: ["one", "two", "three"]}
    answer = asyncio.run(EchoServer(api(NoConfig())).request("POST", path, body))
    assert answer.status == 200
    ((on_loop, value),) = seen
    assert not on_loop
    assert not [one for one in _lists(value) if any(isinstance(item, float) for item in one)]


def _lists(value: object) -> Iterator[list[Any]]:
    if isinstance(value, list):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _lists(inner)
