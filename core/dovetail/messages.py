"""Define the messages between a frontend process and the engine process: msgspec structs, encoded as MessagePack.

Requests travel as ``ToEngine``, one message per frame. Answers travel as ``FromEngine``, one frame for all answers of a
step.
"""

from __future__ import annotations

import msgspec

from dovetail.errors import DovetailError, EngineError, GrammarError, QueueFullError, RequestError
from dovetail.sampling_params import SamplingParams
from dovetail.types import FinishReason, TokenLogprob


class GenerateMsg(msgspec.Struct, tag=True, frozen=True):
    """Generate one sequence. The frontend expands ``n > 1`` into n messages that share the prompt.

    ``seed`` is always set, so that a retracted or replayed request produces the same output; the frontend draws it if
    the user gave none. ``namespace`` separates the cached prefixes of different adapters and tenants, and the names of
    groups and sessions.

    ``group`` and ``session`` are hints. They change speed and never an output. Requests of one ``group`` have a common
    beginning. The first one computes it; the others are admitted together when it is cached, and it stays cached until
    ``group_size`` of them have been admitted. What the last request of a ``session`` has cached stays cached for the
    next request of the session. docs/request.md documents the limits.

    Requests of different ``tenant``s take turns, in proportion to their ``weight``. ``adapter`` is the name of an adapter
    (LoRA), or empty. The request waits until it is on the device. An adapter that the engine does not know, because it was
    started again, is read from ``adapter_directory``, unless that is empty. ``adapter_param`` is the request field that names
    the adapter, for errors. ``accepted`` means that the server has let the request wait already, so that the engine does not refuse
    it because its queue is full.
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
    tenant: str = ""
    weight: float = 1.0
    adapter: str = ""
    adapter_directory: str = ""
    adapter_param: str = "model"
    accepted: bool = False


class AbortMsg(msgspec.Struct, tag=True, frozen=True):
    """End a request now. It is answered with finish reason ``abort``. Unknown ids are ignored."""

    rid: str
    message: str = "aborted by the client"


class AbortAllMsg(msgspec.Struct, tag=True, frozen=True):
    """End every request now."""

    message: str = "aborted by the operator"


class FlushCacheMsg(msgspec.Struct, tag=True, frozen=True):
    """Drop every cached prefix. The engine answers with ``CommandReply``, whose ``ok`` is False while requests are
    running or waiting."""

    call_id: str


class PauseMsg(msgspec.Struct, tag=True, frozen=True):
    """Launch no further steps until ``ContinueMsg``. The step in flight is committed; requests keep what they have and
    can be added and aborted. The engine answers with ``CommandReply``."""

    call_id: str


class ContinueMsg(msgspec.Struct, tag=True, frozen=True):
    """Go on after ``PauseMsg``. The engine answers with ``CommandReply``."""

    call_id: str


class StartProfileMsg(msgspec.Struct, tag=True, frozen=True):
    """Profile every rank until ``StopProfileMsg``, for at most ``num_steps`` steps (0: any number) and ``seconds``.

    Each rank writes one trace, whose path begins with ``prefix``. ``activities`` are "cpu" and "cuda". The engine
    answers with ``CommandReply``, whose ``ok`` is False if a profile is running or the profiler does not start.
    """

    call_id: str
    prefix: str
    seconds: float
    num_steps: int = 0
    activities: tuple[str, ...] = ()
    with_stack: bool = False
    record_shapes: bool = False


class StopProfileMsg(msgspec.Struct, tag=True, frozen=True):
    """End the profile and write it; with ``prefix``, only the profile that was started with it. The engine answers with
    ``CommandReply``, whose ``files`` are those of the profile that ended last; its ``ok`` is False if there is none."""

    call_id: str
    prefix: str = ""


class ExpertLoadMsg(msgspec.Struct, tag=True, frozen=True):
    """Request the tokens that each expert has received since the engine's start (``metrics.expert_load``). The engine waits
    for the step in flight, and answers with ``CommandReply``."""

    call_id: str


class LoadAdapterMsg(msgspec.Struct, tag=True, frozen=True):
    """Read the adapter in ``directory``, and make it known as ``name``, in place of one of that name, whose requests go on with
    it. The engine answers with ``CommandReply`` when the adapter is read, or when the load is ended before that; other
    requests go on meanwhile. With ``hold``, an adapter that was read is not known before a ``HeldAdapterMsg``."""

    call_id: str
    name: str
    directory: str
    hold: bool = False


class HeldAdapterMsg(msgspec.Struct, tag=True, frozen=True):
    """Make the adapter known that a load with ``hold`` has read, or drop it without ``keep``. The engine answers with
    ``CommandReply``: a refusal if there is none, because it was unloaded or loads were ended since."""

    call_id: str
    name: str
    keep: bool


class UnloadAdapterMsg(msgspec.Struct, tag=True, frozen=True):
    """Refuse new requests for an adapter, and free its memory when the last of its requests has ended. Loads of ``name`` that
    have not finished are ended with an error. The engine answers with ``CommandReply``: a refusal if there was neither an
    adapter nor a load."""

    call_id: str
    name: str


class AbortLoadsMsg(msgspec.Struct, tag=True, frozen=True):
    """End the loads of adapters that have not finished: each is answered with ``message`` as its error. The engine answers with
    ``CommandReply`` after these."""

    call_id: str
    message: str


class StatsRequestMsg(msgspec.Struct, tag=True, frozen=True):
    """Request ``EngineStats`` now."""

    call_id: str


class PingMsg(msgspec.Struct, tag=True, frozen=True):
    """Ask for a sign of life. The engine process answers between two steps with ``CommandReply``."""

    call_id: str


class ShutdownMsg(msgspec.Struct, tag=True, frozen=True):
    """Stop the loop: after the running requests have finished if ``drain``, at once otherwise. The engine process confirms
    that it has read this with ``CommandReply``."""

    drain: bool = True
    call_id: str = "shutdown"


class TokenOutput(msgspec.Struct, tag=True, frozen=True, gc=False, omit_defaults=True):
    """Report new tokens of one request. ``finish`` is set in the last message of the request.

    ``logprobs`` has one entry per new token if the request requires log-probabilities. ``prompt_logprobs`` is sent
    once, with the first output. ``cached_tokens`` is the number of prompt tokens that were found in the prefix cache at
    admission. ``accepted`` of ``drafted`` draft tokens were accepted so far, in ``verify_steps`` steps (see
    ``interfaces.api.Acceptance``). ``grammar_backend`` names the backend that constrains the output. ``pooled`` is the vector
    made of the prompt (``Pooling``): float32, little-endian. ``queue_seconds`` is the time from the arrival to the
    first admission, and ``compile_seconds`` the time to the end of the compilation of the constraint; they are sent once, with the
    first output. So is ``cached_groups``, if the model has several cache groups: the number of prompt tokens that each
    group alone had in the prefix cache.
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
    queue_seconds: float | None = None
    compile_seconds: float | None = None
    cached_groups: tuple[int, ...] = ()


