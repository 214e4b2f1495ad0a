"""Define broken parsers of tool calls and of reasoning: hermes' and qwen3's with one fault each."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import Phase
from mutant import Mutant

from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import (
    CallDelta,
    ConstraintGate,
    ParserContext,
    ReasoningDelta,
    ReasoningParser,
    ReasoningStream,
    Tool,
    ToolConstraint,
    ToolDelta,
    ToolParser,
    ToolRequest,
    ToolStream,
)
from dovetail.testing.enforced import STRICT
from dovetail.testing.parsers import (
    OPEN,
    TOOLS,
    ExpectedCall,
    ParsedOutput,
    ReasoningParserSuite,
    ToolParserSuite,
    run_stream,
)
from dovetail_parsers.config import HermesConfig, Qwen3ReasoningConfig
from dovetail_parsers.hermes import Hermes
from dovetail_parsers.schemas import call_schema, json_spec
from dovetail_parsers.think import Qwen3

Constrains = Callable[[ToolRequest, frozenset[Feature]], ToolConstraint | None]
OPENED = "<|im_start|>assistant\n<think>\n"


def hermes() -> Hermes:
    return Hermes(HermesConfig(), ParserContext())


class Changed(ToolStream):
    """Change the deltas of hermes' stream."""

    def __init__(self, change: Callable[[ToolDelta], ToolDelta]) -> None:
        self._inner, self._change = hermes().stream(TOOLS), change

    def feed(self, text: str) -> ToolDelta:
        return self._change(self._inner.feed(text))

    def finish(self) -> ToolDelta:
        return self._change(self._inner.finish())


class PieceByPiece(ToolStream):
    """Parse each piece alone."""

    def feed(self, text: str) -> ToolDelta:
        parsed = run_stream(hermes().stream(TOOLS), [text])
        return ToolDelta(parsed.content, tuple(CallDelta(i, f"c{i}", n, a) for i, (n, a) in enumerate(parsed.calls)))

    def finish(self) -> ToolDelta:
        return ToolDelta()


class AtTheEnd(ToolStream):
    """Parse the text as JSON at its end."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> ToolDelta:
        self._text += text
        return ToolDelta()

    def finish(self) -> ToolDelta:
        parts = self._text.partition("<tool_call>")[2].partition("</tool_call>")
        call = json.loads(parts[0])
        return ToolDelta("", (CallDelta(0, "c", call["name"], json.dumps(call["arguments"])),))


def without_marks(delta: ToolDelta) -> ToolDelta:
    return delta._replace(content=delta.content.replace("<", ""))


def without_content(delta: ToolDelta) -> ToolDelta:
    return delta._replace(content="")


def one_index(delta: ToolDelta) -> ToolDelta:
    return delta._replace(calls=tuple(replace(call, index=0) for call in delta.calls))


class ToolSuite(ToolParserSuite):
    """Test hermes, or hermes with another stream for its format."""

    name = "hermes"
    phases = (Phase.generate,)
    max_examples = 120

    def __init__(self, stream: Callable[[], ToolStream] | None = None) -> None:
        self._stream = stream or (lambda: hermes().stream(TOOLS))

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        made = (json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False) for c in calls)
        return "\n".join([content, *(f"<tool_call>\n{call}\n</tool_call>" for call in made)])

    def parse(self, *pieces: str) -> ParsedOutput:
        return run_stream(self._stream(), pieces)

    def make(self) -> ToolParser:
        parser = hermes()
        parser.stream = lambda tools: self._stream()  # type: ignore[method-assign]
        return parser


class ConstraintSuite(ToolSuite):
    """Test hermes, with ``changed`` applied to its constraints."""

    def __init__(self, changed: Callable[[Constrains, ToolRequest, frozenset[Feature]], Any] | None = None) -> None:
        super().__init__()
        self._changed = changed or (lambda constraint, request, offers: constraint(request, offers))

    def make(self) -> ToolParser:
        parser = hermes()
        constraint, parser.call_end = parser.constraint, None  # no end stops an output with one call
        parser.constraint = lambda request, offers: self._changed(constraint, request, offers)  # type: ignore[method-assign]
        return parser


def raises_for_several(constraint: Constrains, request: ToolRequest, offers: frozenset[Feature]) -> Any:
    (_only,) = request.tools
    return constraint(request, offers)


def ignores_schemas(constraint: Constrains, request: ToolRequest, offers: frozenset[Feature]) -> Any:
    return constraint(replace(request, tools=tuple(replace(tool, parameters=OPEN) for tool in request.tools)), offers)


def allows_several(constraint: Constrains, request: ToolRequest, offers: frozenset[Feature]) -> Any:
    return constraint(replace(request, parallel=True), offers)


def knows_one_function(constraint: Constrains, request: ToolRequest, offers: frozenset[Feature]) -> Any:
    return constraint(replace(request, tools=request.tools[:1]), offers)


def knows_every_function(constraint: Constrains, request: ToolRequest, offers: frozenset[Feature]) -> Any:
    return constraint(replace(request, tools=STRICT), offers)


def writes_another_mark(constraint: Constrains, request: ToolRequest, offers: frozenset[Feature]) -> Any:
    found = constraint(request, offers)
    gate = found and ConstraintGate(prefix="<function_call>\n")
    return found and ToolConstraint(json_spec(call_schema(request.tools)), gate)


def takes_every_backend_for_able(constraint: Constrains, request: ToolRequest, offers: frozenset[Feature]) -> Any:
    return constraint(request, offers | {Feature.GRAMMAR_STRUCTURAL_TAG})


def always_requires(constraint: Constrains, request: ToolRequest, offers: frozenset[Feature]) -> Any:
    return constraint(replace(request, required=True), offers)


class Hasty(ReasoningStream):
    """Search for the mark in each piece alone."""

    def __init__(self) -> None:
        self._thinking = True

    def feed(self, text: str) -> ReasoningDelta:
        if not self._thinking:
            return ReasoningDelta(content=text)
        before, mark, after = text.partition("</think>")
        self._thinking = not mark
        return ReasoningDelta(before, after)

    def finish(self) -> ReasoningDelta:
        return ReasoningDelta()


class Forgets(Hasty):
    """Lose the first letter of the content."""

    def feed(self, text: str) -> ReasoningDelta:
        delta = super().feed(text)
        return delta._replace(content=delta.content.strip()[1:])


class Withholds(ReasoningStream):
    """Return everything at the end."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> ReasoningDelta:
        self._text += text
        return ReasoningDelta()

    def finish(self) -> ReasoningDelta:
        return Hasty().feed(self._text)


