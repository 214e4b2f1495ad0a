"""Collect the output of one generated sequence and, for a chat, its reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.chat.calls import whole_calls
from dovetail.errors import EngineError
from dovetail.generation.collecting import collect
from dovetail.interfaces.api import Acceptance
from dovetail.messages import GenerateMsg, RequestFailed, TokenOutput
from dovetail.tokenizer import IncrementalDetokenizer, Tokenizer
from dovetail.types import FinishKind, FinishReason, FloatArray, TokenLogprob

if TYPE_CHECKING:
    from dovetail.chat.reading import OutputReader
    from dovetail.interfaces.api import ChatDelta


@dataclass(slots=True)
class Output:
    """Hold one generated sequence. It grows, and is final once ``finish`` is set. ``pooled`` is the vector that the prompt was
    pooled into, if its params have pooling. ``cached_tokens`` are the prompt tokens found in the prefix cache; if the model
    has several cache groups, ``cached_groups`` are those that each group alone had."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    grammar_backend: str | None = None
    pooled: FloatArray | None = None
    cached_groups: tuple[int, ...] = ()

    @property
    def drafted(self) -> int:
        """Return the number of draft tokens that were verified."""
        return self.acceptance.drafted

    @property
    def accepted(self) -> int:
        """Return the number of draft tokens that were accepted."""
        return self.acceptance.accepted

    @property
    def verify_steps(self) -> int:
        """Return the number of steps in which drafts of the sequence were verified."""
        return self.acceptance.steps


@dataclass(slots=True)
class ChatOutput(Output):
    """Hold an answer of a chat. ``text`` is everything that the model generated; ``content``, ``reasoning_content`` and
    ``tool_calls`` (in OpenAI's format) are its parts."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """Return the answer as an assistant message, for the next turn of the chat."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **calls}


class Run:
    """Collect the outputs of one sequence. The run is appended to ``ended`` once it has its ``output.finish`` or its ``error``.
    ``stopped`` is True if the reader of a chat has ended the sequence; the engine still computes it then, and the caller must
    abort it. ``parts`` holds what that reader has found."""

    def __init__(self, msg: GenerateMsg, tokenizer: Tokenizer | None) -> None:
        self.msg = msg
        self.output = Output(list(msg.input_ids))
        self.error: Exception | None = None
        self.ended: list[Run] = []
        self.parts: list[ChatDelta] = []
        self.stopped = False
        self._reader: OutputReader | None = None
        self._fresh: list[str] = []
        self._detokenizer = tokenizer and IncrementalDetokenizer.for_params(tokenizer, msg.params)

    def read_with(self, reader: OutputReader) -> None:
        """Make the output a ``ChatOutput``, whose text ``reader`` divides into parts. Call this before the first ``take``."""
        self.output, self._reader = ChatOutput(self.output.prompt_ids), reader

    def take(self, answer: TokenOutput | RequestFailed) -> None:
        """Add an output or a failure that the engine reported."""
        if isinstance(answer, RequestFailed):
            self.error = answer.error()
            return
        text, _, parts = collect(self.output, answer, self._detokenizer, self._reader)
        if text:
            self._fresh.append(text)
        if self._reader is not None:
            self.parts += parts
            self.stopped = answer.finish is None and self.output.finish is not None
        if answer.finish is not None and answer.finish.kind is FinishKind.ERROR:
            self.error = EngineError(answer.finish.message or "the request failed")

    def take_fresh(self) -> str:
        """Return the text that has arrived since the last call."""
        text = "".join(self._fresh)
        self._fresh.clear()
        return text


def chat_output(run: Run) -> ChatOutput:
    """Return the output of a chat's run with its parts filled in."""
    output = run.output
    assert isinstance(output, ChatOutput)
    output.content = "".join(part.content for part in run.parts)
    output.reasoning_content = "".join(part.reasoning for part in run.parts)
    output.tool_calls = whole_calls([call for part in run.parts for call in part.calls])
    return output


class ChatStream:
    """Stream the answer of a chat. It can be iterated once and yields what each step added. Iterating over ``pieces`` drives
    the run."""

    def __init__(self, run: Run, pieces: Generator[str, None, None]) -> None:
        self._run = run
        self._pieces = pieces

    def __iter__(self) -> Iterator[ChatDelta]:
        shown = 0
        for _ in self._pieces:
            while shown < len(self._run.parts):  # more may arrive while the caller reads another stream
                shown += 1
                yield self._run.parts[shown - 1]
        yield from self._run.parts[shown:]

    @property
    def output(self) -> ChatOutput:
        """Return the answer so far; it is complete once it has a ``finish``."""
        return chat_output(self._run)

    def close(self) -> None:
        """Abort the request if it has not ended."""
        self._pieces.close()
