"""Check what the request fields of vLLM and SGLang do to answers, in a server whose engine echoes the prompt.

.venv/bin/python -m pytest -q tests/plugins/test_api_answers.py
"""

import asyncio
import functools
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from openai.types.shared.reasoning_effort import ReasoningEffort

from dovetail.chat.parsing import OutputParsers
from dovetail.config.checkpoint import locate
from dovetail.errors import RequestError
from dovetail.interfaces.api import Api
from dovetail.interfaces.parsers import ReasoningDelta, ReasoningParser, ReasoningStream
from dovetail.messages import GenerateMsg
from dovetail.sampling_params import GrammarKind
from dovetail.testing.api_server import EchoServer, SentResponse
from dovetail.tokenizer import Tokenizer
from dovetail.tokenizer.tokenizer import ChatRendering
from dovetail_apis.config import NativeConfig, OpenAIConfig, ResponsesConfig, ScoreConfig
from dovetail_apis.native import Native
from dovetail_apis.openai import OpenAIApi
from dovetail_apis.openai.infill import infill_prompt
from dovetail_apis.responses import Responses
from dovetail_apis.score import Score

TINY = Tokenizer.from_dir(locate("tiny"))
TEXT = "The capital of France is"
IDS = TINY.encode(TEXT)
TALK = [{"role": "user", "content": TEXT}]
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
APIS: dict[str, Any] = {
    COMPLETIONS: functools.partial(OpenAIApi, OpenAIConfig()),
    CHAT: functools.partial(OpenAIApi, OpenAIConfig()),
    GENERATE: functools.partial(Native, NativeConfig()),
    "/v1/responses": functools.partial(Responses, ResponsesConfig()),
    "/v1/rerank": functools.partial(Score, ScoreConfig()),
    "/v1/score": functools.partial(Score, ScoreConfig()),
}


class Bars(ReasoningParser):
    """Read reasoning that begins with the output and ends at the first ``|``."""

    def __init__(self) -> None:
        pass

    def stream(self, prompt: str) -> ReasoningStream:
        return BarStream()

    def gate(self, prompt: str) -> None:
        return None


class BarStream(ReasoningStream):
    reasons = True

    def feed(self, text: str) -> ReasoningDelta:
        if not self.reasons:
            return ReasoningDelta("", text)
        before, mark, after = text.partition("|")
        self.reasons = not mark
        return ReasoningDelta(before, after)

    def finish(self) -> ReasoningDelta:
        return ReasoningDelta("", "")


def sent(path: str, body: dict[str, Any], reasoning: bool = False) -> tuple[SentResponse, list[GenerateMsg]]:
    """Send a request to a new server. Return its answer, and the messages that the engine got."""

    async def send() -> tuple[SentResponse, list[GenerateMsg]]:
        api: Api = APIS[path]()
        server = EchoServer(api)
        if reasoning:
            server.service.parsers = OutputParsers(server.service.tokenizer, reasoning=Bars())
        got: list[GenerateMsg] = []
        opened = server.engine.open

        def open_(group: str, msgs: Any) -> Any:
            got.extend(msgs)
            return opened(group, msgs)

        server.engine.open = open_  # type: ignore[method-assign]
        return await server.request("POST", path, body), got

    return asyncio.run(send())


def answer(path: str, body: dict[str, Any], reasoning: bool = False) -> Any:
    response, _ = sent(path, body, reasoning)
    assert response.status == 200, response.body
    return response.json()


def events(path: str, body: dict[str, Any], reasoning: bool = False) -> list[Any]:
    response, _ = sent(path, {**body, "stream": True}, reasoning)
    assert response.status == 200, response.body
    return response.events()


def params(path: str, body: dict[str, Any]) -> Any:
    response, (msg, *_) = sent(path, body)
    assert response.status == 200, response.body
    return msg.params


def refused(path: str, body: dict[str, Any], *words: str) -> None:
    response, got = sent(path, body)
    assert (response.status, got) == (400, [])
    assert all(word in response.json()["error"]["message"] for word in words), response.body