class WrongGate(Qwen3):
    """Wait for a mark that is never written."""

    def gate(self, prompt: str) -> ConstraintGate | None:
        gate = super().gate(prompt)
        return gate and replace(gate, until="</thought>")


class ReasoningSuite(ReasoningParserSuite):
    """Test qwen3, or qwen3 with another stream for its format."""

    name = "qwen3"
    phases = (Phase.generate,)
    max_examples = 120
    prompts = (OPENED,)

    def __init__(self, stream: Callable[[], ReasoningStream] | None = None, parser: type[Qwen3] = Qwen3) -> None:
        self._stream, self._parser = stream, parser

    def write(self, reasoning: str, answer: str, prompt: str) -> str:
        return f"{reasoning}\n</think>\n\n{answer}"

    def make(self) -> ReasoningParser:
        parser, stream = self._parser(Qwen3ReasoningConfig(), ParserContext()), self._stream
        if stream is not None:
            parser.stream = lambda prompt: stream()  # type: ignore[method-assign]
        return parser


def _tools(fault: str, stream: Callable[[], ToolStream], case: str, says: str = "") -> Mutant:
    return Mutant(fault, case, functools.partial(ToolSuite, stream), ToolSuite, says=says)


def _constraint(fault: str, changed: Any, case: str, mode: str | None, says: str) -> Mutant:
    broken = functools.partial(ConstraintSuite, changed)
    return Mutant(fault, f"test_{case}", broken, ConstraintSuite, [() if mode is None else (mode,)], says)


ENFORCED = "what_is_enforced_is_what_was_requested"


def _reasoning(fault: str, case: str, **broken: Any) -> Mutant:
    return Mutant(fault, case, functools.partial(ReasoningSuite, **broken), ReasoningSuite)


MUTANTS = [
    _tools("drops a boundary between pieces", PieceByPiece, "test_pieces_do_not_matter"),
    _tools("drops characters of content", lambda: Changed(without_marks), "test_text_without_calls_is_unchanged"),
    _tools("gives all calls one index", lambda: Changed(one_index), "test_calls_are_found_in_any_pieces"),
    _tools("raises for text that is not a call", AtTheEnd, "test_pieces_do_not_matter", "JSONDecodeError"),
    _tools("emits arguments in the end only", AtTheEnd, "test_arguments_come_as_they_grow"),
    _tools("loses the content", lambda: Changed(without_content), "test_no_word_is_lost"),
    _tools("takes back what it emitted", PieceByPiece, "test_emitted_deltas_stay"),
    _tools(
        "calls functions that were not offered",
        lambda: hermes().stream((*TOOLS, Tool("launch_rocket", OPEN))),
        "test_unknown_functions_are_content",
    ),
    _constraint("has a constraint that raises", raises_for_several, ENFORCED, "required", "too many values"),
    _constraint("enforces no schema", ignores_schemas, ENFORCED, "one", "the schema forbids"),
    _constraint("allows several calls where one is allowed", allows_several, ENFORCED, "one", "one call is allowed"),
    _constraint("enforces calls of one function", knows_one_function, ENFORCED, "one", "no text under the constraint"),
    _constraint(
        "allows functions that were not requested", knows_every_function, ENFORCED, "named", "call is required"
    ),
    _constraint("forces a mark that it does not read", writes_another_mark, ENFORCED, "one", "call is required"),
    _constraint(
        "needs what the grammar backend does not offer",
        takes_every_backend_for_able,
        "what_cannot_be_enforced_is_refused",
        "strict",
        "it needs a grammar of kind",
    ),
    _constraint(
        "requires calls that were not requested",
        always_requires,
        "nothing_is_enforced_that_was_not_requested",
        None,
        "outputs without calls",
    ),
    _reasoning("overlooks a mark between pieces", "test_both_parts_are_found_in_any_pieces", stream=Hasty),
    _reasoning("drops a boundary between pieces", "test_pieces_do_not_matter", stream=Hasty),
    _reasoning("loses the answer's beginning", "test_no_word_is_lost", stream=Forgets),
    _reasoning("emits everything at the end", "test_both_parts_come_as_they_grow", stream=Withholds),
    _reasoning("returns a mark that never appears", "test_a_gate_ends_with_what_it_writes", parser=WrongGate),
]
