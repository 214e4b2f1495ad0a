"""Test that generation_config.json gives the defaults of requests, in every API and in ``LLM``.

.venv/bin/python -m pytest -q tests/e2e/test_sampling_defaults.py
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.cli.serve_values import settings_of
from dovetail.config.checkpoint import locate
from dovetail.config.generation import sampling_defaults
from dovetail.errors import ConfigError
from dovetail.lang import Runtime, assistant, function, gen, user
from dovetail.registry import Machine, resolve
from dovetail.registry.setup import setup
from dovetail.testing.api_server import EchoServer
from dovetail.tokenizer import Tokenizer
from dovetail_apis.anthropic import AnthropicApi
from dovetail_apis.config import AnthropicConfig, NativeConfig, OllamaConfig, OpenAIConfig, ResponsesConfig
from dovetail_apis.native import Native
from dovetail_apis.ollama import Ollama
from dovetail_apis.openai import OpenAIApi
from dovetail_apis.responses import Responses

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
TALK = [{"role": "user", "content": "Hello"}]


def checkpoint(path: Path, **keys: Any) -> Path:
    """Make a directory that has the files of the embedded model, and these keys in its generation_config.json."""
    path.mkdir()
    for file in locate("tiny").iterdir():
        (path / file.name).symlink_to(file)
    (path / "generation_config.json").unlink()
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], **keys}))
    return path


REQUESTS: dict[str, tuple[Any, str, dict[str, Any], Mapping[str, str]]] = {
    "chat": (lambda: OpenAIApi(OpenAIConfig()), "/v1/chat/completions", {"messages": TALK}, {}),
    "completions": (lambda: OpenAIApi(OpenAIConfig()), "/v1/completions", {"prompt": "Hello"}, {}),
    "responses": (lambda: Responses(ResponsesConfig()), "/v1/responses", {"input": "Hello"}, {}),
    "anthropic": (
        lambda: AnthropicApi(AnthropicConfig()),
        "/v1/messages",
        {"model": "tiny", "max_tokens": 9, "messages": TALK},
        {},
    ),
    "ollama": (
        lambda: Ollama(OllamaConfig()),
        "/api/chat",
        {"model": "tiny", "messages": TALK, "stream": False},
        {"repetition_penalty": "repeat_penalty"},
    ),
    "native": (lambda: Native(NativeConfig()), "/generate", {"text": "Hello"}, {}),
}
NESTED = {"ollama": "options", "native": "sampling_params"}


def sent(api: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that reach the engine for a request that sets ``given``."""
    make, path, body, names = REQUESTS[api]
    values = {names.get(name, name): value for name, value in given.items()}
    body = {**body, **({NESTED[api]: values} if api in NESTED else values)}

    async def run() -> SamplingParams:
        server = EchoServer(make(), sampling_defaults=defaults)
        found = []
        opened = server.engine.open
        server.engine.open = lambda group, msgs: found.extend(msgs) or opened(group, msgs)
        answer = await server.request("POST", path, body)
        assert answer.status == 200, answer.body
        if api == "responses":
            assert answer.json()["temperature"] == found[0].params.temperature
        return found[0].params

    return asyncio.run(run())


def values(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in RECOMMENDED}


@pytest.mark.parametrize("api", REQUESTS)
def test_what_a_request_does_not_set_is_the_models(api: str):
    assert values(sent(api, {}, RECOMMENDED)) == RECOMMENDED
    without = {**NEUTRAL, **({"temperature": 0.8, "top_k": 40, "top_p": 0.9} if api == "ollama" else {})}
    assert values(sent(api, {}, {})) == without
    names = list(NEUTRAL)[: 4 if api == "anthropic" else None]  # that API has no repetition penalty
    for name in names:  # an explicit value wins, although it is what the field has without the model's file
        assert values(sent(api, {name: NEUTRAL[name]}, RECOMMENDED)) == {**RECOMMENDED, name: NEUTRAL[name]}
        assert values(sent(api, {name: None}, RECOMMENDED)) == RECOMMENDED


def test_the_models_length_is_that_of_outputs_whose_api_has_none():
    length = {"max_new_tokens": 7}
    assert [sent(api, {}, length).max_new_tokens for api in ("chat", "responses", "ollama")] == [7, 7, 7]
    assert [sent(api, {}, length).max_new_tokens for api in ("completions", "native", "anthropic")] == [16, 128, 9]
    assert sent("chat", {"max_tokens": 11}, length).max_new_tokens == 11  # a default, and no limit
    assert sent("chat", {"min_tokens": 10}, length).max_new_tokens == 10
    prompt = len(Tokenizer.from_dir(locate("tiny")).apply_chat_template(TALK))
    assert 2048 - prompt <= (sent("chat", {}, {"max_new_tokens": 5000}).max_new_tokens or 0) < 2048


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("temperature", "warm", "a number from 0 to 100"),
        ("temperature", float("nan"), "a number from 0 to 100"),
        ("temperature", True, "a number"),
        ("top_p", 0, r"a number in \(0, 1\]"),
        ("top_k", 2.5, "an integer"),
        ("min_p", 1.5, r"a number in \[0, 1\]"),
        ("repetition_penalty", 0, r"a number in \[0.01, 100\]"),
        ("max_new_tokens", -1, "an integer of at least 0"),
        ("max_new_tokens", 0, "an integer of at least 1"),
    ],
)
def test_wrong_values_are_refused_with_file_and_key(tmp_path: Path, key: str, value: Any, allowed: str):
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {key} is .*; allowed: {allowed}"):
        sampling_defaults("auto", tmp_path)
    assert sampling_defaults("none", tmp_path) == {}


