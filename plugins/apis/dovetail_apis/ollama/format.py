"""Answers in Ollama's format: one object, or a line for each step."""

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


class Said(NamedTuple):
    """What an output, or a step of it, says."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[dict[str, Any]] = ()

    def as_chat(self) -> dict[str, Any]:
        """The fields of an answer of /api/chat."""
        thinking = {"thinking": self.thinking} if self.thinking else {}
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"message": {"role": "assistant", "content": self.content, **thinking, **calls}}

    def as_text(self) -> dict[str, Any]:
        """The fields of an answer of /api/generate."""
        return {"response": self.content, **({"thinking": self.thinking} if self.thinking else {})}


Shape = Callable[[Said], dict[str, Any]]
"""The fields that say what was said."""


@dataclass(slots=True)
class Clock:
    """When things happened to one request, in nanoseconds of ``time.perf_counter_ns``."""

    arrived: int = field(default_factory=time.perf_counter_ns)
    submitted: int = 0
    first: int = 0
    last: int = 0

    def step(self) -> None:
        """The engine has made tokens."""
        self.last = time.perf_counter_ns()
        self.first = self.first or self.last

    def passed(self) -> int:
        """Nanoseconds since the request arrived."""
        return time.perf_counter_ns() - self.arrived

    def durations(self, prompt: int, output: int) -> dict[str, int]:
        """The times of an answer in nanoseconds, and its token counts. The time of the prompt is that to the first token, with
        the wait for other requests; the output's is that of the others. The model was loaded before."""
        return {
            "total_duration": self.passed(),
            "load_duration": 0,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": self.first - self.submitted,
            "eval_count": output,
            "eval_duration": max(self.last - self.first, 1),  # clients divide by it
        }


def common(model: str) -> dict[str, Any]:
    """What every answer has."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


class AnswerFormat:
    """The answer to one request, whole or in lines."""

    media_type = NDJSON

    def __init__(
        self, model: str, tokenizer: Tokenizer, outputs: Generation, clock: Clock, shape: Shape, raw: bool = False
    ) -> None:
        """``model`` is the name that the client used. The text of ``raw`` outputs is nothing but content."""
        self._model = model
        self._tokenizer = tokenizer
        self._outputs = outputs
        self._clock = clock
        self._shape = shape
        self._raw = raw
        self._calls = _Calls()

    def whole(self, outputs: Generation) -> object:
        """The answer at once."""
        (choice,) = outputs.choices
        said = Said(choice.text) if self._raw else _joined(choice.parts)
        calls = self._calls.add(choice.parts) + self._calls.finish()
        return {
            **common(self._model),
            **self._shape(said._replace(calls=calls)),
            **self._logprobs(choice.visible_logprobs),
            **self._done(choice),
        }

    async def run(self) -> None:
        """Until the output has ended."""
        async for _ in self._outputs:
            self._clock.step()

    def head(self) -> bytes:
        """Nothing."""
        return b""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """One line for each step that says something."""
        self._clock.step()
        return b"".join(self._delta(delta) for delta in deltas)

    def tail(self) -> bytes:
        """Why it ended, token counts and times."""
        return self._line(Said(), self._done(self._outputs.choices[0]))

    def failed(self, problem: ApiProblem) -> bytes:
        """The error, as a line."""
        return msgspec.json.encode({"error": problem.message}) + b"\n"

    def _delta(self, delta: Delta) -> bytes:
        said = Said(delta.text) if self._raw else _joined(delta.parts)
        calls = self._calls.add(delta.parts)
        if delta.finish is not None:
            calls += self._calls.finish()
        said, logprobs = said._replace(calls=calls), self._logprobs(delta.logprobs)
        return self._line(said, {**logprobs, "done": False}) if any(said) or logprobs else b""

    def _line(self, said: Said, more: dict[str, Any]) -> bytes:
        return msgspec.json.encode({**common(self._model), **self._shape(said), **more}) + b"\n"

    def _done(self, choice: Choice) -> dict[str, Any]:
        assert choice.finish is not None
        usage = self._outputs.usage
        reason = choice.finish.kind.value
        return {"done": True, "done_reason": reason, **self._clock.durations(usage.prompt, usage.completion)}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": chat_logprobs(self._tokenizer, entries)["content"]} if entries else {}


class _Calls:
    """Tool calls, which are told whole."""

    def __init__(self) -> None:
        self._open: CallDelta | None = None

    def add(self, parts: Iterable[ChatDelta]) -> list[dict[str, Any]]:
        """The calls that have ended before the last of ``parts``."""
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
        """The last call, if it is whole: one that broke off has no arguments that could be an object."""
        call, self._open = self._open, None
        if call is None:
            return []
        try:
            arguments = msgspec.json.decode(call.arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            return []
        return [{"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}]


def _joined(parts: Iterable[ChatDelta]) -> Said:
    """Without calls."""
    parts = list(parts)
    return Said("".join(part.content for part in parts), "".join(part.reasoning for part in parts))
