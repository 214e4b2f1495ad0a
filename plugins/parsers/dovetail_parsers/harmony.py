"""Read OpenAI's harmony format as gpt-oss writes it: messages in channels.

An output is ``<|channel|>analysis<|message|>`` reasoning ``<|end|><|start|>assistant<|channel|>final<|message|>``
answer ``<|return|>``. Calls are messages of the commentary channel to a function, ``to=functions.name``, which end with
``<|call|>``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import BaseModel

from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import (
    ConstraintGate,
    ParserContext,
    ReasoningDelta,
    ReasoningParser,
    ReasoningStream,
    Tool,
    ToolConstraint,
    ToolParser,
    ToolRequest,
    ToolStream,
)
from dovetail.sampling_params import GrammarSpec
from dovetail_parsers.calls import CallReader
from dovetail_parsers.jsontext import read_arguments
from dovetail_parsers.marks import Marks, json_block
from dovetail_parsers.reader import END, MalformedError, Reading, TextReader
from dovetail_parsers.schemas import (
    LOOSEN,
    NAME_ONE,
    SEVERAL,
    STRICT_AUTO,
    enforced_tools,
    json_spec,
    lark_spec,
    must_enforce,
    object_schema,
    require_feature,
)

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
MESSAGE_END, CALL_END, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, MESSAGE_END, CALL_END, RETURN)
THINK = f"{CHANNEL}analysis{MESSAGE}"
_LONGEST_HEADER = 200
_TO = r"(?: to=functions\.(?P<{}>[A-Za-z0-9_.-]+))?"
_HEADER = re.compile(
    rf"(?:<\|start\|>assistant{_TO.format('first')})?<\|channel\|>(?P<channel>analysis|commentary|final)"
    rf"{_TO.format('second')} ?(?:(?:<\|constrain\|>)?json)?<\|message\|>"
)


def read_header(reader: TextReader, mark: str) -> Reading[re.Match[str]]:
    """Read the rest of a message header whose first mark, ``mark``, has been read. Raises ``MalformedError``."""
    header = yield from reader.until(MESSAGE, _LONGEST_HEADER)
    found = _HEADER.fullmatch(mark + header + MESSAGE)
    if found is None:
        raise MalformedError("this is not the header of a message")
    return found


def recipient(header: re.Match[str]) -> str | None:
    """Return the function that a message is addressed to; None if there is none."""
    return header["first"] or header["second"]


class _CallsInChannels(CallReader):
    def read(self) -> Reading[None]:
        while (mark := (yield from self.content_until(START, CHANNEL))) != END:
            yield from self.attempt(self._message(mark))

    def _message(self, mark: str) -> Reading[None]:
        name = recipient((yield from read_header(self, mark)))
        if name is None or name not in self.names:
            raise MalformedError(f"there is no function {name!r}")
        yield from self.skip_space()
        yield from read_arguments(self, name)
        yield from self.close(CALL_END)


class GptOssTools(ToolParser):
    """Read and constrain the calls of gpt-oss."""

    special_tokens = MARKS
    call_end = CALL_END

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """See ``ToolParser``."""
        self._marks = Marks(MARKS, context.special_tokens)

    def stream(self, tools: Sequence[Tool]) -> ToolStream:
        """See ``ToolParser``."""
        return _CallsInChannels(tools, self.new_id)

    def constraint(self, request: ToolRequest, offers: frozenset[Feature]) -> ToolConstraint | None:
        """Constrain the messages before the call, and the call. Without Lark, constrain one call of the only function
        after one message of analysis."""
        if not must_enforce(request):
            return None
        if Feature.GRAMMAR_LARK in offers:
            return ToolConstraint(
                self._messages(request), ConstraintGate(marks=self._marks.pairs), covers_reasoning=True
            )
        if not request.required or len(request.tools) != 1:
            what, instead = (SEVERAL, NAME_ONE) if request.required else (STRICT_AUTO, LOOSEN)
            require_feature("gpt_oss", offers, Feature.GRAMMAR_LARK, what, instead)
        tool = request.tools[0]
        gate = ConstraintGate(lead=THINK, until=MESSAGE_END, prefix=f"{START}assistant{_call_header(tool)}")
        return ToolConstraint(json_spec(object_schema(tool)), gate, covers_reasoning=True)

    def _messages(self, request: ToolRequest) -> GrammarSpec:
        """Return a grammar for messages that contain no marks, followed by one call or, if no call is required, by an
        answer."""
        literal = self._marks.literal
        calls = [f"{literal(_call_header(tool))} {json_block(object_schema(tool))}" for tool in enforced_tools(request)]
        answer = [] if request.required else [f"{literal(f'{CHANNEL}final{MESSAGE}')} FREE"]
        heads = " | ".join(literal(f"{CHANNEL}{channel}{MESSAGE}") for channel in ("analysis", "commentary"))
        return lark_spec(
            [
                f"start: (message {literal(f'{START}assistant')})* ({' | '.join(calls + answer)})",
                f"message: ({heads}) part",
                f"part[lazy]: FREE {literal(MESSAGE_END)}",
                *self._marks.terminals(),
            ]
        )


def _call_header(tool: Tool) -> str:
    return f"{CHANNEL}commentary to=functions.{tool.name} {CONSTRAIN}json{MESSAGE}"


class _ChannelStream(TextReader, ReasoningStream):
    """Split an output by its channels: analysis is reasoning, messages to functions are passed on unchanged for the
    tool parser, and the rest is content."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        super().__init__()

    def feed(self, text: str) -> ReasoningDelta:
        """See ``ReasoningStream``."""
        self.push(text)
        return self._take()

    def finish(self) -> ReasoningDelta:
        """See ``ReasoningStream``."""
        self.end()
        return self._take()

    def _take(self) -> ReasoningDelta:
        delta = ReasoningDelta("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return delta

    def read(self) -> Reading[None]:
        """Read messages to the end; text outside of them is content."""
        while (mark := (yield from self.copy_until(self._content.append, START, CHANNEL))) != END:
            try:
                header = yield from read_header(self, mark)
            except MalformedError:
                self._content.append(self.first_of_kept())
                continue
            if recipient(header):
                self._content.append(self.accept())
                continue
            ends = (MESSAGE_END, RETURN)
            sink = self._reasoning if header["channel"] == "analysis" else self._content
            yield from self.copy_until(sink.append, *ends)


class GptOssReasoning(ReasoningParser):
    """Read the reasoning of gpt-oss."""

    special_tokens = MARKS

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """See ``ReasoningParser``."""

    def stream(self, prompt: str) -> ReasoningStream:
        """See ``ReasoningParser``."""
        return _ChannelStream()

    def gate(self, prompt: str) -> ConstraintGate | None:
        """Return a gate that consists of the analysis and the header of the message with the answer."""
        return ConstraintGate(lead=THINK, until=MESSAGE_END, prefix=f"{START}assistant{CHANNEL}final{MESSAGE}")