def test_token_ids_of_completions():
    body = {"prompt": [TEXT, "One"], "max_tokens": 4, "return_token_ids": True}
    whole = answer(COMPLETIONS, body)["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == [IDS, TINY.encode("One")]
    assert whole[0]["token_ids"] == (IDS * 4)[:4]
    chunks = [event["choices"][0] for event in events(COMPLETIONS, body)]
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert [token for chunk in mine for token in chunk["token_ids"]] == whole[index]["token_ids"]
        assert ["prompt_token_ids" in chunk for chunk in mine] == [True] + [False] * (len(mine) - 1)


def test_token_ids_and_the_prompt_of_chats():
    body = {"messages": TALK, "max_tokens": 5, "return_token_ids": True, "return_prompt_text": True}
    whole, chunks = answer(CHAT, body), events(CHAT, body)
    text = TINY.apply_chat_template(TALK)
    ids = TINY.encode(text, add_special_tokens=False)
    (choice,) = whole["choices"]
    assert (whole["prompt_text"], whole["prompt_token_ids"], choice["prompt_token_ids"]) == (text, ids, ids)
    assert choice["token_ids"] == ids[:5]
    assert (chunks[0]["prompt_text"], chunks[0]["prompt_token_ids"]) == (text, ids)
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())] == ids[:5]
    assert "prompt_text" not in chunks[1]
    plain = answer(CHAT, {"messages": TALK, "max_tokens": 5})
    assert not {"prompt_text", "prompt_token_ids"} & {*plain, *plain["choices"][0]}


