"""Send every request field of vLLM, SGLang and OpenAI to an in-process server: with null, with its documented default, and
with a value that requests something.

.venv/bin/python -m pytest -q tests/plugins/test_api_fields.py
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.interfaces.api import Api
from dovetail.testing.api_server import EchoServer, SentResponse
from dovetail_apis.config import EmbeddingsConfig, NativeConfig, OpenAIConfig, ResponsesConfig, ScoreConfig
from dovetail_apis.embeddings import Embeddings, EmbeddingsRequest
from dovetail_apis.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    GENERATE,
    RERANK,
    RESPONSES,
    SAMPLING_PARAMS,
    SCORE,
    TABLES,
    RequestFields,
    Verdict,
)
from dovetail_apis.native import Native, NativeRequest, NativeSampling
from dovetail_apis.openai import OpenAIApi
from dovetail_apis.openai.types import ChatCompletionRequest, CompletionRequest
from dovetail_apis.responses import Responses
from dovetail_apis.responses.types import ResponsesRequest
from dovetail_apis.score import Score
from dovetail_apis.score.types import RerankRequest, ScoreRequest

TEXT = "The capital of France is"
TALK = [{"role": "user", "content": TEXT}]
BASE: dict[str, dict[str, Any]] = {
    CHAT.title: {"messages": TALK},
    COMPLETIONS.title: {"prompt": TEXT},
    GENERATE.title: {"text": TEXT},
    SAMPLING_PARAMS.title: {},
    RESPONSES.title: {"input": TEXT},
    EMBEDDINGS.title: {"input": TEXT},
    SCORE.title: {"text_1": "a", "text_2": "b"},
    RERANK.title: {"query": "a", "documents": ["b"]},
}
MODELS: dict[str, Any] = {
    CHAT.title: ChatCompletionRequest,
    COMPLETIONS.title: CompletionRequest,
    GENERATE.title: NativeRequest,
    SAMPLING_PARAMS.title: NativeSampling,
    RESPONSES.title: ResponsesRequest,
    EMBEDDINGS.title: EmbeddingsRequest,
    SCORE.title: ScoreRequest,
    RERANK.title: RerankRequest,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f"}}
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
VALUES: dict[str, Any] = {
    "model": "tiny", "lora_path": "tiny", "lora_name": "default", "prompt": "One", "messages": TALK, "text": "One", "input": "One", "n": 2, "temperature": 0.5,
    "top_p": 0.5, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.5,
    "seed": 7, "stop": ["x"], "stop_regex": "a+b", "stop_token_ids": [7], "logit_bias": {"7": 1.0}, "stream": True,
    "stream_options": {"include_usage": True}, "min_tokens": 2, "ignore_eos": True, "skip_special_tokens": False,
    "include_stop_str_in_output": True, "no_stop_trim": True, "priority": 3, "cache_salt": "a", "extra_key": "b",
    "rid": "my-id", "request_id": "my-id", "session": "s", "session_id": "s", "response_format": {"type": "json_object"},
    "regex": "a+", "ebnf": 'root ::= "a"', "json_schema": SCHEMA, "lark": 'start: "a"', "choice": ["a", "b"],
    "structural_tag": TAG, "structured_outputs": {"regex": "a+"}, "guided_json": SCHEMA, "guided_regex": "a+",
    "guided_choice": ["a"], "guided_grammar": 'root ::= "a"', "speculative": False, "truncate_prompt_tokens": 3,
    "truncation_side": "right", "return_token_ids": True, "return_tokens_as_token_ids": True,
    "return_cached_tokens_details": True, "prompt_logprobs": 2, "bad_words": ["a"], "logits_processors": [{"name": "no_repeat_ngram", "size": 2}], "allowed_token_ids": [7, 8],
    "echo": True, "max_tokens": 3, "best_of": 2, "add_special_tokens": False, "max_completion_tokens": 3,
    "parallel_tool_calls": False, "tool_choice": "auto", "chat_template_kwargs": {"a": 1}, "documents": [{"text": "a"}],
    "reasoning_effort": "high", "reasoning": {"effort": "low"}, "enable_thinking": True, "thinking": {"type": "enabled"},
    "separate_reasoning": False, "stream_reasoning": False, "include_reasoning": False, "add_generation_prompt": False,
    "return_prompt_text": True, "return_prompt_token_ids": True, "input_ids": [5, 6, 7], "sampling_params": {"n": 2},
    "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5],
    "return_text_in_logprobs": True, "group": "g", "max_new_tokens": 3, "min_new_tokens": 2, "sampling_seed": 7,
    "encoding_format": "base64", "dimensions": 3, "use_activation": False, "normalize": False, "pooling": "mean",
    "apply_softmax": True, "top_n": 1, "return_documents": False, "query": "q", "text_1": "a", "text_2": "b",
    "instructions": "Be brief.", "store": False, "background": True, "include": ["message.output_text.logprobs"],
    "max_output_tokens": 3, "top_logprobs": 2, "text_format": None, "metadata": {"a": "b"}, "user": "me",
    "max_tool_calls": 3, "truncation": "disabled", "return_spec_tokens_details": True, "return_input_ids_in_sglext": True,
    "return_output_ids_in_sglext": True,
}  # fmt: skip
"""A value of each field that requests something."""

OWN: dict[tuple[str, str], dict[str, Any]] = {
    (CHAT.title, "logprobs"): {"logprobs": True},
    (CHAT.title, "top_logprobs"): {"logprobs": True, "top_logprobs": 2},
    (CHAT.title, "logprob_token_ids"): {"logprobs": True, "logprob_token_ids": [5]},
    (CHAT.title, "continue_final_message"): {
        "messages": [*TALK, {"role": "assistant", "content": "Par"}],
        "continue_final_message": True,
    },
    (COMPLETIONS.title, "logprobs"): {"logprobs": 2},
    (COMPLETIONS.title, "logprob_token_ids"): {"logprobs": 2, "logprob_token_ids": [5]},
    (GENERATE.title, "input_ids"): {"text": None, "input_ids": [5, 6]},
    (GENERATE.title, "group_size"): {"group": "g", "group_size": 2},
    (RESPONSES.title, "text"): {"text": {"format": {"type": "json_object"}}},
    (RESPONSES.title, "stream_options"): {"stream": True, "stream_options": {"include_obfuscation": False}},
    (SCORE.title, "queries"): {"text_1": None, "queries": "a"},
    (SCORE.title, "data_1"): {"text_1": None, "data_1": "a"},
    (SCORE.title, "documents"): {"text_2": None, "documents": ["a"]},
    (SCORE.title, "data_2"): {"text_2": None, "data_2": "b"},
    (RERANK.title, "documents"): {"documents": {"text": "b"}},
    **{
        (SCORE.title, name): {"text_1": None, "text_2": None, "query": "q", "items": ["a"], "label_token_ids": [5]}
        | ({name: True} if name in ("apply_softmax", "item_first", "return_token_logprobs") else {})
        | ({"temperature": 0.5, "apply_softmax": True} if name == "temperature" else {})
        for name in (
            *(
                "query",
                "items",
                "label_token_ids",
                "apply_softmax",
                "item_first",
                "return_token_logprobs",
                "temperature",
            ),
        )
    },
    **{
        (title, name): {"regex": "a+", name: "xgrammar"}
        for title in (CHAT.title, COMPLETIONS.title, SAMPLING_PARAMS.title)
        for name in ("grammar_backend", "guided_decoding_backend")
    },
}
"""Bodies for fields whose value needs other fields."""

NAMED: dict[str, Any] = {
    "suffix": "the end",
    "tools": [TOOL],
    "thinking_token_budget": 5,
    "thinking_budget": 5,
    "max_thinking_tokens": 5,
    "previous_response_id": "resp_x",
}
"""Values that the embedded model, without parsers and without such a response, refuses by the name of the field."""

REQUIRED = {"prompt", "messages", "text", "input", "text_1", "text_2"}


def cases(*verdicts: Verdict) -> list[Any]:
    return [
        pytest.param(table, name, id=f"{table.title}-{name}")
        for table in TABLES
        for verdict in verdicts
        for name, _ in table.of(verdict)
    ]


class Servers:
    """Run a server for each API in one event loop."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._servers: dict[str, EchoServer] = {}

    def send(self, table: RequestFields, body: dict[str, Any]) -> SentResponse:
        return self.runner.run(self._send(table, body))

    async def _send(self, table: RequestFields, body: dict[str, Any]) -> SentResponse:
        server = self._servers.get(table.path) or EchoServer(api_of(table))
        self._servers[table.path] = server
        if table is SAMPLING_PARAMS:
            body = {"text": TEXT, "sampling_params": body}
        return await server.request("POST", table.path, body)


