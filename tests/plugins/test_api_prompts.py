"""Check how prompts are cut, how a gap is marked, and that ids of requests are repeated in headers.

.venv/bin/python -m pytest -q tests/plugins/test_api_prompts.py
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from dovetail.api.truncation import TruncationFields
from dovetail.testing.api_server import EchoServer
from dovetail_apis.config import OpenAIConfig
from dovetail_apis.openai import OpenAIApi
from dovetail_apis.openai.infill import infill_prompt


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [1, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 5, 6]),
        ({"truncate_prompt_tokens": 20}, [1, 5, 6, 7, 8, 9]),
        ({"truncate_prompt_tokens": -1}, [1, 8, 9]),
        ({"truncation_side": "left"}, [1, 5, 6, 7, 8, 9]),
    ],
)
def test_truncated_prompts(fields: dict[str, Any], kept: list[int]):
    """The tokenizer adds the special token 1, which stays."""

    async def encode(text: str, add_special_tokens: bool) -> list[int]:
        return [1, *map(int, text.split())]

    tokenizer = SimpleNamespace(special_token_ids={1})
    most = 8 if fields.get("truncate_prompt_tokens") == -1 else 64
    host: Any = SimpleNamespace(encode=encode, context_len=most, tokenizer=tokenizer)
    assert asyncio.run(TruncationFields(**fields).encoded(host, "5 6 7 8 9", True, 5)) == kept


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), [100, 1, 2, 101, 3, 102]),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), [100, 1, 2, 101, 3, 102]),
        (("[PREFIX]", "[SUFFIX]"), [101, 3, 100, 1, 2]),
    ],
)
def test_prompts_with_a_gap(names: tuple[str, ...], expected: list[int]):
    async def encode(text: str, add_special_tokens: bool) -> list[int]:
        return [99] * add_special_tokens + [int(word) for word in text.split()]

    known = {name: 100 + i for i, name in enumerate(names)}
    tokenizer = SimpleNamespace(token_to_id=known.get, special_token_ids={99, *known.values()})
    host: Any = SimpleNamespace(encode=encode, tokenizer=tokenizer)
    assert asyncio.run(infill_prompt(host, "1 2", "3")) == [99, *expected]


@pytest.mark.parametrize(("given", "shown"), [("abc-1", "abc-1"), ("a" * 257, None), ("a b", None)])
def test_the_id_in_the_header(given: str, shown: str | None):
    async def app() -> Any:
        return EchoServer(OpenAIApi(OpenAIConfig())).app

    client = TestClient(asyncio.run(app()))
    for path in ("/v1/models", "/nowhere"):
        assert client.get(path, headers={"x-request-id": given}).headers.get("x-request-id") == shown
