"""Test groups, sessions and prompts without new tokens over HTTP, and the settings of pins.

.venv/bin/python -m pytest -q tests/e2e/test_groups_server.py
"""

from __future__ import annotations

import re

import httpx
import pytest
from engine_runs import check_idle, make_llm, prompts_of

from dovetail import SamplingParams
from dovetail.messages import GenerateMsg

GREEDY = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
PREFILL = SamplingParams(max_new_tokens=0)


@pytest.fixture
def server(tiny: httpx.Client):
    """Use the shared server, and leave it without pins."""
    yield tiny
    assert tiny.post("/flush_cache").status_code == 200
    assert metric(tiny, "kv_pages_pinned") == 0


def metric(tiny: httpx.Client, name: str) -> float:
    tiny.get("/server_info")  # makes the engine say how it is
    found = re.search(rf"^dovetail_{name} (\S+)$", tiny.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def generate(server: httpx.Client, ids: list[int], new: int = 0, **fields: object):
    sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
    answer = server.post("/generate", json={"input_ids": ids, "sampling_params": sampling, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_groups_and_sessions_of_the_native_api(server: httpx.Client):
    taken = metric(server, "pins_taken_total")
    first, second, third = prompts_of([5] * 3, seed=77, shared=64)
    answer = generate(server, first, group="g", group_size=3)
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert metric(server, "kv_pages_pinned") == 4
    for ids in (second, third):
        assert generate(server, ids, 2, group="g", group_size=3)["meta_info"]["cached_tokens"] == 64
    assert metric(server, "kv_pages_pinned") == 0
    generate(server, first, 2, session="s", cache_salt="salt")
    assert metric(server, "kv_pages_pinned") == 4
    assert metric(server, "pins_taken_total") == taken + 2
    assert metric(server, "kv_pages_used") == 0


def test_a_stream_without_new_tokens_has_an_end(server: httpx.Client):
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 0}, "stream": True}
    first, done = [line for line in server.post("/generate", json=body).text.split("\n") if line]
    assert '"finish_reason":{"type":"length","length":0}' in first.replace(" ", "")
    assert done == "data: [DONE]"
    body = {"prompt": "The sky", "max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}}
    *_, usage, done = [line for line in server.post("/v1/completions", json=body).text.split("\n") if line]
    assert '"completion_tokens":0' in usage.replace(" ", "")
    assert done == "data: [DONE]"


def test_prompts_of_one_request_may_be_a_group(server: httpx.Client):
    answers = generate(server, prompts_of([5] * 4, seed=78, shared=64), 2, group="all")
    assert sorted(a["meta_info"]["cached_tokens"] for a in answers) == [0, 64, 64, 64]
    assert metric(server, "kv_pages_pinned") == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"group": ""}, "group"),
        ({"group_size": 0}, "group_size"),
        ({"group": "x" * 300}, "group"),
        ({"session": 5}, "session"),
        ({"session": "s", "sampling_params": {"n": 2}}, "2 outputs of session"),
    ],
    ids=str,
)
def test_hints_that_are_refused(tiny: httpx.Client, fields: dict, words: str):
    answer = tiny.post("/generate", json={"input_ids": [5, 6]} | fields)
    assert answer.status_code == 400
    assert words in answer.text


def test_an_echo_without_new_tokens(server: httpx.Client):
    """Evaluation harnesses score texts by OpenAI's completions in this way."""
    body = {"prompt": "The sky is blue.", "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    (choice,) = server.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("The sky is blue.", "length")
    (longer,) = server.post("/v1/completions", json=body | {"max_tokens": 1}).json()["choices"]
    assert choice["logprobs"]["tokens"] == longer["logprobs"]["tokens"][:-1]
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert values[1:] == pytest.approx(longer["logprobs"]["token_logprobs"][1:-1], abs=1e-4)


def test_a_cache_that_keeps_nothing_has_nothing_to_pin():
    llm = make_llm("tiny", cache="none")
    try:
        outputs = llm.generate(prompts_of([9] * 4, shared=64), GREEDY, group="g", group_size=9)
        (one,) = llm.generate(prompts_of([9], shared=64), GREEDY, session="s")
        assert [o.cached_tokens for o in (*outputs, one)] == [0] * 5
        stats = llm.loop.stats()
        assert (stats.pages_pinned, stats.pins_taken, stats.pins_dropped) == (0, 0, 0)
        check_idle(llm)
    finally:
        llm.close()


def test_settings_reach_the_engine():
    llm = make_llm("tiny", scheduler={"pin_seconds": 5, "pin_fraction": 0.5})
    try:
        limits = llm.loop.scheduler.limits
        assert (limits.pin_seconds, limits.pin_pages) == (5, 99)
        for i, prompt in enumerate(prompts_of([500] * 5)):  # 31 pages each
            llm.loop.handle(GenerateMsg(str(i), prompt, PREFILL, 0, session=str(i)))
            while llm.loop.has_work:
                llm.loop.step()
        stats = llm.loop.stats()
        assert (stats.pages_pinned, stats.pins_taken, stats.pins_dropped) == (93, 5, 2)
    finally:
        llm.close()


TALK = [{"role": "user", "content": "Name the capital of France, and then that of Italy, and say a word about both."}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TALK, "max_tokens": 4}),
        ("/v1/completions", {"prompt": TALK[0]["content"], "max_tokens": 4}),
        ("/v1/responses", {"input": TALK[0]["content"], "max_output_tokens": 4}),
        ("/v1/messages", {"messages": TALK, "max_tokens": 4}),
        ("/api/chat", {"messages": TALK, "options": {"num_predict": 4}, "stream": False}),
        ("/api/generate", {"prompt": TALK[0]["content"], "raw": True, "options": {"num_predict": 4}, "stream": False}),
    ],
)
def test_a_session_of_any_api_is_kept_warm(server: httpx.Client, path: str, body: dict[str, object]):
    answer = server.post(path, json={"model": "tiny", **body, "session": "talk"})
    assert answer.status_code == 200, answer.text
    assert metric(server, "kv_pages_pinned") > 0
