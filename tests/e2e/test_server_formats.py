"""Check the format of answers with the official openai client's own models, and that streams add up to whole answers.

    .venv/bin/python -m pytest -q tests/e2e/test_server_formats.py

The engine is scripted (``fake_engine``): it echoes the prompt, so that every answer is known exactly.
"""

import itertools
import json
import subprocess
import sys
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from dovetail.config.checkpoint import locate
from dovetail.generation.expansion import derive_seed
from dovetail.interfaces.api import ApiRequest, Prompt
from dovetail.sampling_params import SamplingParams
from dovetail.server.expansion import messages
from dovetail.tokenizer import Tokenizer

TINY = Tokenizer.from_dir(locate("tiny"))
TEXT = "Zürich 日本 🎉 and some more words"
TALK = [{"role": "user", "content": TEXT}]
SAID = f"user\n{TEXT}\nassistant\n"  # the engine's output for TALK: the template's text


def events(answer: httpx.Response) -> list[Any]:
    """Return the events of a stream, whose last one must be the end marker."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def chat(fake: httpx.Client, **body: Any) -> httpx.Response:
    answer = fake.post("/v1/chat/completions", json={"model": "tiny", "messages": TALK, **body})
    assert answer.status_code == 200, answer.text
    return answer


def complete(fake: httpx.Client, **body: Any) -> httpx.Response:
    answer = fake.post("/v1/completions", json={"model": "tiny", "prompt": TEXT, "max_tokens": 64, **body})
    assert answer.status_code == 200, answer.text
    return answer


def native(fake: httpx.Client, **body: Any) -> httpx.Response:
    answer = fake.post("/generate", json={"text": TEXT, **body})
    assert answer.status_code == 200, answer.text
    return answer


def test_chat(fake: httpx.Client):
    answer = ChatCompletion.model_validate(chat(fake).json(), strict=True)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "length")
    assert answer.model == "tiny"
    assert answer.usage
    tokens = len(TINY.encode(TINY.apply_chat_template(TALK), add_special_tokens=False))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (tokens, tokens)
    assert answer.usage.total_tokens == 2 * tokens
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("n", [1, 3])
def test_chat_stream_adds_up(fake: httpx.Client, n: int):
    whole = chat(fake, n=n, seed=1).json()
    chunks = [
        ChatCompletionChunk.model_validate(event, strict=True)
        for event in events(chat(fake, n=n, seed=1, stream=True, stream_options={"include_usage": True}))
    ]
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage
    assert last.usage.model_dump(exclude_none=True) == whole["usage"]
    assert len({chunk.id for chunk in chunks}) == 1
    for index in range(n):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert (
            "".join(choice.delta.content or "" for choice in mine)
            == whole["choices"][index]["message"]["content"]
            == SAID
        )
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]


def test_stream_without_usage(fake: httpx.Client):
    assert all("usage" not in event for event in events(chat(fake, stream=True)))


def test_chat_logprobs(fake: httpx.Client):
    whole = chat(fake, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for event in events(chat(fake, logprobs=True, top_logprobs=2, stream=True))
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert whole == streamed
    assert b"".join(bytes(entry["bytes"]) for entry in whole if not entry["token"].startswith("<|")).decode() == SAID
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.5 for entry in whole)
    ChatCompletion.model_validate(chat(fake, logprobs=True).json(), strict=True)


def test_message_forms_that_mean_the_same(fake: httpx.Client):
    parts = [{"type": "text", "text": TEXT[:5]}, {"type": "text", "text": TEXT[5:]}]
    answer = fake.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts, "name": "me"}]})
    assert answer.json()["choices"][0]["message"]["content"] == SAID
    turns = [{"role": "developer", "content": "Be kind."}, {"role": "assistant", "content": None, "refusal": None}]
    text = fake.post("/v1/chat/completions", json={"messages": turns}).json()["choices"][0]["message"]["content"]
    assert text == "system\nBe kind.\nassistant\n\nassistant\n"


def test_completion(fake: httpx.Client):
    answer = Completion.model_validate(complete(fake).json(), strict=True)
    tokens = TINY.encode(TEXT)
    said = TINY.decode((tokens * 9)[:64])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (said, "length")
    chunks = [event["choices"][0] for event in events(complete(fake, stream=True))]
    assert "".join(chunk["text"] for chunk in chunks) == said
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_completion_default_length(fake: httpx.Client):
    assert fake.post("/v1/completions", json={"prompt": "one"}).json()["usage"]["completion_tokens"] == 16
    nearly_full = fake.post("/v1/completions", json={"prompt": [5] * 2040}).json()
    assert nearly_full["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    "prompts", [["one two", "three"], [TINY.encode("one two"), TINY.encode("three")], [[492, 1011], [5]]]
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_times_n(fake: httpx.Client, prompts: list[Any], stream: bool):
    answer = complete(fake, prompt=prompts, n=2, max_tokens=2, stream=stream, stream_options={"include_usage": True})
    ids = [TINY.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    expected = [TINY.decode((tokens * 2)[:2]) for tokens in ids for _ in range(2)]
    if stream:
        found, *rest = [""] * 4, events(answer)
        for event in rest[0]:
            for choice in event["choices"]:
                found[choice["index"]] += choice["text"]
        usage = rest[0][-1]["usage"]
    else:
        found, usage = [choice["text"] for choice in answer.json()["choices"]], answer.json()["usage"]
    assert found == expected
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(map(len, ids)), 8)  # each prompt counts once


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_logprobs(fake: httpx.Client, stream: bool):
    tokens = TINY.encode(TEXT)
    answer = complete(fake, echo=True, logprobs=2, max_tokens=3, stream=stream)
    choices = [event["choices"][0] for event in events(answer)] if stream else answer.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == TEXT + TINY.decode(tokens[:3])
    lists = {
        name: [x for choice in choices for x in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert {len(values) for values in lists.values()} == {len(tokens) + 3}
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in lists["top_logprobs"][1:])
    offsets = lists["text_offset"]
    assert offsets == sorted(offsets)
    assert [name for name in lists["tokens"] if name.startswith("bytes:\\x")], "🎉 is several tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("include", "said"), [(None, "Zürich 日本 🎉"), (True, "Zürich 日本 🎉 and s")])
def test_stop_strings(fake: httpx.Client, stream: bool, include: bool | None, said: str):
    answer = complete(fake, stop=["and some words", " and s"], include_stop_str_in_output=include, stream=stream)
    choices = [event["choices"][0] for event in events(answer)] if stream else answer.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == said
    assert choices[-1]["finish_reason"] == "stop"


def test_a_stop_token_is_counted_and_not_shown(fake: httpx.Client):
    tokens = TINY.encode("one two three")
    body = {"text": "one two three", "sampling_params": {"stop_token_ids": [tokens[2]]}, "return_logprob": True}
    answer = fake.post("/generate", json=body).json()
    assert answer["text"] == "one two"
    assert answer["output_ids"] == tokens[:3]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[2]}
    assert len(answer["meta_info"]["output_token_logprobs"]) == 3
    openai = complete(fake, prompt="one two three", stop_token_ids=[tokens[2]], logprobs=0).json()
    assert openai["choices"][0]["text"] == "".join(openai["choices"][0]["logprobs"]["tokens"]) == "one two"
    body["sampling_params"]["no_stop_trim"] = True
    assert fake.post("/generate", json=body).json()["text"] == "one two three"


def test_native(fake: httpx.Client):
    answer = native(fake, rid="my-id", sampling_params={"max_new_tokens": 4}).json()
    tokens = TINY.encode(TEXT)
    assert answer["text"] == TINY.decode(tokens[:4])
    assert answer["output_ids"] == tokens[:4]
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "my-id",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": len(tokens),
        "completion_tokens": 4,
        "cached_tokens": 0,
    }


def test_native_default_length(fake: httpx.Client):
    assert native(fake).json()["meta_info"]["completion_tokens"] == 128


def test_native_stream_is_cumulative(fake: httpx.Client):
    seen = events(native(fake, stream=True, sampling_params={"max_new_tokens": 12}))
    whole = native(fake, sampling_params={"max_new_tokens": 12}).json()
    assert seen[-1]["text"] == whole["text"]
    assert seen[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(seen))
    assert all(event["meta_info"]["finish_reason"] is None for event in seen[:-1])


def test_native_batches_are_lists(fake: httpx.Client):
    several = native(fake, text=["one", "two"], sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}]).json()
    assert [answer["text"] for answer in several] == ["one", "twotwo"]
    assert isinstance(native(fake, text=["one"]).json(), list)
    assert len(native(fake, text="one", sampling_params={"n": 2}).json()) == 2
    seen = events(native(fake, text=["one", "two"], stream=True, sampling_params={"max_new_tokens": 1}))
    assert {event["index"]: event["text"] for event in seen} == {0: "one", 1: "two"}
    ids = fake.post("/generate", json={"input_ids": [[5, 6], [7]], "sampling_params": {"max_new_tokens": 1}}).json()
    assert [answer["output_ids"] for answer in ids] == [[5], [7]]


def test_native_logprobs(fake: httpx.Client):
    body = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = native(fake, text="one two", sampling_params={"max_new_tokens": 1}, logprob_start_len=0, **body).json()[
        "meta_info"
    ]
    one, two = TINY.encode("one two")
    assert meta["input_token_logprobs"] == [[None, one, "one"], [-0.5, two, " two"]]
    assert meta["output_token_logprobs"] == [[-0.5, one, "one"]]
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["input_top_logprobs"][1]) == len(meta["output_top_logprobs"][0]) == 2
    later = native(fake, text="one two", logprob_start_len=1, **body).json()["meta_info"]
    assert len(later["input_token_logprobs"]) == 1
    assert native(fake, text="one two", **body).json()["meta_info"]["input_token_logprobs"] == []
    scored = native(fake, text="one two", sampling_params={"max_new_tokens": 0}, return_logprob=True).json()
    assert scored["meta_info"]["input_token_logprobs"] == [[None, one, None], [-0.5, two, None]]


def test_models_and_info(fake: httpx.Client):
    (model,) = fake.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 2048)
    assert fake.get("/v1/models/tiny").json() == model
    info = fake.get("/model_info").json()
    assert (info["context_length"], info["vocab_size"], info["has_chat_template"]) == (2048, 4096, True)
    server = fake.get("/server_info").json()
    assert server["status"] == "ready"
    assert server["config"]["server"]["drain_seconds"] == 2
    assert fake.get("/health").status_code == 200
    health = fake.get("/health_generate")
    assert health.status_code == 200
    graphs = {"graphs_captured": 3, "graphs_missing": 4, "graphs_refused": 0}
    assert health.json() == {"status": "ok", "warm_up": {"done": False, "kernels": 0, "kernels_compiled": 0, **graphs}}
    assert "dovetail_graphs_missing 4.0" in fake.get("/metrics").text


def test_flush_cache(fake: httpx.Client):
    assert fake.get("/flush_cache").status_code == fake.post("/flush_cache").status_code == 200
    with fake.stream("POST", "/generate", json={"text": "one", "stream": True, "cache_salt": "slow"}) as running:
        pieces = running.iter_raw()  # kept referenced, because releasing it closes the connection
        next(pieces)
        answer = fake.post("/flush_cache")
        assert answer.status_code == 400
        assert "requests are running" in answer.json()["error"]["message"]


def test_metrics(fake: httpx.Client):
    def value(name: str) -> float:
        lines = fake.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    before = {
        name: value(f"dovetail_{name}_count") for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
    }
    complete(fake, max_tokens=5, n=2)
    assert value("dovetail_time_to_first_token_seconds_count") == before["time_to_first_token_seconds"] + 2
    assert value("dovetail_inter_token_latency_seconds_count") == before["inter_token_latency_seconds"] + 8
    assert value("dovetail_kv_pages_total") == 64
    text = fake.get("/metrics").text
    assert 'cache="fake"' in text
    assert 'speculative="none"' in text
    shown = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    latencies = ("time_to_first_token", "time_per_output_token", "inter_token_latency", "e2e_request_latency")
    assert {f"dovetail_{name}_seconds_count" for name in latencies} <= shown
    gauges = ("requests_running", "requests_waiting", "kv_pages_used", "kv_usage", "prefix_hit_rate")
    assert {f"dovetail_{name}" for name in gauges} <= shown


def test_the_api_describes_itself(fake: httpx.Client):
    said = fake.get("/openapi.json").json()
    schema = said["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = said["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert {"messages", "temperature", "regex"} <= set(body["properties"])


def test_siblings_share_the_prompt_and_have_their_own_seeds():
    params = SamplingParams(n=3, seed=7)
    (msgs,) = messages(ApiRequest("r", (Prompt([1, 2], params), Prompt([3], params))))
    assert [msg.input_ids for msg in msgs] == [[1, 2]] * 3 + [[3]] * 3
    assert [msg.seed for msg in msgs[:3]] == [derive_seed(7, i) for i in range(3)] == [msg.seed for msg in msgs[3:]]
    assert len({msg.rid for msg in msgs}) == 6
    assert all(msg.params.n == 1 for msg in msgs)


def test_the_frontend_imports_no_torch():
    code = "import sys, dovetail.server.launch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
