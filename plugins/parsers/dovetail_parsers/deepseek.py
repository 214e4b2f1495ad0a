"""Read calls between DeepSeek's marks. V3 and R1 write the arguments as a Markdown block, V3.1 writes them without
one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import (
    ConstraintGate,
    ParserContext,
    Tool,
    ToolConstraint,
    ToolParser,
    ToolRequest,
    ToolStream,
)
from dovetail_parsers.calls import CallReader
from dovetail_parsers.jsontext import read_arguments
from dovetail_parsers.marks import Marks
from dovetail_parsers.reader import END, MalformedError, Reading
from dovetail_parsers.schemas import (
    LOOSEN,
    NAME_ONE,
    SEVERAL,
    STRICT_AUTO,
    enforced_tools,
    json_spec,
    must_enforce,
    object_schema,
    require_feature,
    tag_spec,
)

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE, FENCE_END = "\n```json\n", "\n```"
_LONGEST_NAME = 80
_COMMON = "<｜tool▁call"
"""Hold the common beginning of the two marks that may follow a call."""


class _DeepseekReader(CallReader):
    def read(self) -> Reading[None]:
        while (mark := (yield from self.content_until(CALLS, CALL))) != END:
            yield from self.attempt(self._calls(mark))

    def _calls(self, mark: str) -> Reading[None]:
        if mark == CALLS:
            yield from self.skip_space()
            yield from self.expect(CALL)
        more = True
        while more:
            yield from self._call()
            more = yield from self._another()

    def _call(self) -> Reading[None]:
        name = yield from self.until(SEPARATOR, _LONGEST_NAME)
        fenced = name == "function" and name not in self.names
        if fenced:
            name = yield from self.until(FENCE, _LONGEST_NAME)
        if name not in self.names:
            raise MalformedError(f"there is no function {name!r}")
        yield from self.skip_space()
        yield from read_arguments(self, name)
        yield from self.close(*(("```",) if fenced else ()), CALL_END)

    def _another(self) -> Reading[bool]:
        """Read the mark after a call, and return True if it begins another call."""
        if (yield from self.space()) == END:
            self.accept()
            return False
        self.unread()
        if (yield from self.peek()) != _COMMON[0]:
            return False
        yield from self.expect(_COMMON)
        if (yield from self.one_of("s▁")) == "▁":
            yield from self.expect(CALL.removeprefix(f"{_COMMON}▁"))
            return True
        yield from self.expect(CALLS_END.removeprefix(f"{_COMMON}s"))
        return False


class Deepseek(ToolParser):
    """Read and constrain calls in the formats of DeepSeek V3, R1 and V3.1."""

    special_tokens = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)
    call_end = CALL_END

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """See ``ToolParser``. The template shows which of the formats the model writes."""
        self._fenced = "```json" in context.chat_template
        self._marks = Marks(self.special_tokens, context.special_tokens)

    def stream(self, tools: Sequence[Tool]) -> ToolStream:
        """See ``ToolParser``."""
        return _DeepseekReader(tools, self.new_id)

    def constraint(self, request: ToolRequest, offers: frozenset[Feature]) -> ToolConstraint | None:
        """Constrain calls with structural tags. Without structural tags, constrain the arguments of the only function,
        if a call is required."""
        if not must_enforce(request):
            return None
        if Feature.GRAMMAR_STRUCTURAL_TAG not in offers and request.required and len(request.tools) == 1:
            tool = request.tools[0]
            return ToolConstraint(json_spec(object_schema(tool)), ConstraintGate(prefix=CALLS + self._begin(tool)))
        what, instead = (SEVERAL, NAME_ONE) if request.required else (STRICT_AUTO, LOOSEN)
        require_feature("deepseek", offers, Feature.GRAMMAR_STRUCTURAL_TAG, what, instead)
        marks = self._marks.pairs
        grammar = tag_spec([self._structure(tool) for tool in enforced_tools(request)], self._marks.write(CALL))
        required = ConstraintGate(prefix=CALLS + CALL, prefix_in_grammar=True, marks=marks)
        return ToolConstraint(grammar, required if request.required else ConstraintGate(marks=marks))

    def _begin(self, tool: Tool) -> str:
        return f"{CALL}function{SEPARATOR}{tool.name}{FENCE}" if self._fenced else f"{CALL}{tool.name}{SEPARATOR}"

    def _structure(self, tool: Tool) -> dict[str, Any]:
        end = FENCE_END + CALL_END if self._fenced else CALL_END
        write = self._marks.write
        return {"begin": write(self._begin(tool)), "schema": object_schema(tool), "end": write(end)}
