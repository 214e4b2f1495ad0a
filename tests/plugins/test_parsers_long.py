"""Test that the time that parsers take grows with the length of a text and not with its square, whatever the text is: clients
send texts of megabytes to be parsed.

Run: python -m pytest -q tests/plugins/test_parsers_long.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.interfaces.parsers import ParserContext
from dovetail.registry.resolution import Chosen
from dovetail.registry.specs import ComponentKind
from dovetail.testing.installed import installed
from dovetail.testing.parsers import TOOLS

NAME = TOOLS[0].name
PIECES = (
    "<think>",
    "<",
    "</think",
    "<tool_call>",
    f'<tool_call>\n{{"name": "{NAME}", "arguments": {{}}}}\n</tool_call>',
    f'{{"name": "{NAME}", "parameters": {{}}}}',
    f'[TOOL_CALLS]{NAME}{{"a":',
    "[TOOL_CALLS][{",
    f"{NAME}(a=",
    f"[{NAME}(a=1), ",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "<|channel|>analysis<|message|>a",
    f"<|channel|>commentary to=functions.{NAME}<|message|>{{",
    "<|start|>assistant",
    '{"a":',
    "[",
    '"\\',
    " \n",
    "(",
)
SHORT, LONG = 20_000, 80_000


def parsers() -> Iterator[tuple[ComponentKind, str, Any]]:
    """Yield the kind and the name of each parser, and the parser."""
    for component in installed().every_component:
        kind, name = component.spec.kind, component.spec.name
        if kind in (ComponentKind.TOOL_PARSER, ComponentKind.REASONING_PARSER):
            settings = installed().config_class(kind, name)(kind=name)
            yield kind, name, Chosen(component, settings).build(ParserContext())


PARSERS = {f"{kind}-{name}": (kind, parser) for kind, name, parser in parsers()}


def seconds(kind: ComponentKind, parser: Any, text: str) -> float:
    """Return the processor time that a new stream takes for the whole text in one piece."""
    stream = parser.stream(TOOLS) if kind is ComponentKind.TOOL_PARSER else parser.stream("")
    start = time.process_time()
    stream.feed(text)
    stream.finish()
    return time.process_time() - start


def test_marks_in_long_reasoning_are_read_at_once():
    """The time of 500,000 marks was more than a minute."""
    _, parser = PARSERS["reasoning_parser-qwen3"]
    assert seconds(ComponentKind.REASONING_PARSER, parser, "<think>" * 500_000) < 5


@pytest.mark.full
@pytest.mark.parametrize("name", PARSERS)
def test_time_grows_with_the_length(name: str):
    kind, parser = PARSERS[name]
    slow: dict[str, tuple[float, float]] = {}
    for piece in PIECES:
        short, long = (seconds(kind, parser, piece * (size // len(piece))) for size in (SHORT, LONG))
        if long > 0.2 and long > 8 * short:
            slow[piece] = (short, long)
    assert not slow