def api_of(table: RequestFields) -> Api:
    if table in (CHAT, COMPLETIONS):
        return OpenAIApi(OpenAIConfig())
    if table in (GENERATE, SAMPLING_PARAMS):
        return Native(NativeConfig())
    if table is RESPONSES:
        return Responses(ResponsesConfig())
    return Embeddings(EmbeddingsConfig()) if table is EMBEDDINGS else Score(ScoreConfig())


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.runner.close()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_the_body_declares_what_the_table_says(table: RequestFields):
    model = MODELS[table.title]
    declared = {field.alias or name for name, field in model.model_fields.items()}
    assert declared == {name for name, _ in table.of(Verdict.HONOURED)}
    assert (model.ignored, model.refused, model.reasons) == (table.ignored, table.refused, table.reasons)
    names = [name for group in table.groups for name in group.defaults]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("table", "name"), cases(*Verdict))
def test_what_requests_nothing_is_accepted(servers: Servers, table: RequestFields, name: str):
    for value in (None, *table.defaults(name)):
        body = BASE[table.title] | {name: value}
        answer = servers.send(table, body)
        if value is None and name in BASE[table.title]:
            assert (answer.status, name.encode() in answer.body) == (400, True), answer.body
        elif name == "model" or answer.status != 200:
            assert answer.status == 200, (value, answer.body)


