"""Test stop strings of chats with tools: they end content and reasoning, and never a call.

Run: python -m pytest -q tests/core/test_output_stops.py
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.chat.reading import OutputReader, Stops
from dovetail.interfaces.api import ChatDelta
from dovetail.interfaces.parsers import CallDelta, ParserContext, Tool
from dovetail.testing.parsers import cut, places
from dovetail.types import FinishKind, FinishReason
from dovetail_parsers.config import HermesConfig, Qwen3ReasoningConfig
from dovetail_parsers.hermes import Hermes
from dovetail_parsers.think import Qwen3

TOOLS = [Tool("add", {"type": "object"})]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "STOP\\n", "b": [1]}}\n</tool_call>'
ARGUMENTS = '{"a": "STOP\\n", "b": [1]}'
LENGTH = FinishReason(FinishKind.LENGTH)


def reader(*stops: str, include: bool = False, min_tokens: int = 0, thinks: bool = False) -> OutputReader:
    hermes, qwen = Hermes(HermesConfig(), ParserContext()), Qwen3(Qwen3ReasoningConfig(), ParserContext())
    reasoning = qwen.stream("<think>\n") if thinks else None
    return OutputReader(reasoning, hermes.stream(TOOLS), False, Stops(stops, include, min_tokens) if stops else None)


def parts_of(made: OutputReader, *pieces: str) -> list[ChatDelta]:
    """Return the parts that the reader makes of the text, up to where it stops."""
    parts, finish = list[ChatDelta](), None
    for i, piece in enumerate(pieces):
        found, finish = made.take(piece, LENGTH if i + 1 == len(pieces) else None, i + 1)
        parts += found
        if finish is not None:
            break
    assert finish is not None
    assert (finish.kind is FinishKind.STOP) == (made.stopped is not None)
    assert finish.matched == made.stopped
    return parts


def heard(made: OutputReader, *pieces: str) -> tuple[str, str, list[list[str]]]:
    """Return reasoning, content, and [name, arguments] of each call; stop where the reader does."""
    parts = parts_of(made, *pieces)
    calls: list[list[str]] = []
    for call in [call for part in parts for call in part.calls]:
        assert isinstance(call, CallDelta)
        if call.name is not None:
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    assert made.calls == len(calls)
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls


@pytest.mark.parametrize("stop", ["STOP", "\n", '"', "}", "add", "</tool_call>", "<tool_call>", "_"])
def test_no_stop_string_ends_a_call(stop: str):
    text = f"one {CALL} two {stop} three {CALL}"
    _, content, calls = heard(reader(stop), *text)
    assert calls == [["add", ARGUMENTS]]
    assert content.split() == ["one", "two"]


def test_the_stop_string_is_left_out_unless_it_is_wanted():
    for include in (False, True):
        assert heard(reader("ST", include=include), "abSTcd")[1] == ("abST" if include else "ab")


def test_a_stop_string_does_not_reach_over_a_call():
    assert heard(reader("abcd"), f"ab {CALL} cd")[1:] == ("ab cd", [["add", ARGUMENTS]])
    assert heard(reader("ab cd"), f"ab {CALL} cd")[1].split() == ["ab", "cd"]


def test_reasoning_ends_at_a_stop_string_too():
    made = reader("STOP", thinks=True)
    assert heard(made, f"one STOP two</think>three {CALL}") == ("one ", "", [])
    assert heard(reader("STOP", thinks=True), f"one</think>{CALL} two STOP") == ("one", " two ", [["add", ARGUMENTS]])


def test_stop_strings_count_from_the_least_number_of_tokens_on():
    pieces = ["a STOP ", "b ", "c STOP ", "d"]
    assert heard(reader("STOP", min_tokens=2), *pieces)[1] == "a STOP b c "


def test_what_is_held_back_comes_at_the_end():
    assert heard(reader("STOP"), "abc ST")[1] == "abc ST"
    assert heard(reader("STOP"), f"abc ST{CALL}")[1:] == ("abc ST", [["add", ARGUMENTS]])


def runs_of_content(parts: list[ChatDelta]) -> list[str]:
    """Return the content before, between and after calls, which no stop string spans. The output came character by
    character, because one delta does not say which part came first."""
    runs = [""]
    for part in parts:
        runs[-1] += part.content
        if part.calls:
            runs.append("")
    return runs


texts = st.lists(
    st.sampled_from(["a", "ST", "OP", " ", "\n", "<tool", "_call>", CALL, '{"', "</think>"]), max_size=8
).map("".join)
stops = st.lists(st.sampled_from(["STOP", "a", "aST", "\n", '"', "<tool_call>", "OP a"]), min_size=1, max_size=3)


@settings(max_examples=300)
@given(text=texts, given_stops=stops, at=places, thinks=st.booleans())
def test_pieces_do_not_matter_and_calls_stay_whole(text: str, given_stops: list[str], at: list[int], thinks: bool):
    made = reader(*given_stops, thinks=thinks)
    found = heard(made, text)
    assert heard(reader(*given_stops, thinks=thinks), *cut(text, at)) == found
    free = heard(reader(thinks=thinks), text)
    if made.stopped is None:
        assert found == free
        return
    assert free[0].startswith(found[0])
    assert free[1].startswith(found[1])
    assert free[2][: len(found[2])] == found[2]
    assert all(json.loads(arguments) for _, arguments in found[2])
    assert any(f"{shown}{made.stopped}" in whole for shown, whole in zip(found[:2], free[:2], strict=True))
    runs = runs_of_content(parts_of(reader(*given_stops, thinks=thinks), *text))
    assert "".join(runs) == found[1]
    assert not any(stop in run for stop in given_stops for run in [found[0], *runs])
