"""Provide what the tests of Anthropic's API have in common: conversations, tools and request bodies."""

import time
from collections.abc import Callable
from typing import Any

import pytest

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 2 + 3?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "minLength": 1, "maxLength": 20}}}
CITY |= {"required": ["city"], "additionalProperties": False}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city", "input_schema": CITY}
ADD = {"name": "add", "description": "Add two numbers", "input_schema": NUMBERS, "cache_control": {"type": "ephemeral"}}
TOOLS = [WEATHER, ADD]
THINK = {"type": "enabled", "budget_tokens": 1024}
PATIENCE = 30.0

each_way = pytest.mark.parametrize("stream", [False, True])


def body_of(messages: list[dict[str, Any]], **given: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 120, "temperature": 0, "messages": messages, **given}


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.01)