@pytest.mark.parametrize(("table", "name"), cases(Verdict.HONOURED))
def test_what_requests_something_is_honoured(servers: Servers, table: RequestFields, name: str):
    own = OWN.get((table.title, name))
    if own is None and name in NAMED:
        answer = servers.send(
            table,
            BASE[table.title] | {name: [RESPONSES_TOOL] if table is RESPONSES and name == "tools" else NAMED[name]},
        )
        assert answer.status in (400, 404), answer.body
        assert name.encode() in answer.body
        return
    answer = servers.send(table, BASE[table.title] | (own or {name: VALUES[name]}))
    assert answer.status == 200, answer.body


RESPONSES_TOOL = {"type": "function", "name": "f"}


@pytest.mark.parametrize(("table", "name"), cases(Verdict.NO_EFFECT))
def test_what_has_no_effect_is_accepted(servers: Servers, table: RequestFields, name: str):
    assert servers.send(table, BASE[table.title] | {name: "something"}).status == 200


@pytest.mark.parametrize(("table", "name"), cases(Verdict.REFUSED))
def test_what_is_refused_is_named_with_what_to_use(servers: Servers, table: RequestFields, name: str):
    answer = servers.send(table, BASE[table.title] | {name: "something"})
    message = answer.json()["error"]["message"]
    assert (answer.status, message) == (400, f"{name} is not supported by this server: {table.reasons[name]}")


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("whitespace_pattern", " ", "write it into the constraint as a regex or a grammar"),
        ("disable_any_whitespace", True, "max_whitespace in the section grammar"),
        ("disable_additional_properties", True, "additionalProperties: false"),
        ("disable_fallback", True, "grammar_backend"),
    ],
)
@pytest.mark.parametrize("table", [CHAT, COMPLETIONS, RESPONSES], ids=lambda table: table.title)
def test_options_of_structured_outputs(servers: Servers, table: RequestFields, option: str, value: Any, instead: str):
    body = {**BASE[table.title], "structured_outputs": {"json": SCHEMA, option: value}}
    response = servers.send(table, body)
    error = response.json()["error"]
    assert (response.status, error["code"]) == (400, "unsupported_parameter")
    assert error["message"].startswith(f"structured_outputs.{option} is not supported by this server: ")
    assert instead in error["message"]
    for nothing in (None, False):
        body["structured_outputs"][option] = nothing
        assert servers.send(table, body).status == 200


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_unknown_fields(servers: Servers, table: RequestFields):
    base = BASE[table.title]
    assert servers.send(table, base | {"no_such_field": None, "nor_this": False}).status == 200
    for value in (True, 0, "", [], {}):
        answer = servers.send(table, base | {"no_such_field": value})
        assert (answer.status, b"no_such_field" in answer.body) == (400, True), value