class RequestFailed(msgspec.Struct, tag=True, frozen=True):
    """Report that a request was refused before it ran (status 400 or 503), or that its step failed (500)."""

    rid: str
    status: int
    message: str
    code: str = "invalid_request"
    param: str | None = None

    @classmethod
    def refused(cls, rid: str, error: RequestError, params: SamplingParams) -> RequestFailed:
        """Return the report of an error of a request with ``params``. An error of its constraint names the field that holds it."""
        param, grammar = error.param, params.grammar
        if grammar is not None and isinstance(error, GrammarError) and param == grammar.kind:
            param = grammar.param or param
        return cls(rid, 400, str(error), error.code, param)

    def error(self) -> DovetailError:
        """Return the exception that the client of the engine raises for this message."""
        if self.status == 503:
            return QueueFullError(self.message)
        if self.status >= 500:
            return EngineError(self.message)
        return RequestError(self.message, param=self.param, code=self.code)


class CommandReply(msgspec.Struct, tag=True, frozen=True):
    """Answer a command message. ``files`` are the files that the command has written. ``expert_tokens`` has the tokens of
    each expert, by the index of the layer."""

    call_id: str
    ok: bool
    message: str = ""
    files: tuple[str, ...] = ()
    expert_tokens: dict[int, list[int]] = {}


