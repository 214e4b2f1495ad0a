"""One generated sequence: its output as it grows, and what a chat's turned out to be."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.chat.calls import whole_calls
from dovetail.errors import EngineError
from dovetail.messages import GenerateMsg, RequestFailed, TokenOutput
from dovetail.ops.vectors import from_bytes
from dovetail.tokenizer import IncrementalDetokenizer, Tokenizer
from dovetail.types import Acceptance, FinishKind, FinishReason, FloatArray, TokenLogprob

if TYPE_CHECKING:
    from dovetail.chat.reading import OutputReader
    from dovetail.interfaces.api import ChatDelta


@dataclass(slots=True)
class Output:
    """One generated sequence. ``text`` grows, and the rest is final once ``finish`` is set."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    drafted: int = 0
    accepted: int = 0
    verify_steps: int = 0
    grammar_backend: str | None = None
    pooled: FloatArray | None = None  # what the prompt was made into, where params have pooling

    @property
    def acceptance(self) -> Acceptance:
        """What came of the drafts, where there were any."""
        return Acceptance(self.drafted, self.accepted, self.verify_steps)


@dataclass(slots=True)
class ChatOutput(Output):
    """An answer of a chat. ``text`` is all that the model wrote; ``content``, ``reasoning_content`` and ``tool_calls`` (in
    OpenAI's form) are what it turned out to be."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, for the next turn of the conversation."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **calls}


class Run:
    """One sequence being generated. ``ended`` is where it is put once it has its ``output.finish`` or its ``error``;
    ``stopped`` if its ``reader`` has ended it and not the engine. ``parts`` are what the reader has found."""

    def __init__(self, msg: GenerateMsg, tokenizer: Tokenizer | None) -> None:
        self.msg = msg
        self.output = Output(list(msg.input_ids))
        self.error: Exception | None = None
        self.ended: list[Run] = []
        self.reader: OutputReader | None = None
        self.parts: list[ChatDelta] = []
        self.stopped = False
        self._fresh: list[str] = []
        self._detokenizer = tokenizer and IncrementalDetokenizer.for_params(tokenizer, msg.params)

    def take(self, answer: TokenOutput | RequestFailed) -> None:
        """Add what the engine sent."""
        if isinstance(answer, RequestFailed):
            self.error = answer.error()
            return
        output = self.output
        output.token_ids += answer.token_ids
        output.finish, output.cached_tokens = answer.finish, answer.cached_tokens
        output.drafted, output.accepted, output.verify_steps = answer.drafted, answer.accepted, answer.verify_steps
        output.grammar_backend = answer.grammar_backend or output.grammar_backend
        output.logprobs += answer.logprobs or []
        if answer.prompt_logprobs is not None:
            output.prompt_logprobs = answer.prompt_logprobs
        output.pooled = from_bytes(answer.pooled) if answer.pooled is not None else output.pooled
        if answer.finish is not None and answer.finish.kind is FinishKind.ERROR:
            self.error = EngineError(answer.finish.message or "the request failed")
        if self._detokenizer is not None:
            text, _ = self._detokenizer.take(answer)
            output.text += text
            self._fresh.append(text)
            if self.reader is not None:
                self._read(self.reader, text, answer.finish)

    def _read(self, reader: OutputReader, text: str, finish: FinishReason | None) -> None:
        parts, self.output.finish = reader.take(text, finish, len(self.output.token_ids))
        self.stopped = finish is None and self.output.finish is not None
        self.parts += parts

    def take_fresh(self) -> str:
        """The text since the last call."""
        text = "".join(self._fresh)
        self._fresh.clear()
        return text


def chat_output(run: Run) -> ChatOutput:
    """The output of a chat's run that has ended, taken apart."""
    output = run.output
    assert isinstance(output, ChatOutput)
    output.content = "".join(part.content for part in run.parts)
    output.reasoning_content = "".join(part.reasoning for part in run.parts)
    output.tool_calls = whole_calls([call for part in run.parts for call in part.calls])
    return output


class ChatStream:
    """An answer of a chat while it is written: iterate once, for what each step added. ``pieces`` drives the run."""

    def __init__(self, run: Run, pieces: Generator[str, None, None]) -> None:
        self._run = run
        self._pieces = pieces

    def __iter__(self) -> Iterator[ChatDelta]:
        shown = 0
        for _ in self._pieces:
            while shown < len(self._run.parts):  # more may come while the reader is elsewhere, reading another stream
                shown += 1
                yield self._run.parts[shown - 1]
        yield from self._run.parts[shown:]

    @property
    def output(self) -> ChatOutput:
        """The answer so far; whole once it has a ``finish``."""
        return chat_output(self._run)

    def close(self) -> None:
        """Abort what has not ended."""
        self._pieces.close()
