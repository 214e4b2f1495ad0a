"""Read calls that are the whole answer, ``{"name": ..., "parameters": {...}}``, separated by ``;``."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import ParserContext, Tool, ToolConstraint, ToolParser, ToolRequest, ToolStream
from dovetail_parsers.calls import CallReader
from dovetail_parsers.jsontext import json_call
from dovetail_parsers.marks import Marks, json_block
from dovetail_parsers.reader import END, Reading
from dovetail_parsers.schemas import (
    LOOSEN,
    STRICT_AUTO,
    call_schema,
    enforced_tools,
    json_spec,
    lark_spec,
    must_enforce,
    require_feature,
)

TAG = "<|python_tag|>"


class _LlamaReader(CallReader):
    def read(self) -> Reading[None]:
        """Read calls at the beginning of the output, and after the tag."""
        if (yield from self.space()) == "{":
            yield from self.attempt(self._calls())
        else:
            self.give_back()
        while (yield from self.content_until(TAG)) != END:
            yield from self.attempt(self._tagged())

    def _tagged(self) -> Reading[None]:
        yield from self.skip_space()
        yield from self.one_of("{")
        yield from self._calls()

    def _calls(self) -> Reading[None]:
        """Read calls; the first ``{`` has been read."""
        while True:
            yield from json_call(self)
            self.accept()
            char = yield from self.space()
            if char != ";":
                if char != END:
                    self.unread()
                return
            yield from self.skip_space()
            yield from self.one_of("{")


class Llama3Json(ToolParser):
    """Read and constrain calls in the format of Llama 3.1 to 3.3."""

    special_tokens = (TAG,)

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """See ``ToolParser``."""

    def stream(self, tools: Sequence[Tool]) -> ToolStream:
        """See ``ToolParser``."""
        return _LlamaReader(tools, self.new_id)

    def constraint(self, request: ToolRequest, offers: frozenset[Feature]) -> ToolConstraint | None:
        """Constrain one call as JSON. If no call is required, a text that does not begin like a call is allowed too."""
        if not must_enforce(request):
            return None
        if request.required:
            return ToolConstraint(json_spec(call_schema(request.tools, "parameters")))
        require_feature("llama3_json", offers, Feature.GRAMMAR_LARK, STRICT_AUTO, LOOSEN)
        call = json_block(call_schema(enforced_tools(request), "parameters"))
        other = r"ANSWER: FREE & /(?s:[ \t\r\n]*([^ \t\r\n{].*)?)/"
        return ToolConstraint(lark_spec([f"start: {call} | ANSWER", *Marks((TAG,), frozenset()).terminals(), other]))
