"""Test ngram in the engine and behind a server: outputs are those without it, repeated text is drafted the next time,
and the numbers of drafts in requests and in /metrics agree.

.venv/bin/python -m pytest -q tests/e2e/test_engine_ngram.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from engine_ngram_odd import run_odd_engine

from dovetail import LLM, SamplingParams
from dovetail.config import Config
from dovetail.messages import GenerateMsg, TokenOutput
from dovetail.registry.setup import setup
from dovetail.server.launch import running_server

COPY = "Repeat this text: the red fox saw seven green birds over the old stone bridge. "
GREEDY = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
SETS = ("threads=1", "speculative=ngram", "scheduler.draft=always", "server.port=0", "server.log_level=error")


def served() -> Config:
    return setup((), SETS, {})[0]


def make(**sections: object) -> LLM:
    sections = {"grammar": {"isolation": "thread"}} | sections
    return LLM("tiny", device="cpu", threads=1, scheduler={"draft": "always"}, **sections)


@pytest.fixture(scope="module")
def plain():
    return make(speculative="none")


def questions(count):
    things = ("France", "Peru", "seven", "the sea", "12 + 7", "green", "Ada Lovelace", "a list: 5, 3, 9, 1")
    frames = ("What is {}?", "Tell me about {} and {}.", "{} {} {}", 'JSON of {}: {{"name": "', "Sort {}, then {}.")
    return [f"{i % 7} " + frames[i % 5].format(*[things[(i * k) % 8] for k in (1, 3, 5)]) for i in range(count)]


def test_greedy_outputs_of_two_hundred_prompts_are_the_same(plain):
    prompts = questions(200)
    expected = plain.generate(prompts, GREEDY)
    llm = make(speculative="ngram")
    outputs = llm.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    stats = llm.loop.stats()
    assert stats.accepted_tokens > 200
    assert (stats.pages_used, stats.drafter_errors) == (0, 0)


def test_what_was_said_once_takes_fewer_steps_the_next_time(plain):
    expected = plain.generate(COPY, GREEDY)[0]
    llm = make(speculative="ngram")
    lengths = []
    for _ in range(3):
        output = llm.generate(COPY, GREEDY)[0]
        assert output.token_ids == expected.token_ids
        lengths.append(output.acceptance)
    assert lengths[1].length > 6
    assert lengths[1].accepted > 30
    assert lengths[0].accepted < lengths[1].accepted
    assert lengths[2].length > 6


def generated(llm, rid, namespace):
    llm.loop.handle(GenerateMsg(rid, llm.tokenizer.encode(COPY), GREEDY, 0, namespace))
    last = None
    while llm.loop.has_work:
        for answer in llm.loop.step():
            if isinstance(answer, TokenOutput):
                last = answer
    return last


def test_namespaces_gain_nothing_from_each_other():
    llm = make(speculative="ngram")
    first, other = generated(llm, "a", "one"), generated(llm, "b", "two")
    again = generated(llm, "c", "one")
    assert (first.drafted, first.accepted) == (other.drafted, other.accepted)
    assert again.accepted > other.accepted


# -- behind a server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        running_server(served()) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def numbers(client):
    """Return the counters and gauges of /metrics by name, without labels."""
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0].removeprefix("dovetail_"): float(line.rsplit(" ", 1)[1]) for line in lines}


def ask(client, **changes):
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = client.post("/generate", json={"text": COPY, "sampling_params": sampling | changes})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_usage_meta_info_and_metrics_agree(client):
    before = numbers(client)
    body = {"model": "tiny", "prompt": COPY, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "n": 2}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    drafts, details = usage["speculation"], usage["completion_tokens_details"]
    meta = [answer["meta_info"] for answer in ask(client, n=2)]
    after = numbers(client)

    def gained(name):
        return after[f"{name}_total"] - before[f"{name}_total"]

    def both(ours, native):
        return drafts[ours] + sum(m[native] for m in meta)

    assert gained("drafted_tokens") == both("drafted_tokens", "spec_draft_token_num")
    assert gained("accepted_tokens") == both("accepted_tokens", "spec_accept_token_num")
    assert gained("verify_steps") == both("verify_steps", "spec_verify_ct")
    assert 0 < gained("draft_steps") <= gained("verify_steps")
    assert gained("draft_seconds") > 0
    assert gained("verify_seconds") > 0
    assert gained("drafter_errors") == 0
    assert details["accepted_prediction_tokens"] == drafts["accepted_tokens"] > 0
    assert details["rejected_prediction_tokens"] == drafts["drafted_tokens"] - drafts["accepted_tokens"]
    assert drafts["acceptance_rate"] == drafts["accepted_tokens"] / drafts["drafted_tokens"]
    assert drafts["acceptance_length"] == 1 + drafts["accepted_tokens"] / drafts["verify_steps"]
    answer = client.post("/v1/completions", json=body | {"return_spec_tokens_details": True}).json()
    each, total = answer["sglext"]["spec_tokens_details"], answer["usage"]["speculation"]
    assert sum(one["spec_num_proposed_drafts"] for one in each) == total["drafted_tokens"]
    assert sum(one["spec_num_correct_drafts"] for one in each) == total["accepted_tokens"]
    for m in meta:
        assert m["spec_accept_length"] == 1 + m["spec_accept_token_num"] / m["spec_verify_ct"]
        assert m["spec_accept_rate"] == m["spec_accept_token_num"] / m["spec_draft_token_num"]
    length = 1 + after["accepted_tokens_total"] / after["verify_steps_total"]
    assert after["spec_acceptance_length"] == pytest.approx(length)
    assert usage["completion_tokens"] == 80, "rejected drafts are not counted"


def test_the_last_chunk_of_a_stream_says_it_too(client):
    body = {"model": "tiny", "messages": [{"role": "user", "content": COPY}], "temperature": 0, "max_tokens": 40}
    whole = client.post("/v1/chat/completions", json=body).json()
    stream = client.post(
        "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert whole["usage"]["speculation"].keys() == events[-1]["usage"]["speculation"].keys()
    assert events[-1]["usage"]["speculation"]["accepted_tokens"] > 0


def test_a_server_without_a_drafter_says_nothing_of_drafts(tiny):
    answer = tiny.post("/v1/completions", json={"model": "tiny", "prompt": COPY, "max_tokens": 8}).json()
    assert not {"speculation", "completion_tokens_details"} & answer["usage"].keys()
    meta = tiny.post("/generate", json={"text": COPY, "sampling_params": {"max_new_tokens": 8}}).json()["meta_info"]
    assert not [name for name in meta if name.startswith("spec_")]


def test_a_drafter_that_raises_is_counted_and_shown_and_its_requests_go_on(client):
    expected = ask(client)["text"]
    with (
        running_server(served(), target=run_odd_engine) as url,
        httpx.Client(base_url=url, timeout=60) as odd,
    ):
        answer = ask(odd)
        assert answer["text"] == expected
        assert answer["meta_info"]["spec_accept_token_num"] > 0
        errors = numbers(odd)["drafter_errors_total"]
        assert errors > 5
        assert odd.get("/server_info").json()["stats"]["drafter_errors"] == errors
        assert odd.get("/health").status_code == 200
