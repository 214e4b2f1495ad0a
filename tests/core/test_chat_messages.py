"""Test how messages of chats are read, and what their mistakes are called.

Run: pytest tests/core/test_chat_messages.py
"""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.api.body import validate
from dovetail.chat.requests import plain_message
from dovetail.errors import RequestError
from dovetail_apis.openai.types import ChatCompletionRequest
from dovetail_apis.responses.types import ResponsesRequest


def called(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize("given", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "{}"}, {"arguments": {}}])
def test_calls_without_arguments_have_none(given: dict[str, Any]) -> None:
    """Clients write them in each of these ways, among them those that repeat what streams of other servers contain."""
    (call,) = plain_message(called(name="f", **given), 0)["tool_calls"]
    assert call["id"] == "1"
    assert call["function"]["name"] == "f"
    assert dict(call["function"]["arguments"]) == {}


@pytest.mark.parametrize(
    "given",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": None},
    ],
)
def test_assistants_and_tools_may_say_nothing(given: dict[str, Any]) -> None:
    assert plain_message(given, 0)["content"] == ""


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (called(name="f", arguments="{bad"), "messages.3.tool_calls.0.function.arguments is not JSON: "),
        (
            called(arguments="{}"),
            "messages.3.tool_calls.0 is {'id': '1', 'function': {'arguments': '{}'}}; allowed: {'fun",
        ),
        (called(name=7), "messages.3.tool_calls.0 is "),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages.3.tool_calls.0 is 'f'; allowed: {'function': {'name': "),
        ({"role": "assistant", "tool_calls": {}}, "messages.3.tool_calls is {}; allowed: [{'function': {'name': "),
        (
            {"role": "assistant", "tool_calls": 7},
            "messages.3.tool_calls is 7; allowed: [{'function': {'name': 'f', 'arguments': '{}'}}]",
        ),
        ({"role": "user"}, "messages.3.content is missing"),
        ({"role": "user", "text": "Hello"}, "messages.3.content is missing"),
        ({"role": "system", "content": None}, "messages.3.content is missing"),
    ],
)
def test_what_is_wrong_is_named(message: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError) as raised:
        plain_message(message, 3)
    assert raised.value.param == "messages"
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            {"messages": [{"role": "user", "content": 7}]},
            "messages.0.content is 7: input should be a valid string or input ",
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0 is 'a': input should be an object"),
        ({"messages": [{"content": "a"}]}, "messages.0.role is missing"),
        ({"messages": []}, "messages is []: allowed: at least 1 entry"),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f f"}}],
            },
            "tools.0.function.name is 'f f': string should match pattern",
        ),
        ({"messages": {}}, "messages is {}: input should be a valid list"),
        (
            {"messages": [{"role": "user", "content": "a"}], "stop": ["a", 7]},
            "stop.1 is 7: input should be a valid string",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}], "stop": {"a": 7}},
            "stop is {'a': 7}: input should be a valid ",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name is missing",
        ),
    ],
)
def test_the_innermost_wrong_value_is_named(body: dict[str, Any], error: str) -> None:
    """Also where a field may be one of several types, each of which is wrong in its own way."""
    with pytest.raises(RequestError) as raised:
        validate({"model": "m", **body}, ChatCompletionRequest)
    assert raised.value.param == next(name for name in reversed(body))
    assert str(raised.value).startswith(error)


def test_a_wrong_tag_is_named_with_those_that_exist() -> None:
    with pytest.raises(
        RequestError, match=r"text.format is .*: 'type' should be one of 'text', 'json_object', 'json_schema'"
    ):
        validate({"input": "a", "text": {"format": {"type": "xml"}}}, ResponsesRequest)
