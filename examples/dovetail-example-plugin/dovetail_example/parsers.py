"""Parse tool calls (lines ``CALL name {...}``) and reasoning (lines ``# ...``). A line that may be one of these is held
back until it is complete."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from dovetail.errors import GrammarError
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
from dovetail_example.config import CallLinesConfig, CommentsConfig

CALL = re.compile(r"CALL (\S+) (\{.*\})\s*")


class Lines:
    """Divide text into lines. Whole lines are returned with True. Parts of a line that does not begin with ``mark`` are
    returned at once, with False."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._line = ""
        self._plain = False  # parts of the line have been returned

    def feed(self, text: str) -> Iterator[tuple[bool, str]]:
        for part in re.findall(r"[^\n]*\n|[^\n]+", text):
            self._line += part
            ends = part.endswith("\n")
            if ends or self._plain or not (self._line.startswith(self._mark) or self._mark.startswith(self._line)):
                yield self.finish()
                self._plain = not ends

    def finish(self) -> tuple[bool, str]:
        line, self._line = self._line, ""
        return not self._plain and (line.endswith("\n") or line.startswith(self._mark)), line


class CallStream(ToolStream):
    def __init__(self, parser: CallLines, tools: Sequence[Tool]) -> None:
        self._new_id = parser.new_id
        self._names = {tool.name for tool in tools}
        self._lines = Lines("CALL ")
        self._count = 0

    def feed(self, text: str) -> ToolDelta:
        deltas = [self._read(*line) for line in self._lines.feed(text)]
        return ToolDelta("".join(d.content for d in deltas), tuple(call for d in deltas for call in d.calls))

    def finish(self) -> ToolDelta:
        return self._read(*self._lines.finish())

    def _read(self, whole: bool, line: str) -> ToolDelta:
        found = CALL.fullmatch(line) if whole else None
        if found is None or found[1] not in self._names or not _is_json(found[2]):
            return ToolDelta(line)
        self._count += 1
        return ToolDelta("", (CallDelta(self._count - 1, self._new_id(), found[1], found[2]),))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class CallLines(ToolParser):
    def __init__(self, config: CallLinesConfig, context: ParserContext) -> None:
        pass

    def stream(self, tools: Sequence[Tool]) -> ToolStream:
        return CallStream(self, tools)

    def constraint(self, request: ToolRequest, offers: frozenset[Feature]) -> ToolConstraint | None:
        if request.required or any(tool.strict for tool in request.tools):
            raise GrammarError(
                "the tool format 'example_lines' cannot enforce calls; give tool_choice: auto", param="tools"
            )
        return None


class CommentStream(ReasoningStream):
    def __init__(self) -> None:
        self._lines = Lines("# ")

    def feed(self, text: str) -> ReasoningDelta:
        deltas = [self._read(*line) for line in self._lines.feed(text)]
        return ReasoningDelta("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas))

    def finish(self) -> ReasoningDelta:
        return self._read(*self._lines.finish())

    def _read(self, whole: bool, line: str) -> ReasoningDelta:
        return ReasoningDelta(line[2:]) if whole and line.startswith("# ") else ReasoningDelta("", line)


class Comments(ReasoningParser):
    def __init__(self, config: CommentsConfig, context: ParserContext) -> None:
        pass

    def stream(self, prompt: str) -> ReasoningStream:
        return CommentStream()

    def gate(self, prompt: str) -> ConstraintGate | None:
        return None
