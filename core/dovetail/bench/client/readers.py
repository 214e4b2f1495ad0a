"""Read answers in the form of each API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from dovetail.bench.answers import CallProgress
from dovetail.bench.client.events import DONE


class EventReader(Protocol):
    """Read the events of one answer."""

    def take(self, events: Sequence[bytes], now: float, answer: CallProgress) -> None:
        """Take events that arrived together. Raises ``msgspec.DecodeError`` for an invalid answer."""
        ...

    def finish(self, answer: CallProgress) -> None:
        """Complete the answer after its last event."""
        ...


class _Message(msgspec.Struct):
    message: str = ""


_Failure = _Message | str | None


def _text(error: _Message | str) -> str:
    return error if isinstance(error, str) else error.message


class _Count(msgspec.Struct):
    completion_tokens: int = 0


class _Progress(msgspec.Struct):
    meta_info: _Count = msgspec.field(default_factory=_Count)
    error: _Failure = None


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: dict[str, Any] | None = None
    spec_draft_token_num: int | None = None
    spec_accept_token_num: int | None = None
    spec_verify_ct: int | None = None


class _Whole(msgspec.Struct):
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    text: str = ""
    output_ids: list[int] | None = None


_progress = msgspec.json.Decoder(_Progress).decode
_whole = msgspec.json.Decoder(_Whole).decode


class NativeReader:
    """Read the events of /generate.

    Every event contains the whole answer so far. Therefore the last of several events that arrived together is
    sufficient, and only the very last event is decoded in full.
    """

    def __init__(self) -> None:
        self._last = b""

    def take(self, events: Sequence[bytes], now: float, answer: CallProgress) -> None:
        """Count the tokens of the last event."""
        found = [event for event in events if event != DONE]
        if not found:
            return
        progress = _progress(found[-1])
        if progress.error is not None:
            answer.error = _text(progress.error)
            return
        self._last = found[-1]
        answer.token_times += [now] * (progress.meta_info.completion_tokens - len(answer.token_times))

    def finish(self, answer: CallProgress) -> None:
        """Decode the last event."""
        if not self._last:
            return
        last = _whole(self._last)
        meta = last.meta_info
        answer.text, answer.output_ids = last.text, last.output_ids
        answer.prompt_tokens, answer.output_tokens = meta.prompt_tokens, meta.completion_tokens
        answer.cached_tokens = meta.cached_tokens
        answer.drafted, answer.accepted = meta.spec_draft_token_num, meta.spec_accept_token_num
        answer.verify_steps = meta.spec_verify_ct
        reason = meta.finish_reason or {}
        answer.finish_reason = reason.get("type")
        if answer.finish_reason in ("abort", "error"):
            answer.error = f"{answer.finish_reason}: {reason.get('message')}"


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None

    def text(self) -> str:
        calls = [call.function for call in self.tool_calls or ()]
        called = "".join(f"{call.name or ''}{call.arguments or ''}" for call in calls)
        return f"{self.reasoning_content or ''}{self.content or ''}{called}"


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Speculation(msgspec.Struct):
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    speculation: _Speculation | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Failure = None


_chunk = msgspec.json.Decoder(_Chunk).decode


class OpenAIReader:
    """Read chunks of chats and completions.

    A chunk with text counts as one token, because chunks do not contain the number of their tokens. The usage at the
    end contains the correct number.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._usage: _Usage | None = None

    def take(self, events: Sequence[bytes], now: float, answer: CallProgress) -> None:
        """Collect text and usage."""
        for event in events:
            if event == DONE:
                continue
            chunk = _chunk(event)
            if chunk.error is not None:
                answer.error = _text(chunk.error)
            self._usage = chunk.usage or self._usage
            for choice in chunk.choices:
                self._choice(choice, now, answer)

    def _choice(self, choice: _Choice, now: float, answer: CallProgress) -> None:
        text = choice.text or (choice.delta.text() if choice.delta is not None else "")
        if text:
            answer.token_times.append(now)
            self._texts.append(text)
        answer.finish_reason = choice.finish_reason or answer.finish_reason

    def finish(self, answer: CallProgress) -> None:
        """Join the text, and take the counts from the usage."""
        answer.text = "".join(self._texts)
        answer.output_tokens = len(answer.token_times)
        if answer.finish_reason in ("abort", "error"):
            answer.error = answer.error or f"the answer ended with {answer.finish_reason!r}"
        if self._usage is None:
            return
        usage, details, drafts = self._usage, self._usage.prompt_tokens_details, self._usage.speculation
        answer.prompt_tokens, answer.output_tokens = usage.prompt_tokens, usage.completion_tokens
        answer.cached_tokens = details.cached_tokens if details is not None else None
        if drafts is not None:
            answer.drafted, answer.accepted = drafts.drafted_tokens, drafts.accepted_tokens
            answer.verify_steps = drafts.verify_steps