class EngineStats(msgspec.Struct, tag=True, frozen=True):
    """Report gauges and totals of the engine. Totals count from its start. Times are in seconds."""

    call_id: str = ""
    paused: int = 0  # 1 while generation is paused
    running: int = 0
    waiting: int = 0
    compiling: int = 0  # waiting requests whose constraint is being compiled
    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_pinned: int = 0  # cached pages that groups and sessions pin
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    retractions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_steps: int = 0  # number of steps in which drafts were verified
    verify_steps: int = 0  # sum over these steps of the number of requests that had drafts
    drafter_errors: int = 0
    policy_errors: int = 0
    jumped_tokens: int = 0
    pins_taken: int = 0
    pins_dropped: int = 0  # dropped, or never taken, because memory was short or the limit was reached
    pins_expired: int = 0
    grammar_compiles: int = 0
    grammar_hits: int = 0
    grammar_misses: int = 0
    grammar_refusals: int = 0
    grammar_overruns: int = 0
    grammar_evictions: int = 0
    grammar_cached_bytes: int = 0
    grammar_compile_seconds: float = 0.0
    grammar_requests: dict[str, int] = {}  # number of requests by backend
    step_seconds: float = 0.0
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0
    commit_seconds: float = 0.0
    draft_seconds: float = 0.0
    mask_seconds: float = 0.0  # part of launch_seconds: filling grammar masks
    verify_seconds: float = 0.0  # part of launch_seconds and wait_seconds: steps for which drafts were requested
    kernels: int = 0  # Triton kernels that were found to be needed
    kernels_compiled: int = 0
    graphs_captured: int = 0
    graphs_missing: int = 0
    graphs_refused: int = 0  # graphs whose capture failed
    restarts: int = 0  # times that the server has started the engine again
    group_cached_tokens: list[
        int
    ] = []  # of several cache groups: prompt tokens that each alone had in the prefix cache
    group_limited: list[int] = []  # of several cache groups: prompts of which each had fewer tokens there than another
    adapters_known: int = 0
    adapters_resident: int = 0  # on the device
    adapters_running: int = 0  # on the device, and used by running requests
    adapters_waiting: int = 0  # waiting requests need them, and they are not on the device
    adapters_installed: int = 0
    adapters_evicted: int = 0
    adapters_failed: int = 0

    @property
    def warm_up(self) -> dict[str, int | bool]:
        """Return how far the preparation of the engine is, as JSON."""
        counts = {
            "kernels": self.kernels,
            "kernels_compiled": self.kernels_compiled,
            "graphs_captured": self.graphs_captured,
            "graphs_missing": self.graphs_missing,
            "graphs_refused": self.graphs_refused,
        }
        return {"done": self.kernels_compiled == self.kernels and not self.graphs_missing, **counts}


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """Report that the engine can take requests. Sent once. ``info`` is JSON: model, resolution, memory, device."""

    info: bytes


class EngineFailed(msgspec.Struct, tag=True, frozen=True):
    """Report that the engine process is about to end; ``message`` gives the reason. ``wrong_setting`` is set if the user must
    change the config or the plugins."""

    message: str
    wrong_setting: bool = False


Control = PauseMsg | ContinueMsg | StartProfileMsg | StopProfileMsg | ExpertLoadMsg
AdapterCommand = LoadAdapterMsg | HeldAdapterMsg | UnloadAdapterMsg | AbortLoadsMsg
Command = FlushCacheMsg | Control | AdapterCommand
"""A message that is answered with ``CommandReply``."""
ToEngine = GenerateMsg | AbortMsg | AbortAllMsg | Command | StatsRequestMsg | PingMsg | ShutdownMsg
Answer = TokenOutput | RequestFailed | CommandReply | EngineStats | EngineReady | EngineFailed
FromEngine = list[Answer]

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
