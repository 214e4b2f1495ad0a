"""Split the output of a chat as it grows into reasoning, content and tool calls, and find stop strings outside of
calls."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from dovetail.interfaces.api import ChatDelta
from dovetail.interfaces.parsers import CallDelta, ReasoningStream, ToolDelta, ToolStream
from dovetail.tokenizer.stops import StopCutter
from dovetail.types import FinishKind, FinishReason

if TYPE_CHECKING:
    from dovetail.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Stops:
    """Describe stop strings and stop expressions that apply to reasoning and content and not inside of calls, once the output has
    ``min_tokens`` tokens."""

    texts: tuple[str, ...]
    include: bool = False
    min_tokens: int = 0
    regexes: tuple[str, ...] = ()

    @classmethod
    def of(cls, params: SamplingParams) -> Stops | None:
        """Return the stop strings of a request; None if it has none."""
        if not (params.stop or params.stop_regex):
            return None
        return cls(params.stop, params.include_stop, params.min_new_tokens, params.stop_regex)

    def cutter(self) -> StopCutter:
        """Return a new cutter for one text."""
        return StopCutter(self.texts, self.include, self.regexes)


class OutputReader:
    """Read one output: pass its text through the reasoning stream and then through the tool stream, if there are such
    streams.

    With ``single``, calls after the first one are left out. Everything after a stop string is left out. ``calls`` is
    the number of tool calls so far.
    """

    def __init__(
        self, reasoning: ReasoningStream | None, tools: ToolStream | None, single: bool, stops: Stops | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._single = single
        self._min_tokens = stops.min_tokens if stops else 0
        self._cutters = (stops.cutter(), stops.cutter()) if stops else None  # for reasoning, for content
        self.calls = 0

    @property
    def stopped(self) -> str | None:
        """Return the stop string that has ended the output; None if there is none."""
        return next((cutter.matched for cutter in self._cutters or () if cutter.matched is not None), None)

    def take(
        self, text: str, finish: FinishReason | None, num_tokens: int
    ) -> tuple[list[ChatDelta], FinishReason | None]:
        """See ``ChatReader.take``."""
        parts = [self.feed(text, num_tokens >= self._min_tokens)]
        if finish is not None or self.stopped is not None:
            parts.append(self.finish())
        if self.stopped is not None:
            finish = FinishReason(FinishKind.STOP, self.stopped)
        return [part for both in parts for part in _in_order(both) if any(part)], finish

    def feed(self, text: str, may_stop: bool = True) -> ChatDelta:
        """Add text and return what is final now. Stop strings are found only with ``may_stop``."""
        if self._cutters is None:
            return self._parsed(text)
        delta = ChatDelta()
        for char in text:  # one by one, because the order of content and calls matters
            if self.stopped is None:
                delta = _joined(delta, self._cut(self._parsed(char), may_stop))
        return delta

    def finish(self) -> ChatDelta:
        """Return what was held back. Call it once, after the last text."""
        if self.stopped is not None:
            return ChatDelta()
        reasoning, content = self._reasoning.finish() if self._reasoning else ("", "")
        delta = self._called(reasoning, [self._tools.feed(content), self._tools.finish()] if self._tools else content)
        if self._cutters is None:
            return delta
        delta = self._cut(delta, True)
        if self.stopped is None:
            held = [cutter.finish() for cutter in self._cutters]
            delta = _joined(delta, ChatDelta(held[0], held[1]))
        return delta

    def _parsed(self, text: str) -> ChatDelta:
        reasoning, content = self._reasoning.feed(text) if self._reasoning else ("", text)
        return self._called(reasoning, [self._tools.feed(content)] if self._tools and content else content)

    def _called(self, reasoning: str, found: list[ToolDelta] | str) -> ChatDelta:
        if isinstance(found, str):
            return ChatDelta(reasoning, found)
        calls = tuple(call for delta in found for call in delta.calls if not (self._single and call.index))
        self.calls = max([self.calls, *(call.index + 1 for call in calls)])
        return ChatDelta(reasoning, "".join(delta.content for delta in found), calls)

    def _cut(self, delta: ChatDelta, may_stop: bool) -> ChatDelta:
        """Return ``delta`` up to the first stop string in it. If a character completes both content and the beginning
        of a call, the call comes after the content."""
        assert self._cutters is not None
        before = self.calls - sum(call.id is not None for call in delta.calls)
        reasoning = self._cutters[0].feed(delta.reasoning, may_stop)
        if delta.content and self.stopped is None:
            reasoning += self._cutters[0].finish()
        content = self._cutters[1].feed(delta.content, may_stop) if self.stopped is None else ""
        calls = delta.calls
        if self.stopped is not None:
            self.calls = before
            calls = tuple(call for call in calls if call.index < before)
        elif any(call.id is not None for call in calls):
            content += self._cutters[1].finish()
        return ChatDelta(reasoning, content, calls)


def _in_order(delta: ChatDelta) -> list[ChatDelta]:
    """Split ``delta`` into parts that are in the order of the output. A step of several tokens may hold the end of a
    call and the content after it: the end of the call comes first. A new call comes after the content."""
    further = tuple(takewhile(lambda call: call.id is None, delta.calls))
    return [ChatDelta(calls=further), delta._replace(calls=delta.calls[len(further) :])]


def _joined(a: ChatDelta, b: ChatDelta) -> ChatDelta:
    calls = list(a.calls)
    for call in b.calls:
        if calls and call.id is None and calls[-1].index == call.index:
            last = calls[-1]
            calls[-1] = CallDelta(last.index, last.id, last.name, last.arguments + call.arguments)
        else:
            calls.append(call)
    return ChatDelta(a.reasoning + b.reasoning, a.content + b.content, tuple(calls))
