"""Test real models from their packages: SmolLM2-135M-Instruct and Gemma 3 270M, against transformers' reader of GGUF, and
served. Skipped where the packages cannot be had.

Run: python -m pytest -m full tests/e2e/test_real_models.py
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import served

from dovetail import LLM, SamplingParams
from dovetail.cli.pull import pull
from dovetail.config.checkpoint import locate
from dovetail.config.pulled import pullable_models
from dovetail.errors import ConfigError
from dovetail.tokenizer.tokenizer import Tokenizer

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1200)]

DOVETAIL = Path(sys.executable).with_name("dovetail")
NAMES = ("smollm2", "gemma3-270m")
SHORT = {"dtype": "float32", "context_len": 1024}
PROMPTS = ("The capital of France is", "Once upon a time, there was a")
TEXT = """A lighthouse is a tower, building, or other type of physical structure designed to emit light from a system of lamps
and lenses and to serve as a beacon for navigational aid for maritime pilots at sea or on inland waterways. Lighthouses mark
dangerous coastlines, hazardous shoals, reefs, rocks, and safe entries to harbors; they also assist in aerial navigation. Once
widely used, the number of operational lighthouses has declined due to the expense of maintenance and the advent of much cheaper,
more sophisticated, and more effective electronic navigational systems. Before the development of clearly defined ports, mariners
were guided by fires built on hilltops. Since elevating the fire would improve visibility, placing the fire on a platform became
a practice that led to the development of the lighthouse. In antiquity, the lighthouse functioned more as an entrance marker to
ports than as a warning signal for reefs and promontories, unlike many modern lighthouses. The most famous lighthouse structure
from antiquity was the Pharos of Alexandria, Egypt, which collapsed following a series of earthquakes between 956 and 1323."""
PAGE = f"""{TEXT}
The quick brown fox — jumps over 12 lazy dogs, 3.14159 times; it's what they'd do!
  Indented    with   spaces\tand tabs\r\n\n\nÉté à l'œuvre, naïve façade. Straße über Größe.
Привет, мир! Сегодня 2026 год. Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया
日本語のテキスト、漢字とカタカナ。中文字符测试，一二三。한국어 문장입니다. ไทย ภาษา 🎉
def f(x): return x**2  # <|im_end|> <|im_start|>user <bos> <end_of_turn> [multimodal] <unused5> 1,000,000 0x1F"""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Iterator[Path]:
    """Set the folders for data and caches to temporary ones, with links to the models that have been pulled."""
    folder = tmp_path_factory.mktemp("real")
    present = [model.path for model in pullable_models().values() if model.path.is_file()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for file in present:
            target = folder / "data" / "dovetail" / "models" / file.parent.name
            target.mkdir(parents=True)
            (target / file.name).symlink_to(file)
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest, folders: Path) -> str:
    try:
        pull(request.param, None)
    except ConfigError as error:
        pytest.skip(f"the packages of {request.param} cannot be had: {error}")
    return request.param


@pytest.fixture(scope="module")
def theirs(real: str) -> Any:
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed (pip install 'dovetail[test]')")
    import torch
    import transformers

    file = pullable_models()[real].path
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def dequantized(real: str) -> Iterator[LLM]:
    with LLM(real, quantization="none", model=SHORT) as llm:
        yield llm


def test_greedy_tokens_are_those_of_transformers(theirs: Any, dequantized: LLM) -> None:
    import torch

    for prompt in PROMPTS:
        ids = dequantized.tokenizer.encode(prompt)
        expected = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24, eos_token_id=-1)
        (output,) = dequantized.generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True))
        assert output.token_ids == expected[0, len(ids) :].tolist()