def test_prompt_logprobs():
    body = {"prompt": TEXT, "max_tokens": 2, "prompt_logprobs": 2}
    first, second, *_ = answer(COMPLETIONS, body)["choices"][0]["prompt_logprobs"]
    name = TINY.bytes_of(IDS[1]).decode()
    assert first is None
    assert second[str(IDS[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": name}
    assert [entry["rank"] for entry in second.values()] == [1, 2]
    found = answer(CHAT, {"messages": TALK, "prompt_logprobs": 0})["prompt_logprobs"]
    assert found[1][next(iter(found[1]))]["rank"] is None
    refused(COMPLETIONS, body | {"stream": True}, "prompt_logprobs", "stream: false")


def test_echoed_logprobs_are_those_that_were_requested():
    both = {"prompt": TEXT, "max_tokens": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    (choice,) = answer(COMPLETIONS, both)["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"] if top} == {1}
    assert len(choice["prompt_logprobs"][1]) == 3
    (choice,) = answer(COMPLETIONS, {"prompt": TEXT, "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 3})["choices"]
    assert len(choice["logprobs"]["tokens"]) == 2


def test_the_number_of_logprobs_is_bounded():
    most = "at most 20 (server.max_logprobs)"
    refused(CHAT, {"messages": TALK, "logprobs": True, "top_logprobs": 21}, "top_logprobs is 21", most)
    refused(COMPLETIONS, {"prompt": TEXT, "logprobs": 21}, "logprobs is 21", most)
    refused(COMPLETIONS, {"prompt": TEXT, "prompt_logprobs": 21}, "prompt_logprobs is 21", most)
    refused(GENERATE, {"text": TEXT, "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num is 21", most)
    refused("/v1/responses", {"input": TEXT, "top_logprobs": 21}, "21")


def test_tokens_as_ids():
    body = {"prompt": TEXT, "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
    assert answer(COMPLETIONS, body)["choices"][0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in IDS[:2]]
    body = {"messages": TALK, "max_tokens": 1, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (entry,) = answer(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert entry["token"].startswith("token_id:")
    assert entry["top_logprobs"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("include", [True, None])
def test_continuous_usage(path: str, include: bool | None):
    options = {"continuous_usage_stats": True, "include_usage": include}
    body = {"messages": TALK} if path == CHAT else {"prompt": TEXT}
    found = events(path, {**body, "max_tokens": 3, "n": 2, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in found if event["choices"]]
    assert max(counts) == 3
    assert all(event["usage"]["total_tokens"] == event["usage"]["prompt_tokens"] + count
               for event, count in zip(found, counts, strict=False))  # fmt: skip
    last = found[-1]
    assert (last["choices"] == []) == bool(include)
    if include:
        assert last["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("field", "kind", "text"),
    [
        ({"guided_json": {"type": "object"}}, GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"guided_choice": ["a", "b"]}, GrammarKind.CHOICE, '["a","b"]'),
        ({"guided_grammar": 'root ::= "a"'}, GrammarKind.EBNF, 'root ::= "a"'),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
        ({"structured_outputs": {"json": '{"type":"object"}'}}, GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+", "json": None}}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarKind.CHOICE, '["a"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarKind.LARK, 'start: "a"'),
        ({"structured_outputs": {"json_object": True, "disable_fallback": False}}, GrammarKind.JSON_OBJECT, ""),
    ],
)
def test_constraints_of_vllm(field: dict[str, Any], kind: GrammarKind, text: str):
    for path, base in ((CHAT, {"messages": TALK}), (COMPLETIONS, {"prompt": TEXT}), ("/v1/responses", {"input": TEXT})):
        if path != "/v1/responses" or "structured_outputs" in field:
            grammar = params(path, base | field).grammar
            assert (grammar.kind, grammar.text, grammar.backend) == (kind, text, None)


def test_constraints_of_vllm_that_cannot_hold():
    base = {"prompt": TEXT}
    refused(COMPLETIONS, base | {"structured_outputs": {}}, "structured_outputs has no constraint")
    refused(COMPLETIONS, base | {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "only one constraint")
    refused(COMPLETIONS, base | {"guided_regex": "a", "regex": "b"}, "only one constraint", "guided_regex")
    refused(COMPLETIONS, base | {"guided_json": "{"}, "guided_json is not valid JSON")
    refused(COMPLETIONS, base | {"structured_outputs": {"whitespace_pattern": " "}}, "whitespace_pattern")
    refused(COMPLETIONS, base | {"guided_decoding_backend": "guidance"}, "no constraint")
    chosen = base | {"guided_regex": "a", "guided_decoding_backend": "guidance:no-fallback"}
    assert params(COMPLETIONS, chosen).grammar.backend == "llguidance"
    refused(COMPLETIONS, chosen | {"grammar_backend": "xgrammar"}, "give one of them")


def test_parameters_of_the_engine():
    body = {
        "bad_words": ["no"],
        "allowed_token_ids": [5, 6],
        "stop_regex": "a+",
        "logprobs": 1,
        "logprob_token_ids": [7],
    }
    got = params(COMPLETIONS, {"prompt": TEXT, **body})
    assert (got.bad_words, got.allowed_token_ids, got.stop_regex, got.token_ids_logprob) == (
        ("no",), (5, 6), ("a+",), (7,)
    )  # fmt: skip
    given = {"max_tokens": 5, "min_tokens": 2, "include_stop_str_in_output": True, "stop": "x", "stop_regex": ["b"]}
    got = params(GENERATE, {"text": TEXT, "sampling_params": given})
    assert (got.max_new_tokens, got.min_new_tokens, got.include_stop, got.stop_regex) == (5, 2, True, ("b",))
    refused(GENERATE, {"text": TEXT, "sampling_params": {"max_tokens": 5, "max_new_tokens": 6}}, "max_new_tokens is 6")
    refused(CHAT, {"messages": TALK, "logprob_token_ids": [7]}, "needs logprobs")


def test_thinking_budgets():
    def budget(**fields: Any) -> int | None:
        response, got = sent(CHAT, {"messages": TALK, **fields}, reasoning=False)
        error = response.json().get("error")
        return int(got[0].params.thinking_budget or -1) if got else error["param"]

    assert budget(thinking_token_budget=-1) == -1
    assert budget(thinking_token_budget=5) == "thinking_token_budget"  # there is no parser
    assert budget(thinking={"type": "enabled", "budget_tokens": 5}) == "thinking"
    assert budget(reasoning={"max_tokens": 5}) == "reasoning"
    refused(CHAT, {"messages": TALK, "thinking_budget": 5, "thinking_token_budget": 6}, "thinking_budget limits")


def rendered(body: dict[str, Any]) -> str:
    return answer(CHAT, {"messages": TALK, "return_prompt_text": True, **body})["prompt_text"]


def test_how_the_conversation_ends():
    assert rendered({}) == TINY.apply_chat_template(TALK)
    assert rendered({"add_generation_prompt": False}) == TINY.apply_chat_template(TALK, None, False)
    begun = [*TALK, {"role": "assistant", "content": "It is"}]
    assert rendered({"messages": begun, "continue_final_message": True}) == TINY.apply_chat_template(TALK) + "It is"
    body = {"messages": begun, "continue_final_message": True}
    refused(CHAT, body | {"add_generation_prompt": True}, "cannot both be true")
    refused(CHAT, {"messages": TALK, "continue_final_message": True}, "last message with the role assistant")
    echoed = answer(CHAT, body | {"echo": True, "max_tokens": 3})["choices"][0]["message"]["content"]
    plain = answer(CHAT, body | {"max_tokens": 3})["choices"][0]["message"]["content"]
    assert echoed == "It is" + plain
    chunks = events(CHAT, body | {"echo": True, "max_tokens": 3})
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == echoed
    assert answer(CHAT, {"messages": TALK, "echo": True, "max_tokens": 3})["choices"][0]["message"]["content"] == plain


def test_ids_in_place_of_the_conversation():
    _, (msg,) = sent(CHAT, {"messages": TALK, "input_ids": [5, 6, 7]})
    assert msg.input_ids == [5, 6, 7]


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "high"}, {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
        ({"reasoning_effort": 0.5}, {"enable_thinking": True, "thinking": True, "reasoning_effort": 0.5}),
        ({"reasoning": {"effort": "low"}}, {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True, "thinking": True}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": True, "chat_template_kwargs": {"thinking": 7}}, {"enable_thinking": True, "thinking": 7}),
        ({"documents": [{"text": "a"}]}, {"documents": [{"text": "a"}]}),
    ],
)
def test_variables_of_the_template(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], variables: dict[str, Any]):
    seen: list[Any] = []
    usual = Tokenizer.chat_rendering

    def render(self: Tokenizer, messages: Any, tools: Any, opened: bool, extra: Any, *more: Any) -> ChatRendering:
        seen.append(dict(extra))
        return usual(self, messages, tools, opened, {}, *more)

    monkeypatch.setattr(Tokenizer, "chat_rendering", render)
    answer(CHAT, {"messages": TALK, **fields})
    assert seen == [variables]


def test_every_effort_of_the_openai_sdk_is_accepted():
    efforts = [value for kind in get_args(ReasoningEffort) for value in get_args(kind) if kind is not type(None)]
    assert {"none", "low", "max"} <= set(efforts)
    for effort in efforts:
        answer(CHAT, {"messages": TALK, "reasoning_effort": effort})
        answer("/v1/responses", {"input": TEXT, "reasoning": {"effort": effort}})


def test_fields_that_contradict_each_other():
    refused(CHAT, {"messages": TALK, "enable_thinking": True, "thinking": {"type": "disabled"}}, "contradict")


REASONED = {
    "input_ids": TINY.encode("so it is|Paris"),
    "max_tokens": len(TINY.encode("so it is|Paris")),
    "messages": TALK,
}


def test_reasoning_is_counted_and_separated():
    whole = answer(CHAT, REASONED, reasoning=True)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so it is", "Paris")
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len(TINY.encode("so it is|", add_special_tokens=False))
    plain = answer(CHAT, {"messages": TALK, "max_tokens": 3})
    assert plain["choices"][0]["message"]["reasoning_content"] is None
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def deltas(**fields: Any) -> list[dict[str, Any]]:
    return [event["choices"][0]["delta"] for event in events(CHAT, REASONED | fields, reasoning=True)]


def test_how_reasoning_is_streamed():
    every = deltas()
    assert all("reasoning_content" in delta for delta in every)
    pieces = [delta["reasoning_content"] for delta in every if delta["reasoning_content"]]
    assert (len(pieces) > 1, "".join(pieces)) == (True, "so it is")
    assert [d["reasoning_content"] for d in deltas(stream_reasoning=False) if d["reasoning_content"]] == ["so it is"]
    for found in (deltas(include_reasoning=False), every):
        assert "".join(delta.get("content") or "" for delta in found) == "Paris"
    assert not any(delta["reasoning_content"] for delta in deltas(include_reasoning=False))
    together = answer(CHAT, REASONED | {"separate_reasoning": False}, reasoning=True)["choices"][0]["message"]
    assert (together["content"], together["reasoning_content"]) == ("so it is|Paris", None)
    hidden = answer(CHAT, REASONED | {"include_reasoning": False}, reasoning=True)["choices"][0]["message"]
    assert (hidden["content"], hidden["reasoning_content"]) == ("Paris", None)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_ended_an_output(path: str):
    body = {"messages": TALK} if path == CHAT else {"prompt": TEXT}
    (choice,) = answer(path, body | {"stop": " of"})["choices"]
    assert (choice["matched_stop"], choice["stop_reason"]) == (" of", " of")
    last = events(path, body | {"stop": " of"})[-1]["choices"][0]
    assert (last["finish_reason"], last["matched_stop"], last["stop_reason"]) == ("stop", " of", " of")
    (choice,) = answer(path, body | {"max_tokens": 2})["choices"]
    assert (choice["matched_stop"], choice["stop_reason"]) == (None, None)


def test_details_of_cached_tokens():
    details = {"cached_tokens_details": {"device": 0, "host": 0}}
    for path, body in ((CHAT, {"messages": TALK}), (COMPLETIONS, {"prompt": TEXT})):
        assert answer(path, body | {"return_cached_tokens_details": True})["sglext"] == details
        assert events(path, body | {"return_cached_tokens_details": True})[-1]["sglext"] == details
        assert "sglext" not in answer(path, body)


def test_ids_of_chats_in_the_extensions():
    body = {"messages": TALK, "n": 2, "max_tokens": 3, "return_input_ids_in_sglext": True}
    assert answer(CHAT, body)["sglext"].keys() == {"input_ids"}
    body |= {"return_output_ids_in_sglext": True, "return_token_ids": True}
    whole = answer(CHAT, body)
    expected = {
        "input_ids": whole["choices"][0]["prompt_token_ids"],
        "output_ids": [choice["token_ids"] for choice in whole["choices"]],
    }
    assert len(expected["output_ids"][1]) == 3
    assert whole["sglext"] == events(CHAT, body)[-1]["sglext"] == expected


def test_details_of_completions_have_no_chunk_of_their_own():
    """SGLang's bench_serving reads the text of a choice in every chunk that it receives without include_usage."""
    body = {"prompt": [TEXT, TEXT], "n": 2, "return_cached_tokens_details": True}
    for more in ({}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}):
        seen = events(COMPLETIONS, body | more)
        chunks = [chunk for chunk in seen if chunk["choices"]]
        assert [number for number, chunk in enumerate(chunks) if "sglext" in chunk] == [len(chunks) - 1]
        assert len(seen) - len(chunks) == len(more)
        assert all(("usage" in chunk) == bool(more) for chunk in chunks)


def test_namespaces():
    def namespace(path: str = COMPLETIONS, **fields: Any) -> str:
        body = {"text": TEXT} if path == GENERATE else {"prompt": TEXT}
        return sent(path, body | fields)[1][0].namespace

    names = [
        namespace(), namespace(cache_salt="a"), namespace(extra_key="a"), namespace(cache_salt="a", extra_key="b"),
        namespace(cache_salt="ab", extra_key=""),
    ]  # fmt: skip
    assert len(set(names)) == 5
    assert names[:2] == ["", "a"]
    assert namespace(GENERATE, extra_key="a") == names[2]
    for path, prompts in ((GENERATE, {"text": [TEXT, "One"]}), (COMPLETIONS, {"prompt": [TEXT, "One"]})):
        _, got = sent(path, {**prompts, "extra_key": ["a", None], "cache_salt": "a"})
        assert [msg.namespace for msg in got] == [namespace(cache_salt="a", extra_key="a"), "a"]
    refused(COMPLETIONS, {"prompt": [TEXT, "One"], "cache_salt": ["a"]}, "cache_salt has 1 entries for 2 prompts")


def test_truncated_ids_and_chats():
    ids = list(range(5, 15))
    assert sent(COMPLETIONS, {"prompt": ids, "truncate_prompt_tokens": 4})[1][0].input_ids == ids[-4:]
    whole = TINY.encode(TINY.apply_chat_template(TALK), add_special_tokens=False)
    assert sent(CHAT, {"messages": TALK, "truncate_prompt_tokens": 4})[1][0].input_ids == whole[-4:]
    _, (msg,) = sent(COMPLETIONS, {"prompt": "one " * 9000, "truncate_prompt_tokens": -1, "max_tokens": 8})
    assert len(msg.input_ids) == 2040
    refused(COMPLETIONS, {"prompt": TEXT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0", "1 to 2048")
    refused(COMPLETIONS, {"prompt": TEXT, "truncate_prompt_tokens": 9999}, "1 to 2048")


def test_a_model_without_tokens_for_gaps():
    refused(COMPLETIONS, {"prompt": TEXT, "suffix": "end"}, "suffix is not supported", "no tokens for filling")
    host: Any = SimpleNamespace(tokenizer=TINY)
    with pytest.raises(RequestError, match="describe the gap"):
        asyncio.run(infill_prompt(host, "a", "b"))


def test_ids_of_prompts():
    body = {"text": ["One", "Two"], "rid": ["a", "b"], "sampling_params": {"max_new_tokens": 2}}
    assert [one["meta_info"]["id"] for one in answer(GENERATE, body)] == ["a", "b"]
    several = answer(GENERATE, body | {"sampling_params": {"n": 2, "max_new_tokens": 2}})
    assert [one["meta_info"]["id"] for one in several] == ["a_0", "a_1", "b_0", "b_1"]
    _, msgs = sent(GENERATE, body)
    assert [msg.rid.rpartition("/")[0] for msg in msgs] == ["a", "b"]
    assert answer(GENERATE, {"text": "One", "rid": "a"})["meta_info"]["id"] == "a"
    refused(GENERATE, body | {"rid": ["a"]}, "rid has 1 ids for 2 prompts")
    refused(GENERATE, body | {"rid": ["a", "a"]}, "twice")
    assert answer(COMPLETIONS, {"prompt": "One", "request_id": "mine"})["id"] == "mine"
    assert answer("/v1/responses", {"input": "One", "request_id": "mine"})["id"] == "mine"


def test_logprobs_of_each_prompt():
    body = {"text": ["One", "Two"], "return_logprob": [True, False], "top_logprobs_num": [2, 0]}
    first, second = answer(GENERATE, body | {"sampling_params": {"max_new_tokens": 3}})
    assert (first["meta_info"]["output_token_logprobs_length"], len(first["meta_info"]["output_top_logprobs"])) == (
        3,
        3,
    )
    assert "output_token_logprobs" not in second["meta_info"]
    refused(GENERATE, body | {"return_logprob": [True]}, "return_logprob has 1 entries for 2 prompts")
    prompt = answer(GENERATE, {"text": TEXT, "return_prompt_token_ids": True})["prompt_token_ids"]
    assert prompt == IDS


def test_what_is_returned_of_the_prompt_counts():
    """128 outputs with 2,000 ids each of their prompt are more than a bound of 1 MiB."""
    ids = [5] * 2000

    async def send(**fields: Any) -> SentResponse:
        server = EchoServer(OpenAIApi(OpenAIConfig()))
        server.service._answers.most = 2**20
        body = {"prompt": ids, "max_tokens": 1, "n": 128}
        return await server.request("POST", COMPLETIONS, body | fields)

    assert asyncio.run(send()).status == 200
    refusal = asyncio.run(send(return_token_ids=True))
    assert (refusal.status, refusal.json()["error"]["code"]) == (400, "answer_too_large")


def test_relevance_is_from_0_to_1():
    scoring = answer("/v1/score", {"text_1": "a", "text_2": ["b"]})["data"]
    results = answer("/v1/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 0})["results"]
    assert len(results) == 2
    assert all(0 <= result["relevance_score"] <= 1 for result in results)
    assert results[0]["relevance_score"] == pytest.approx((1 + scoring[0]["score"]) / 2)
    assert answer("/v1/score", {"queries": "a", "documents": ["b"]})["data"] == scoring
    refused("/v1/score", {"queries": "a", "text_1": "a", "text_2": "b"}, "text_1 and queries")
