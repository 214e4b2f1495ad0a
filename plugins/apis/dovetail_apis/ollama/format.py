"""Write answers in Ollama's format: one object, or a line for each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from dovetail.api.responses import NDJSON
from dovetail.interfaces.api import ApiProblem, ChatDelta, Choice, Delta, Generation
from dovetail.interfaces.parsers import CallDelta
from dovetail.tokenizer import Tokenizer
from dovetail.types import TokenLogprob
from dovetail_apis.openai.format import chat_logprobs


class OutputParts(NamedTuple):
    """Hold the content, the reasoning and the tool calls of an output or of one step."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[dict[str, Any]] = ()

    def as_chat(self) -> dict[str, Any]:
        """Return the fields of an answer of /api/chat."""
        thinking = {"thinking": self.thinking} if self.thinking else {}
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"message": {"role": "assistant", "content": self.content, **thinking, **calls}}

    def as_text(self) -> dict[str, Any]:
        """Return the fields of an answer of /api/generate."""
        return {"response": self.content, **({"thinking": self.thinking} if self.thinking else {})}


Shape = Callable[[OutputParts], dict[str, Any]]
"""Converts output parts to the fields of an answer."""


@dataclass(slots=True)
class RequestTimes:
    """Record when one request arrived, was submitted, and received its first and last tokens, in nanoseconds of
    ``time.perf_counter_ns``."""

    arrived: int = field(default_factory=time.perf_counter_ns)
    submitted: int = 0
    first: int = 0
    last: int = 0

    def record_step(self) -> None:
        """Record that the engine has just generated tokens."""
        self.last = time.perf_counter_ns()
        self.first = self.first or self.last

    def elapsed(self) -> int:
        """Return the nanoseconds since the request arrived."""
        return time.perf_counter_ns() - self.arrived

    def durations(self, prompt: int, output: int) -> dict[str, int]:
        """Return the times of an answer in nanoseconds, and its token counts ``prompt`` and ``output``.

        ``prompt_eval_duration`` is the time to the first token, including the wait for other requests.
        ``eval_duration`` is the time from the first token to the last. ``load_duration`` is 0, because the model was
        loaded before.
        """
        return {
            "total_duration": self.elapsed(),
            "load_duration": 0,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": self.first - self.submitted,
            "eval_count": output,
            "eval_duration": max(self.last - self.first, 1),  # clients divide by it
        }


def common(model: str) -> dict[str, Any]:
    """Return the fields that every answer has."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


class AnswerFormat:
    """Format the answer to one request, whole or in lines."""

    media_type = NDJSON

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        outputs: Generation,
        times: RequestTimes,
        shape: Shape,
        raw: bool = False,
    ) -> None:
        """Prepare the answer. ``model`` is the model name that the client used. ``raw`` outputs are not parsed: all of
        their text is content."""
        self._model = model
        self._tokenizer = tokenizer
        self._outputs = outputs
        self._times = times
        self._shape = shape
        self._raw = raw
        self._calls = _Calls()

    def whole(self, outputs: Generation) -> object:
        """Return the complete answer."""
        (choice,) = outputs.choices
        output = OutputParts(choice.text) if self._raw else _joined(choice.parts)
        calls = self._calls.add(choice.parts) + self._calls.finish()
        return {
            **common(self._model),
            **self._shape(output._replace(calls=calls)),
            **self._logprobs(choice.visible_logprobs),
            **self._done(choice),
        }

    async def run(self) -> None:
        """Wait until the output has ended, and record the times of its steps."""
        async for _ in self._outputs:
            self._times.record_step()

    def head(self) -> bytes:
        """Return nothing: the stream begins with the first output."""
        return b""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return one line for each delta that adds something to the answer."""
        self._times.record_step()
        return b"".join(self._delta(delta) for delta in deltas)

    def tail(self) -> bytes:
        """Return the last line, with the finish reason, token counts and times."""
        return self._line(OutputParts(), self._done(self._outputs.choices[0]))

    def failed(self, problem: ApiProblem) -> bytes:
        """Return the error as a line."""
        return msgspec.json.encode({"error": problem.message}) + b"\n"

    def _delta(self, delta: Delta) -> bytes:
        output = OutputParts(delta.text) if self._raw else _joined(delta.parts)
        calls = self._calls.add(delta.parts)
        if delta.finish is not None:
            calls += self._calls.finish()
        output, logprobs = output._replace(calls=calls), self._logprobs(delta.logprobs)
        return self._line(output, {**logprobs, "done": False}) if any(output) or logprobs else b""

    def _line(self, output: OutputParts, more: dict[str, Any]) -> bytes:
        return msgspec.json.encode({**common(self._model), **self._shape(output), **more}) + b"\n"

    def _done(self, choice: Choice) -> dict[str, Any]:
        assert choice.finish is not None
        usage = self._outputs.usage
        reason = choice.finish.kind.value
        return {"done": True, "done_reason": reason, **self._times.durations(usage.prompt, usage.completion)}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": chat_logprobs(self._tokenizer, entries)["content"]} if entries else {}


class _Calls:
    """Collect tool calls, which Ollama's format sends only when they are complete."""

    def __init__(self) -> None:
        self._open: CallDelta | None = None

    def add(self, parts: Iterable[ChatDelta]) -> list[dict[str, Any]]:
        """Add ``parts``, and return the calls that have ended before the last of them."""
        done: list[dict[str, Any]] = []
        for part in parts:
            if not part.calls:
                done += self.finish()
            for call in part.calls:
                if call.id is not None:
                    done += self.finish()
                    self._open = call
                else:
                    assert self._open is not None
                    self._open = replace(self._open, arguments=self._open.arguments + call.arguments)
        return done

    def finish(self) -> list[dict[str, Any]]:
        """Return the last call if it is complete. The arguments of a call that broke off cannot be written as an
        object, so it is left out."""
        call, self._open = self._open, None
        if call is None:
            return []
        try:
            arguments = msgspec.json.decode(call.arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            return []
        return [{"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}]


def _joined(parts: Iterable[ChatDelta]) -> OutputParts:
    """Return the content and the reasoning of ``parts``, without calls."""
    parts = list(parts)
    return OutputParts("".join(part.content for part in parts), "".join(part.reasoning for part in parts))
