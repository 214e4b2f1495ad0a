"""Read reasoning between ``<think>`` and ``</think>``, which comes before the answer."""

from __future__ import annotations

import enum
import re

from pydantic import BaseModel

from dovetail.interfaces.parsers import ConstraintGate, ParserContext, ReasoningDelta, ReasoningParser, ReasoningStream
from dovetail_parsers.reader import overlap

OPEN, CLOSE = "<think>", "</think>"
_OPENS = re.compile(r"""<think>(\\n|\s)*['"]\s*-?\}\}""")
"""Match the end of a template that ends prompts with ``<think>``."""


class ThinkState(enum.Enum):
    """Identify the part of an output that the text has reached."""

    UNDECIDED = enum.auto()  # nothing but whitespace so far: reasoning or answer may begin
    THINKING = enum.auto()
    ANSWER = enum.auto()


def state_after(prompt: str, otherwise: ThinkState) -> ThinkState:
    """Return the state in which an output begins: the state after the mark at the end of the prompt, or ``otherwise``
    if there is no mark."""
    tail = prompt.rstrip()
    if tail.endswith(OPEN):
        return ThinkState.THINKING
    return ThinkState.ANSWER if tail.endswith(CLOSE) else otherwise


class ThinkStream(ReasoningStream):
    """Read an output that begins in ``state``. ``<think>`` at its beginning is a mark, even if the prompt ends with
    one."""

    def __init__(self, state: ThinkState) -> None:
        self._state = state
        self._at_start = state is not ThinkState.ANSWER
        self._held = ""  # text that may belong to a mark, or whitespace that may be next to one
        self._skip_space = state is ThinkState.ANSWER

    def feed(self, text: str) -> ReasoningDelta:
        """See ``ReasoningStream``."""
        reasoning = ""
        if self._at_start:
            text = self._start(text)
        if self._state is ThinkState.THINKING and not self._at_start:
            reasoning, text = self._think(text)
        return ReasoningDelta(reasoning, self._answer(text) if self._state is ThinkState.ANSWER else "")

    def finish(self) -> ReasoningDelta:
        """See ``ReasoningStream``."""
        held, self._held = self._held, ""
        if self._state is ThinkState.THINKING:
            return ReasoningDelta(reasoning=held)
        return ReasoningDelta(content=held)

    def _start(self, text: str) -> str:
        """Look for ``<think>`` as the first word. Return the text that is left to read once that is decided, else
        ""."""
        self._held += text
        word = self._held.lstrip()
        if OPEN.startswith(word):
            return ""
        self._at_start = False
        text, self._held = self._held, ""
        if word.startswith(OPEN):
            self._state = ThinkState.THINKING
            return word.removeprefix(OPEN).lstrip() or self._strip_later()
        if self._state is ThinkState.UNDECIDED:
            self._state = ThinkState.ANSWER
            return text
        return word

    def _strip_later(self) -> str:
        self._skip_space = True
        return ""

    def _think(self, text: str) -> tuple[str, str]:
        """Return the reasoning up to ``</think>``, and the text after that."""
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        reasoning, mark, answer = (self._held + text).partition(CLOSE)
        if mark:
            self._state, self._held, self._skip_space = ThinkState.ANSWER, "", True
            return reasoning.rstrip(), answer
        # whitespace and the beginning of a mark at the end are held back
        sure = len(reasoning[: len(reasoning) - overlap(reasoning, CLOSE)].rstrip())
        self._held = reasoning[sure:]
        return reasoning[:sure], ""

    def _answer(self, text: str) -> str:
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        return text


class Qwen3(ReasoningParser):
    """Read the output of a model that may reason or not."""

    special_tokens = (OPEN, CLOSE)
    opening = OPEN
    otherwise = ThinkState.UNDECIDED

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """See ``ReasoningParser``."""
        self._prompt_opens = bool(_OPENS.search(context.chat_template))

    def stream(self, prompt: str) -> ReasoningStream:
        """See ``ReasoningParser``."""
        return ThinkStream(state_after(prompt, self.otherwise))

    def gate(self, prompt: str) -> ConstraintGate | None:
        """See ``ReasoningParser``. If the model's template opens the reasoning and the prompt does not, the model does
        not reason. Other models may open the reasoning themselves."""
        state = state_after(prompt, self.otherwise)
        if state is ThinkState.THINKING:
            return ConstraintGate(until=CLOSE)
        if state is ThinkState.ANSWER or self._prompt_opens:
            return None
        return ConstraintGate(lead=OPEN, optional=True, until=CLOSE)


class DeepseekR1(Qwen3):
    """Read the output of a model that always reasons first."""

    otherwise = ThinkState.THINKING
