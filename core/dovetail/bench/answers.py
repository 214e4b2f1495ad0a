"""Collect the answer to a call while it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dovetail.bench.prompts import CallPrompt
from dovetail.bench.records import LoadCall, Measurement


class RunClock(Protocol):
    """Return the seconds since the start of the run."""

    def __call__(self) -> float:
        """Return the time now."""
        ...


@dataclass(slots=True)
class CallProgress:
    """Hold what has arrived of an answer so far. ``records.Measurement`` describes the fields."""

    sent: float = 0.0
    end: float = 0.0
    token_times: list[float] = field(default_factory=list)
    error: str | None = None
    text: str = ""
    output_ids: list[int] | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str | None = None
    drafted: int | None = None
    accepted: int | None = None
    verify_steps: int | None = None

    def measurement(self, call: LoadCall, due: float) -> Measurement:
        """Return the measurement of ``call``, which was due at ``due``."""
        return Measurement(
            id=call.id,
            group=call.group,
            ok=self.error is None,
            error=self.error,
            due=due,
            sent=self.sent,
            end=self.end,
            token_times=tuple(self.token_times),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            output_ids=None if self.output_ids is None else tuple(self.output_ids),
            text=self.text,
            finish_reason=self.finish_reason,
            drafted=self.drafted,
            accepted=self.accepted,
            verify_steps=self.verify_steps,
        )


class Sender(Protocol):
    """Make a call and wait for the end of its answer. A failure is reported in the ``error`` of the answer and not
    raised."""

    async def __call__(self, call: LoadCall, prompt: CallPrompt, clock: RunClock) -> CallProgress:
        """Send the call now and return its answer."""
        ...
