"""What crosses the boundary between a frontend process and the engine process: msgspec structs, encoded as MessagePack.

Requests travel as ``ToEngine`` (one message a frame), answers as ``FromEngine`` (one frame for all that a step made).
"""

from __future__ import annotations

import msgspec

from dovetail.errors import DovetailError, EngineError, QueueFullError, RequestError
from dovetail.sampling_params import SamplingParams
from dovetail.types import FinishReason, TokenLogprob


class GenerateMsg(msgspec.Struct, tag=True, frozen=True):
    """Generate one sequence. ``n > 1`` is expanded by the frontend into n messages that share the prompt.

    ``seed`` is always set (drawn by the frontend where the user gave none), so that a retracted or replayed request
    repeats itself. ``namespace`` keeps prefixes of different adapters and tenants apart, and names of groups and sessions.

    Hints, which change speed and never an answer: requests of one ``group`` have a beginning in common; the first one computes
    it, the others are admitted together when it is cached, and it stays there until ``group_size`` of them were admitted.
    What the last request of a ``session`` has cached stays there for the next one. docs/request.md has the bounds.
    """

    rid: str
    input_ids: list[int]
    params: SamplingParams
    seed: int
    namespace: str = ""
    priority: int = 0
    group: str = ""
    group_size: int = 1
    session: str = ""


class AbortMsg(msgspec.Struct, tag=True, frozen=True):
    """End a request now; it is answered with finish reason ``abort``. Unknown ids are ignored."""

    rid: str
    message: str = "aborted by the client"


class AbortAllMsg(msgspec.Struct, tag=True, frozen=True):
    """End every request now."""

    message: str = "aborted by the operator"


class FlushCacheMsg(msgspec.Struct, tag=True, frozen=True):
    """Drop every cached prefix. Answered with ``CommandReply``; refused while requests are running."""

    call_id: str


class StatsRequestMsg(msgspec.Struct, tag=True, frozen=True):
    """Ask for ``EngineStats`` now."""

    call_id: str


class ShutdownMsg(msgspec.Struct, tag=True, frozen=True):
    """Stop the loop: at once, or after the running requests have finished."""

    drain: bool = True


class TokenOutput(msgspec.Struct, tag=True, frozen=True, gc=False):
    """New tokens of one request. ``finish`` is set in the last one; nothing follows it.

    ``logprobs`` has one entry per new token where the request asked for them; ``prompt_logprobs`` comes once, with the
    first output. ``cached_tokens`` are the prompt tokens found in the prefix cache at admission; ``accepted`` of ``drafted`` tokens
    were accepted so far, in ``verify_steps`` steps (see ``types.Acceptance``); ``grammar_backend`` is the
    one that constrains the output. ``pooled`` is what the prompt was made into (``Pooling``): float32, little-endian.
    """

    rid: str
    token_ids: list[int]
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    drafted: int = 0
    accepted: int = 0
    grammar_backend: str | None = None
    verify_steps: int = 0
    pooled: bytes | None = None


class RequestFailed(msgspec.Struct, tag=True, frozen=True):
    """The request was refused before it ran (status 400 or 503), or its step failed (500)."""

    rid: str
    status: int
    message: str
    code: str = "invalid_request"
    param: str | None = None

    def error(self) -> DovetailError:
        """The exception that it stands for."""
        if self.status == 503:
            return QueueFullError(self.message)
        if self.status >= 500:
            return EngineError(self.message)
        return RequestError(self.message, param=self.param, code=self.code)


class CommandReply(msgspec.Struct, tag=True, frozen=True):
    """The answer to a command message."""

    call_id: str
    ok: bool
    message: str = ""


class EngineStats(msgspec.Struct, tag=True, frozen=True):
    """Gauges and totals of the engine; totals count from its start. Times are seconds."""

    call_id: str = ""
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_pinned: int = 0  # of those cached, what groups and sessions hold
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    retractions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_steps: int = 0  # steps in which drafts were verified
    verify_steps: int = 0  # of each of them, the requests that had drafts
    drafter_errors: int = 0
    jumped_tokens: int = 0
    pins_taken: int = 0
    pins_dropped: int = 0  # given up for want of memory or room within the bound, or never taken for that
    pins_expired: int = 0
    grammar_compiles: int = 0
    grammar_hits: int = 0
    grammar_misses: int = 0
    grammar_refusals: int = 0
    grammar_overruns: int = 0
    grammar_evictions: int = 0
    grammar_cached_bytes: int = 0
    grammar_compile_seconds: float = 0.0
    grammar_requests: dict[str, int] = {}  # by backend
    step_seconds: float = 0.0
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0
    commit_seconds: float = 0.0
    draft_seconds: float = 0.0
    mask_seconds: float = 0.0  # of launch: filling and applying grammar masks
    verify_seconds: float = 0.0  # of launch and wait, in steps in which drafts were asked for


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """Sent once, when the engine can take requests. ``info`` is JSON: model, resolution, memory, device."""

    info: bytes


class EngineFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine process is about to end; ``message`` says why."""

    message: str


ToEngine = GenerateMsg | AbortMsg | AbortAllMsg | FlushCacheMsg | StatsRequestMsg | ShutdownMsg
Answer = TokenOutput | RequestFailed | CommandReply | EngineStats | EngineReady | EngineFailed
FromEngine = list[Answer]

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
