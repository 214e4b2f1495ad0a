"""Test a live server of the embedded model with the official openai client and raw requests.

.venv/bin/python -m pytest -q tests/e2e/test_server_openai.py
"""

import asyncio
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
SENTENCE = "Extract the name and the age as JSON: Anna is 31 years old."
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tiny_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_leaks(tiny: httpx.Client):
    """Check after each test that the server is idle, and that every page is free or cached."""
    yield
    deadline = time.monotonic() + 10
    while (info := tiny.get("/server_info").json())["stats"]["running"] and time.monotonic() < deadline:
        time.sleep(0.02)
    stats = info["stats"]
    assert info["open_requests"] == stats["running"] == stats["waiting"] == stats["pages_used"] == 0
    assert tiny.post("/flush_cache").status_code == 200
    assert tiny.get("/server_info").json()["stats"]["pages_cached"] == 0


def generate(tiny: httpx.Client, text: str, **sampling: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 24, "temperature": 0, **sampling}
    answer = tiny.post("/generate", json={"text": text, "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model="tiny", messages=FRANCE, temperature=0, max_tokens=40)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_reasoning_effort(client: openai.OpenAI):
    """None turns reasoning off, in chats and in responses, and all other efforts turn it on."""
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    for effort, thinks in (("none", False), ("low", True), ("max", True)):
        chat = client.chat.completions.create(model="tiny", messages=question, temperature=0, reasoning_effort=effort)
        assert (chat.choices[0].message.content, bool(chat.choices[0].message.reasoning_content)) == (
            "2 + 3 = 5.",
            thinks,
        )
        response = client.responses.create(
            model="tiny", input="What is 2 + 3?", temperature=0, reasoning={"effort": effort}
        )
        assert (response.output_text, response.output[0].type == "reasoning") == ("2 + 3 = 5.", thinks)


def test_place_of_cached_tokens(tiny: httpx.Client):
    """SGLang's bench_serving reads it for its cache report."""
    first, again = (generate(tiny, "one two three " * 20)["meta_info"] for _ in range(2))
    assert "cached_tokens_details" not in first
    assert again["cached_tokens_details"] == {"device": again["cached_tokens"], "host": 0}
    assert again["cached_tokens"] > 0


def test_stream_equals_whole(client: openai.OpenAI):
    whole = client.chat.completions.create(model="tiny", messages=FRANCE, temperature=0, max_tokens=40)
    stream = client.chat.completions.create(
        model="tiny", messages=FRANCE, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage
    assert whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 3, "it came in pieces"


def test_completions(client: openai.OpenAI):
    one = client.completions.create(model="tiny", prompt="The sky is", max_tokens=8, temperature=0)
    two = client.completions.create(model="tiny", prompt=["The sky is", "Two and two"], max_tokens=8, temperature=0)
    assert two.choices[0].text == one.choices[0].text
    assert [choice.index for choice in two.choices] == [0, 1]
    pieces = client.completions.create(model="tiny", prompt="The sky is", max_tokens=8, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == one.choices[0].text


def test_chat_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="tiny", messages=FRANCE, temperature=0, max_tokens=20, logprobs=True, top_logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    for entry in logprobs.content:
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 5
        assert best == sorted(best, reverse=True)
        assert entry.logprob == best[0] <= 0, "greedy takes the likeliest"
        assert sum(math.exp(value) for value in best) <= 1 + 1e-4
    assert (
        b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == answer.choices[0].message.content
    )


def test_prompt_logprobs_are_those_of_the_same_tokens_as_output(client: openai.OpenAI):
    """Echoed logprobs of a greedy continuation equal those with which it was generated: prefill and decode agree."""
    first = client.completions.create(
        model="tiny", prompt="The capital of France is", max_tokens=6, temperature=0, logprobs=0
    )
    text = "The capital of France is" + first.choices[0].text
    second = client.completions.create(model="tiny", prompt=text, max_tokens=1, temperature=0, logprobs=0, echo=True)
    made, echoed = first.choices[0].logprobs, second.choices[0].logprobs
    assert made
    assert echoed
    count = len(made.tokens or [])
    assert (echoed.tokens or [])[-1 - count : -1] == made.tokens
    assert (echoed.token_logprobs or [])[-1 - count : -1] == pytest.approx(made.token_logprobs, abs=0.02)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_json_schema(client: openai.OpenAI, temperature: float):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": SENTENCE}],
        temperature=temperature,
        seed=3,
        max_tokens=120,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    )
    person = json.loads(answer.choices[0].message.content or "")
    assert set(person) == {"name", "age"}
    assert isinstance(person["name"], str)
    assert 0 <= person["age"] <= 120
    if temperature == 0:
        assert person == {"name": "Anna", "age": 31}, "the values of the sentence"


def test_json_object(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": SENTENCE}], temperature=0, max_tokens=200,
        response_format={"type": "json_object"},
    )  # fmt: skip
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_regex_and_grammar_as_extra_fields(client: openai.OpenAI):
    def constrained(**extra: str) -> str | None:
        return (
            client.chat.completions.create(model="tiny", messages=FRANCE, max_tokens=20, seed=1, extra_body=extra)
            .choices[0]
            .message.content
        )

    assert constrained(regex="(yes|no)!") in ("yes!", "no!")
    assert constrained(ebnf='root ::= "left" | "right"') in ("left", "right")


def test_n_and_seed(client: openai.OpenAI):
    def texts(seed: int, n: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Write a short story about a fox."}],
            n=n,
            seed=seed,
            temperature=2.0,
            max_tokens=16,
        )
        return [choice.message.content for choice in answer.choices]

    three = texts(5, 3)
    assert texts(5, 3) == three
    assert texts(5, 1) == three[:1], "the first of n is what n=1 gives"
    assert len(set(three)) > 1
    assert texts(6, 3) != three


def test_best_of_answers_with_the_likeliest(client: openai.OpenAI):
    """The answer is the best of the outputs of the same seed with n, by the mean log-probability of their tokens."""
    asked = {
        "model": "tiny",
        "prompt": ["Once upon a time", "One and"],
        "temperature": 1.5,
        "seed": 5,
        "max_tokens": 12,
    }
    all_of_them = client.completions.create(**asked, n=5, logprobs=0).choices
    chosen = client.completions.create(**asked, n=2, best_of=5)
    expected = []
    for outputs in (all_of_them[:5], all_of_them[5:]):
        means = [statistics.fmean(one.logprobs.token_logprobs) for one in outputs if one.logprobs]
        expected += [outputs[i].text for i in sorted(range(5), key=lambda i: -means[i])[:2]]
    assert [choice.text for choice in chosen.choices] == expected
    assert [choice.index for choice in chosen.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in chosen.choices)
    assert chosen.usage
    assert chosen.usage.completion_tokens > 2 * 2 * 12


def test_stop(client: openai.OpenAI, tiny: httpx.Client):
    whole = generate(tiny, "one two three four")["text"]
    stop = whole[3:6]
    answer = client.completions.create(
        model="tiny", prompt="one two three four", max_tokens=24, temperature=0, stop=[stop]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_max_tokens(tiny: httpx.Client):
    answer = generate(tiny, "one two", max_new_tokens=5, ignore_eos=True)
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == 5
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_prefixes_are_reused(tiny: httpx.Client):
    text = "A long prefix that is worth keeping. " * 20
    cold = generate(tiny, text + "First question?")
    warm = generate(tiny, text + "First question?")
    other = generate(tiny, text + "Another one?")
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] > 100
    assert other["meta_info"]["cached_tokens"] > 100
    assert warm["output_ids"] == cold["output_ids"]
    salted = tiny.post(
        "/generate", json={"text": text, "cache_salt": "mine", "sampling_params": {"max_new_tokens": 1}}
    ).json()
    assert salted["meta_info"]["cached_tokens"] == 0
    answer = tiny.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert tiny.get("/metrics").text.count("dovetail_prefix_hit_rate") >= 1


def test_many_at_once_equal_one_by_one(tiny: httpx.Client):
    prompts = [f"Question {i}: what is {i} plus {i * 7}?" for i in range(24)]
    alone = [generate(tiny, prompt)["output_ids"] for prompt in prompts]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda prompt: generate(tiny, prompt)["output_ids"], prompts))
    assert together == alone


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "x", "json_schema": {"type": "nonsense"}}, "nonsense"),
        ({"prompt": "x", "json_schema": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"prompt": "x", "regex": "(unclosed"}, ""),
        ({"prompt": "x", "ebnf": "root ::= missing_rule"}, ""),
        ({"prompt": "x", "ebnf": "this is no grammar"}, ""),
        ({"prompt": "x " * 3000}, "2048"),
        ({"prompt": "x", "max_tokens": 5000}, "2048"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_only_the_engine_can_refuse(tiny: httpx.Client, body: dict, words: str, stream: bool):
    answer = tiny.post("/v1/completions", json=body | {"stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert (error["type"], len(error["message"]) > 20) == ("invalid_request_error", True)


def test_errors_of_the_client(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        client.chat.completions.create(model="tiny", messages=FRANCE, max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model="tiny", prompt="word " * 3000)


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "dovetail"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(tiny: httpx.Client, stream: bool):
    body = {"prompt": "Count:", "max_tokens": 1900, "ignore_eos": True, "n": 3, "stream": stream}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=tiny.base_url, timeout=60) as client:
            task = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while (await client.get("/server_info")).json()["stats"]["running"] != 3:
                await asyncio.sleep(0.01)
                assert not task.done()
            task.cancel()

    asyncio.run(leave())  # nothing_leaks does the rest


def test_abort(tiny: httpx.Client):
    body = {
        "text": "Count:",
        "rid": "count",
        "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True},
        "stream": True,
    }
    with tiny.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert httpx.post(f"{tiny.base_url}/abort_request", json={"rid": "count"}).json() == {"aborted": True}
        events = [json.loads(line[6:]) for line in itertools.chain(lines) if line.startswith("data: {")]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_info(tiny: httpx.Client):
    info = tiny.get("/server_info").json()
    assert info["engine"]["resolved"]["chosen"]["model"]["name"]
    assert tiny.get("/health_generate").status_code == 200
    metrics = tiny.get("/metrics").text
    assert 'served_model="tiny"' in metrics
    assert f'cache="{info["engine"]["resolved"]["chosen"]["cache"]["name"]}"' in metrics
    assert info["stats"]["pages_total"] > 0
