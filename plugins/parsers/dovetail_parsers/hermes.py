"""Read calls that are written as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from dovetail_parsers.jsontext import json_call
from dovetail_parsers.marks import Marks
from dovetail_parsers.reader import END, Reading
from dovetail_parsers.schemas import (
    LOOSEN,
    STRICT_AUTO,
    call_schema,
    dumps,
    enforced_tools,
    json_spec,
    must_enforce,
    object_schema,
    require_feature,
    tag_spec,
)

BEGIN, CLOSE = "<tool_call>", "</tool_call>"


class _HermesReader(CallReader):
    def read(self) -> Reading[None]:
        while (yield from self.content_until(BEGIN)) != END:
            yield from self.attempt(self._call())

    def _call(self) -> Reading[None]:
        yield from self.skip_space()
        yield from self.one_of("{")
        yield from json_call(self)
        yield from self.close(CLOSE)


class Hermes(ToolParser):
    """Read and constrain calls in the format of Hermes and Qwen."""

    special_tokens = (BEGIN, CLOSE)
    call_end = CLOSE

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """See ``ToolParser``."""
        self._special = BEGIN in context.special_tokens
        self._marks = Marks(self.special_tokens, context.special_tokens)

    def stream(self, tools: Sequence[Tool]) -> ToolStream:
        """See ``ToolParser``."""
        return _HermesReader(tools, self.new_id)

    def constraint(self, request: ToolRequest, offers: frozenset[Feature]) -> ToolConstraint | None:
        """Constrain calls with structural tags if a grammar backend offers them, else one call as JSON."""
        if not must_enforce(request):
            return None
        tags = Feature.GRAMMAR_STRUCTURAL_TAG in offers
        if request.required and (not tags or not request.parallel):
            return ToolConstraint(json_spec(call_schema(request.tools)), ConstraintGate(prefix=f"{BEGIN}\n"))
        if self._special and not tags:
            gate = ConstraintGate(until=BEGIN, may_end=True, prefix="\n")
            return ToolConstraint(json_spec(call_schema(enforced_tools(request))), gate)
        require_feature("hermes", offers, Feature.GRAMMAR_STRUCTURAL_TAG, STRICT_AUTO, LOOSEN)
        write, marks = self._marks.write, self._marks.pairs
        grammar = tag_spec([_structure(tool, write) for tool in enforced_tools(request)], write(BEGIN))
        required = ConstraintGate(prefix=BEGIN, prefix_in_grammar=True, marks=marks)
        return ToolConstraint(grammar, required if request.required else ConstraintGate(marks=marks))


def _structure(tool: Tool, write: Callable[[str], str]) -> dict[str, Any]:
    begin = f'{BEGIN}\n{{"name": {dumps(tool.name)}, "arguments": '
    return {"begin": write(begin), "schema": object_schema(tool), "end": write(f"}}\n{CLOSE}")}
