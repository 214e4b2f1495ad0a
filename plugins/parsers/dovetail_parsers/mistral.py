"""Read calls after ``[TOOL_CALLS]``: a JSON array of calls or, with Mistral's tokenizers since 2025, the name and
arguments of each, ``[TOOL_CALLS]name[ARGS]{...}``."""

from __future__ import annotations

import secrets
import string
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
from dovetail_parsers.jsontext import json_call, read_arguments
from dovetail_parsers.marks import Marks
from dovetail_parsers.reader import END, MalformedError, Reading
from dovetail_parsers.schemas import (
    LOOSEN,
    NAME_ONE,
    SEVERAL,
    STRICT_AUTO,
    call_schema,
    enforced_tools,
    json_spec,
    must_enforce,
    object_schema,
    require_feature,
    tag_spec,
)

MARK, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_IN_NAME = frozenset(string.ascii_letters + string.digits + "_.-")


class _MistralReader(CallReader):
    def read(self) -> Reading[None]:
        while (yield from self.content_until(MARK)) != END:
            yield from self.attempt(self._calls())

    def _calls(self) -> Reading[None]:
        yield from self.skip_space()
        if (yield from self.peek()) == "[":
            yield from self._array()
        else:
            yield from self._named()

    def _array(self) -> Reading[None]:
        yield from self.next()
        while True:
            yield from self.skip_space()
            yield from self.one_of("{")
            yield from json_call(self)
            self.accept()
            yield from self.skip_space()
            if (yield from self.one_of(",]")) == "]":
                return

    def _named(self) -> Reading[None]:
        name = yield from self._word()
        if (yield from self.peek()) == "[":
            yield from self._marks()
        if name not in self.names:
            raise MalformedError(f"there is no function {name!r}")
        yield from self.skip_space()
        yield from read_arguments(self, name)

    def _word(self) -> Reading[str]:
        word = ""
        while (char := (yield from self.next())) != END and char in _IN_NAME:
            word += char
        if char != END:
            self.unread()
        return word

    def _marks(self) -> Reading[None]:
        """Read ``[ARGS]``. If ``[CALL_ID]`` and an id come before it, drop them."""
        yield from self.expect("[")
        if (yield from self.one_of("AC")) == "A":
            yield from self.expect(ARGUMENTS[2:])
        else:
            yield from self.expect(CALL_ID[2:])
            if len((yield from self._word())) != _ID_LENGTH:
                raise MalformedError("this is not the id of a call")
            yield from self.expect(ARGUMENTS)


_ID_LENGTH = 9


class Mistral(ToolParser):
    """Read and constrain calls in the formats of Mistral."""

    special_tokens = (MARK, ARGUMENTS, CALL_ID)

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """See ``ToolParser``. The template shows which of the formats the model writes."""
        self._marks = Marks(self.special_tokens, context.special_tokens)
        self._named = ARGUMENTS in context.chat_template

    def stream(self, tools: Sequence[Tool]) -> ToolStream:
        """See ``ToolParser``."""
        return _MistralReader(tools, self.new_id)

    def constraint(self, request: ToolRequest, offers: frozenset[Feature]) -> ToolConstraint | None:
        """Constrain the array of calls after the mark. In the newer format, constrain calls with structural tags, or
        the arguments of one function."""
        if not must_enforce(request):
            return None
        if Feature.GRAMMAR_STRUCTURAL_TAG in offers and (self._named or not request.required):
            structures = self._tags(request)
            marks = self._marks.pairs
            required = ConstraintGate(prefix=MARK, prefix_in_grammar=True, marks=marks)
            return ToolConstraint(
                tag_spec(structures, self._marks.write(MARK)),
                required if request.required else ConstraintGate(marks=marks),
            )
        return self._one_named(request, offers) if self._named else self._one_array(request)

    def _tags(self, request: ToolRequest) -> list[dict[str, Any]]:
        write = self._marks.write
        if not self._named:
            return [{"begin": write(MARK), "schema": _array(request), "end": ""}]
        return [
            {"begin": write(f"{MARK}{tool.name}{ARGUMENTS}"), "schema": object_schema(tool), "end": ""}
            for tool in enforced_tools(request)
        ]

    def _one_array(self, request: ToolRequest) -> ToolConstraint:
        gate = ConstraintGate(prefix=MARK) if request.required else ConstraintGate(until=MARK, may_end=True)
        return ToolConstraint(json_spec(_array(request)), gate)

    def _one_named(self, request: ToolRequest, offers: frozenset[Feature]) -> ToolConstraint:
        if not request.required or len(request.tools) != 1:
            what, instead = (SEVERAL, NAME_ONE) if request.required else (STRICT_AUTO, LOOSEN)
            require_feature("mistral", offers, Feature.GRAMMAR_STRUCTURAL_TAG, what, instead)
        tool = request.tools[0]
        return ToolConstraint(json_spec(object_schema(tool)), ConstraintGate(prefix=f"{MARK}{tool.name}{ARGUMENTS}"))

    def new_id(self) -> str:
        """Return nine letters and digits, which Mistral's templates require."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))


def _array(request: ToolRequest) -> dict[str, Any]:
    call = call_schema(enforced_tools(request))
    defs = call.pop("$defs")
    most = {} if request.parallel else {"maxItems": 1}
    return {"type": "array", "items": call, "minItems": 1, **most, "$defs": defs}