def test_perplexity_is_that_of_transformers(real: str, theirs: Any, dequantized: LLM) -> None:
    import torch

    ids = dequantized.tokenizer.encode(TEXT)
    with torch.no_grad():
        loss = theirs(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    ours = loss_of(dequantized, ids)
    assert math.exp(ours) == pytest.approx(math.exp(loss), rel=5e-3)
    with LLM(real, model=SHORT) as llm:
        kept = loss_of(llm, ids)
    assert math.exp(kept) == pytest.approx(math.exp(loss), rel=5e-3)


def loss_of(llm: LLM, ids: list[int]) -> float:
    """Return the mean of the negative log-probabilities of the tokens after the first."""
    (output,) = llm.generate([ids], SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    values = [entry.logprob for entry in output.prompt_logprobs if entry.logprob is not None][-(len(ids) - 1) :]
    assert len(values) == len(ids) - 1
    return -sum(values) / len(values)


def test_the_tokenizer_is_that_of_transformers(real: str) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed (pip install 'dovetail[test]')")
    import transformers

    file = pullable_models()[real].path
    expected = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = Tokenizer.from_dir(locate(real))
    for text in (PAGE, *PAGE.splitlines(), "", " ", "  a"):
        assert tokenizer.encode(text) == expected(text).input_ids, text
    assert tokenizer.named_tokens["eos_token"] == expected.eos_token
    assert tokenizer.named_tokens["bos_token"] == expected.bos_token
    assert tokenizer.chat_template == (expected.chat_template or "")


@pytest.fixture(scope="module")
def client(real: str, folders: Path) -> Iterator[Callable[..., httpx.Response]]:
    command = [DOVETAIL, "serve", real, "--port", "0", "--set", "model.context_len=1024"]
    if Tokenizer.from_dir(locate(real)).has_chat_template:  # SmolLM2's names no format of calls
        command += ["--set", "tool_parser=hermes"]
    with served(command, real, env=dict(os.environ)) as url, httpx.Client(base_url=url, timeout=300) as client:

        def post(route: str, **body: Any) -> httpx.Response:
            defaults: dict[str, Any] = {} if route == "/generate" else {"model": real}
            if route.startswith("/v1/") and route != "/v1/embeddings":
                defaults["temperature"] = 0
            answer = client.post(route, json={**defaults, **body})
            assert answer.status_code == 200, answer.text
            return answer

        yield post


def test_an_answer_follows_a_schema(client: Callable[..., httpx.Response]) -> None:
    body = {"prompt": "Ada is 36 years old. As JSON:", "max_tokens": 60, "structured_outputs": {"json": SCHEMA}}
    choice = client("/v1/completions", **body).json()["choices"][0]
    value = json.loads(choice["text"])
    assert isinstance(value["name"], str)
    assert 0 <= value["age"] <= 120


def test_stop_strings_end_an_answer(client: Callable[..., httpx.Response]) -> None:
    body = {"prompt": "One, two, three, four, five,", "max_tokens": 24}
    whole = client("/v1/completions", **body).json()["choices"][0]["text"]
    word = whole.split(",")[1].strip()
    choice = client("/v1/completions", **body, stop=[word]).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == whole[: whole.index(word)]


def test_a_stream_has_the_same_text(client: Callable[..., httpx.Response]) -> None:
    body = {"prompt": "The sea is", "max_tokens": 16}
    whole = client("/v1/completions", **body).json()["choices"][0]["text"]
    lines = client("/v1/completions", **body, stream=True).text.splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert len(parts) > 4
    assert "".join(part["choices"][0]["text"] for part in parts) == whole


def test_a_prefix_is_computed_once(client: Callable[..., httpx.Response]) -> None:
    first = client("/v1/completions", prompt=f"{TEXT} In short,", max_tokens=8).json()
    again = client("/v1/completions", prompt=f"{TEXT} In short,", max_tokens=8).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_chat_uses_the_template_of_the_file(real: str, client: Callable[..., httpx.Response]) -> None:
    if not Tokenizer.from_dir(locate(real)).has_chat_template:
        pytest.skip(f"{real} is a base model without a chat template")
    body = {"messages": [{"role": "user", "content": "Count from one to five."}], "max_tokens": 24}
    answer = client("/v1/chat/completions", **body).json()
    assert answer["choices"][0]["message"]["content"].strip()
    assert answer["usage"]["prompt_tokens"] > 25


def has_chat(real: str) -> bool:
    return bool(Tokenizer.from_dir(locate(real)).has_chat_template)


def test_a_required_call_has_arguments_of_its_schema(real: str, client: Callable[..., httpx.Response]) -> None:
    if not has_chat(real):
        pytest.skip(f"{real} is a base model without a chat template")
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    body = {
        "messages": [{"role": "user", "content": "What will the weather in Rome be in the next three days?"}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 100,
    }
    choice = client("/v1/chat/completions", **body).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 7


def test_every_api_gives_the_same_text(real: str, client: Callable[..., httpx.Response]) -> None:
    prompt = "The capital of France is"
    expected = client("/v1/completions", prompt=prompt, max_tokens=8).json()["choices"][0]["text"]
    native = client("/generate", text=prompt, sampling_params={"temperature": 0, "max_new_tokens": 8}).json()
    ollama = client(
        "/api/generate", prompt=prompt, raw=True, stream=False, options={"temperature": 0, "num_predict": 8}
    )
    assert native["text"] == ollama.json()["response"] == expected
    ids = client("/tokenize", prompt=prompt).json()["tokens"]
    assert client("/detokenize", tokens=ids).json()["prompt"].endswith(prompt)
    vectors = client("/v1/embeddings", input=[prompt, TEXT]).json()["data"]
    assert len(vectors[0]["embedding"]) == len(vectors[1]["embedding"]) > 500
    if not has_chat(real):
        return
    talk = [{"role": "user", "content": "Name the capital of France."}]
    chat = client("/v1/chat/completions", messages=talk, max_tokens=12).json()["choices"][0]["message"]["content"]
    messages = client("/v1/messages", messages=talk, max_tokens=12).json()["content"][0]["text"]
    responses = client("/v1/responses", input=talk, max_output_tokens=12).json()["output"][0]["content"][0]["text"]
    theirs = client("/api/chat", messages=talk, stream=False, options={"temperature": 0, "num_predict": 12}).json()
    assert messages == responses == theirs["message"]["content"] == chat
    assert "Paris" in chat


def test_drafts_of_ngrams_change_no_token(real: str, dequantized: LLM) -> None:
    prompt = f"{TEXT}\n\n{TEXT[:200]}"
    greedy = SamplingParams(temperature=0.0, max_new_tokens=48, ignore_eos=True)
    (expected,) = dequantized.generate([prompt], greedy)
    with LLM(real, quantization="none", model=SHORT, speculative="ngram") as llm:
        (output,) = llm.generate([prompt], greedy)
    assert output.token_ids == expected.token_ids
    assert output.accepted > 10
