"""Describe a request and the phases of its outputs for traces.

Names follow OpenTelemetry's semantic conventions for generative AI; what they do not name begins with ``dovetail.``. There are
counts, times and settings, never text of prompts or outputs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dovetail.api.problems import status_of
from dovetail.interfaces.api import ApiRequest, ChatDelta, ChatReader
from dovetail.sampling_params import PoolingKind, SamplingParams
from dovetail.types import FinishKind, FinishReason

if TYPE_CHECKING:
    from dovetail.server.output_times import OutputTimes
    from dovetail.server.outputs import GrowingChoice, RequestOutputs

Value = str | int | float | bool | Sequence[str]

CLIENT_LEFT = 499
"""The status of a request whose client has left or aborted it."""

MOST_OUTPUTS = 16
"""The number of outputs of a request whose phases have spans."""


class TracedPhase(NamedTuple):
    """Describe a phase of one output. ``start`` and ``end`` are seconds of ``time.perf_counter``."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Value]


class TimedReader:
    """Measure a ``ChatReader``: ``seconds`` is the time that it has taken, and ``first_call`` and ``last_call`` are when it returned
    the first and the latest part of a tool call (0 before)."""

    def __init__(self, reader: ChatReader) -> None:
        self._reader = reader
        self.seconds = self.first_call = self.last_call = 0.0

    @property
    def calls(self) -> int:
        """See ``ChatReader.calls``."""
        return self._reader.calls

    def take(
        self, text: str, finish: FinishReason | None, num_tokens: int
    ) -> tuple[list[ChatDelta], FinishReason | None]:
        """See ``ChatReader.take``."""
        start = time.perf_counter()
        parts, finish = self._reader.take(text, finish, num_tokens)
        end = time.perf_counter()
        self.seconds += end - start
        if any(part.calls for part in parts):
            self.first_call = self.first_call or start
            self.last_call = end
        return parts, finish


def with_timed_reader(request: ApiRequest) -> ApiRequest:
    """Return ``request`` with readers that are ``TimedReader``, if it has readers."""
    make = request.reader
    return request if make is None else replace(request, reader=lambda: TimedReader(make()))


def request_attributes(request: ApiRequest, model: str, tenant: str) -> dict[str, Value]:
    """Return the attributes of a request that is sent to the engine. Several prompts usually have equal settings; those of the
    first are taken."""
    params = request.prompts[0].params
    attributes: dict[str, Value | None] = {
        "gen_ai.operation.name": _operation(request, params),
        "gen_ai.provider.name": "dovetail",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.rid,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.request.max_tokens": params.max_new_tokens or None,
        "gen_ai.request.seed": params.seed,
        "dovetail.prompts": len(request.prompts) if len(request.prompts) > 1 else None,
        "dovetail.tenant": tenant or None,
    }
    if params.max_new_tokens != 0:
        attributes["gen_ai.request.temperature"] = float(params.temperature)
        attributes["gen_ai.request.top_p"] = float(params.top_p)
        attributes["gen_ai.request.top_k"] = params.top_k if params.top_k > 0 else None
        attributes["gen_ai.request.frequency_penalty"] = params.frequency_penalty or None
        attributes["gen_ai.request.presence_penalty"] = params.presence_penalty or None
    return {name: value for name, value in attributes.items() if value is not None}


def _operation(request: ApiRequest, params: SamplingParams) -> str:
    if params.pooling is not None:
        return "score" if params.pooling.kind is PoolingKind.LABELS else "embeddings"
    return "text_completion" if request.continues else "chat"


def response_attributes(outputs: RequestOutputs) -> dict[str, Value]:
    """Return the attributes of outputs that are closed."""
    usage, ttft = outputs.usage, outputs.metrics.ttft
    reasons = [choice.finish.kind.value for choice in outputs.choices if choice.finish is not None]
    attributes: dict[str, Value | None] = {
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.output_tokens": usage.completion + outputs.unread,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning or None,
        "gen_ai.response.finish_reasons": reasons or None,
        "gen_ai.response.time_to_first_chunk": ttft,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def failure_of(outputs: RequestOutputs) -> tuple[str, int] | None:
    """Return the kind of failure that has ended closed outputs, and its HTTP status; None if they have ended regularly."""
    if outputs.error is not None:
        return type(outputs.error).__name__, status_of(outputs.error)
    if not outputs.finished:
        return "client_disconnect", CLIENT_LEFT
    kinds = {choice.finish.kind for choice in outputs.choices if choice.finish is not None}
    return ("abort", CLIENT_LEFT) if FinishKind.ABORT in kinds else None


def phases_of(outputs: RequestOutputs) -> Iterator[TracedPhase]:
    """Yield the phases of the first outputs of a request that is closed. If its client left before the engine has reported on an
    output, it is not known how long this output has waited: it has one phase, ``unanswered``."""
    now = time.perf_counter()
    times = outputs.metrics.times
    for rid, choice in outputs.by_rid[:MOST_OUTPUTS]:
        if rid in times:
            yield from _phases(times[rid], choice, now)
        elif outputs.error is None:
            yield TracedPhase("unanswered", outputs.metrics.arrival, now, {"dovetail.output.index": choice.index})


def _phases(times: OutputTimes, choice: GrowingChoice, now: float) -> Iterator[TracedPhase]:
    index: dict[str, Value] = {"dovetail.output.index": choice.index}
    end = times.end or now
    if times.compiled:
        backend = choice.grammar_backend
        yield TracedPhase(
            "grammar",
            times.arrival,
            times.compiled,
            {**index, **({"dovetail.grammar.backend": backend} if backend is not None else {})},
        )
    yield TracedPhase("queue", times.arrival, times.admitted or end, index)
    if not times.admitted:
        return
    computed = times.prompt_tokens - times.cached_tokens
    yield TracedPhase(
        "prefill",
        times.admitted,
        times.first or end,
        {**index, "gen_ai.usage.input_tokens": times.prompt_tokens, "dovetail.computed_tokens": computed},
    )
    if not times.first:
        return
    drafts = choice.acceptance
    spec = (
        {"dovetail.drafted_tokens": drafts.drafted, "dovetail.accepted_tokens": drafts.accepted}
        if drafts.drafted
        else {}
    )
    yield TracedPhase("decode", times.first, times.last, {**index, "gen_ai.usage.output_tokens": times.tokens, **spec})
    reader = choice.reader
    if isinstance(reader, TimedReader) and reader.first_call:
        parsing = {"dovetail.tool_calls": reader.calls, "dovetail.parse_seconds": reader.seconds}
        yield TracedPhase("tools", reader.first_call, reader.last_call, {**index, **parsing})