def test_the_file_is_the_checkpoints_or_a_given_one(tmp_path: Path):
    assert sampling_defaults("auto", tmp_path) == {}
    own, other = tmp_path / "generation_config.json", tmp_path / "other"
    own.write_text(json.dumps({**RECOMMENDED, "max_new_tokens": 512, "do_sample": False, "top_h": 3}))
    assert sampling_defaults("auto", tmp_path) == {**RECOMMENDED, "max_new_tokens": 512}
    with pytest.raises(ConfigError, match=r"model\.generation_config is .*other.*; allowed: auto, none, a directory"):
        sampling_defaults(str(other), tmp_path)
    other.mkdir()
    with pytest.raises(ConfigError, match=r"no file .*other/generation_config\.json"):
        sampling_defaults(str(other), tmp_path)
    (other / "generation_config.json").write_text('{"temperature": 0.25, "top_k": null, "eos_token_id": 9}')
    for setting in (str(other), str(other / "generation_config.json")):
        assert sampling_defaults(setting, tmp_path) == {"temperature": 0.25}
    tiny = locate("tiny")
    eos = Tokenizer.from_dir(tiny).eos_token_ids
    assert set(Tokenizer.from_dir(tiny, generation=other / own.name).eos_token_ids) == {*eos, 9}


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ({"generation_config": "auto"}, "auto"),
        ({"generation_config": "vllm"}, "none"),
        ({"generation_config": "/some/folder"}, "/some/folder"),
        ({"sampling_defaults": "model"}, "auto"),
        ({"sampling_defaults": "openai"}, "none"),
    ],
)
def test_flags_of_both_peers(flags: dict[str, Any], setting: str):
    assert settings_of(flags) == {"model.generation_config": setting}


def test_the_embedded_model_recommends_nothing_and_what_is_recommended_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "dovetail.registry")
    config, registry = setup(env={}, arguments={"model": "tiny"})
    assert resolve(config, registry, Machine.assume("cpu")).to_json()["sampling_defaults"] == {}
    assert "sampling defaults" not in caplog.text
    (tmp_path / "generation_config.json").write_text('{"top_k": 20}')
    given = {"model": {"path": "tiny", "generation_config": str(tmp_path)}}
    config, registry = setup(env={}, arguments=given)
    assert resolve(config, registry, Machine.assume("cpu")).to_json()["sampling_defaults"] == {"top_k": 20}
    assert "sampling defaults: {'top_k': 20} (model.generation_config)" in caplog.text


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = checkpoint(tmp_path_factory.mktemp("models") / "own", temperature=0.7, top_k=1, max_new_tokens=5)
    with LLM(str(path), threads=1) as llm:
        yield llm


def test_llm_takes_the_models_defaults(llm: LLM):
    prompt = "Once upon a time"
    assert llm.resolved.to_json()["sampling_defaults"] == {"temperature": 0.7, "top_k": 1, "max_new_tokens": 5}
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=1, max_new_tokens=5)
    (greedy,) = llm.generate(prompt, SamplingParams(temperature=0, max_new_tokens=5))
    (sampled,) = llm.generate(prompt, SamplingParams(temperature=5, seed=3, max_new_tokens=12))
    assert sampled.token_ids[:5] != greedy.token_ids
    assert llm.generate(prompt)[0].token_ids == greedy.token_ids
    assert llm.generate(prompt, {"temperature": 5, "seed": 3})[0].token_ids == greedy.token_ids
    given = {"temperature": 5, "seed": 3, "top_k": 0, "max_tokens": 12}
    assert llm.generate([prompt, prompt], [given, {}])[0].token_ids == sampled.token_ids
    assert "".join(llm.stream(prompt)) == greedy.text
    chat = llm.chat(TALK)
    assert len(chat.token_ids) <= 5
    assert chat.token_ids == llm.chat(TALK, SamplingParams(temperature=0, max_new_tokens=5)).token_ids
    near = list(range(5, 5 + 2045))  # three tokens are left in the context
    assert len(llm.generate(near, {"ignore_eos": True})[0].token_ids) == 3


def test_programs_take_the_models_defaults(llm: LLM):
    @function
    def program(s, **settings):
        s += user("Hello") + assistant(gen("a", **settings))

    with Runtime(llm) as runtime:
        greedy = program.run(backend=runtime, max_tokens=8, temperature=0)["a"]
        assert program.run(backend=runtime, max_new_tokens=8, seed=3)["a"] == greedy
