"""Define the data of measurements and write it to disk: calls, workloads, measurements of calls, and records of runs.

Every type here can be written as JSON and read again. Times are in seconds; the times of a run count from its start.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dovetail.atomic_files import write_atomically
from dovetail.errors import ConfigError

SCHEMA_VERSION = 1
"""The version of all files written with these types. It is raised when a reader of the previous version would
misunderstand the new files."""


class Data(BaseModel):
    """Describe an immutable value that has no fields except the declared ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CallSampling(Data):
    """Describe how the tokens of a call are chosen. The fields have the names and meanings that they have in
    ``sampling_params.SamplingParams``."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


class LoadCall(Data):
    """Describe one request that the load client makes.

    The prompt is exactly one of ``token_ids``, ``text`` (to be continued) and ``messages`` (a conversation, with
    ``tools``). A call with a ``parent`` is due ``think`` seconds after the parent ends; any other call is due
    ``arrival`` seconds after the start of the run. With ``continues``, the prompt of the call is appended to the
    parent's prompt and the parent's output. Calls with the same ``group`` are not independent of each other: they belong
    to one conversation, one program or one shared prefix.
    """

    id: str
    group: str
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int = Field(default=128, ge=1)
    sampling: CallSampling = CallSampling()
    json_schema: dict[str, Any] | None = None
    arrival: float = Field(default=0.0, ge=0)
    parent: str | None = None
    think: float = Field(default=0.0, ge=0)
    continues: bool = False

    @property
    def form(self) -> Literal["token_ids", "text", "messages"]:
        """Return which kind of prompt the call has."""
        return "token_ids" if self.token_ids is not None else "text" if self.text is not None else "messages"

    @model_validator(mode="after")
    def _one_prompt(self) -> LoadCall:
        given = [name for name in ("token_ids", "text", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a call has {' and '.join(given) or 'no prompt'}; give one of token_ids, text and messages"
            )
        if self.continues and self.parent is None:
            raise ValueError("a call with continues=true needs a parent")
        return self


class Workload(Data):
    """Hold calls in an order in which parents precede their children. Every run of the workload makes the same
    requests.

    ``concurrency`` bounds the number of conversations in flight. This is a closed loop with that number of users: each
    user begins the next call without a parent when the previous one and all calls that follow from it are done. If it
    is None, the calls are sent at their own times. This is an open loop: a late server delays none of them. ``seed``
    and ``description`` record how the workload was made.
    """

    name: str
    calls: tuple[LoadCall, ...]
    concurrency: int | None = Field(default=None, ge=1)
    seed: int | None = None
    description: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _parents_come_first(self) -> Workload:
        seen: dict[str, LoadCall] = {}
        for call in self.calls:
            if call.id in seen:
                raise ValueError(f"two calls have the id {call.id!r}")
            if call.parent is not None and call.parent not in seen:
                raise ValueError(f"call {call.id!r} has the parent {call.parent!r}, which does not come before it")
            if call.continues and call.parent is not None and call.form != seen[call.parent].form:
                raise ValueError(
                    f"call {call.id!r} has a prompt of {call.form}, and the call that it continues has one of "
                    f"{seen[call.parent].form}"
                )
            seen[call.id] = call
        return self

    @property
    def content_hash(self) -> str:
        """Return a hash of the calls, their times and the concurrency as 16 hexadecimal digits. It is the same on every
        machine."""
        content = {"calls": [call.model_dump(mode="json") for call in self.calls], "concurrency": self.concurrency}
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)  # the order of a schema's keys counts
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Measurement(Data):
    """Describe the result of one call.

    ``due`` is when the call should have been sent and ``sent`` is when it was sent. Latencies count from ``due``, so
    that a late client, or a queue in the client, cannot make a server look faster than its users would find it.
    ``token_times`` holds the arrival time of each output token; tokens that arrived together have the same time. If the
    server does not report how many tokens an event contains, each event counts as one token in ``token_times``, and
    ``output_tokens`` (from the server's usage) is the correct number. ``cached_tokens`` is the number of prompt tokens
    that were found in a prefix cache. None stands for a value that the server did not report.
    """

    id: str
    group: str
    ok: bool
    error: str | None = None
    due: float
    sent: float
    end: float
    token_times: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    output_ids: tuple[int, ...] | None = None
    text: str = ""
    finish_reason: str | None = None
    queue_seconds: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    verify_steps: int | None = None

    @property
    def first_token(self) -> float | None:
        """Return when the first output token arrived; None if there was none."""
        return self.token_times[0] if self.token_times else None

    @property
    def acceptance_length(self) -> float | None:
        """Return the average number of tokens per step with drafts; None if there was no such step."""
        if not self.verify_steps or self.accepted is None:
            return None
        return 1 + self.accepted / self.verify_steps


class MachineFacts(Data):
    """Describe the machine on which a run took place."""

    host_cpu: str
    cpus: int
    memory_gib: float
    device: str
    platform: str
    python: str
    packages: dict[str, str] = Field(default_factory=dict)


class ClientLag(Data):
    """Report how late the load client itself was.

    The ``loop`` fields are delays of its event loop: a timer that should fire every few milliseconds. The ``send``
    fields are delays between when calls were due and when they were sent. A ``cpu_share`` near 1 means that the client
    was measured instead of the server.
    """

    loop_p50: float = 0.0
    loop_p99: float = 0.0
    loop_max: float = 0.0
    send_p50: float = 0.0
    send_p99: float = 0.0
    send_max: float = 0.0
    cpu_share: float = 0.0


class RunRecord(Data):
    """Record one run of one workload: the configuration, the machine and every measurement.

    ``started`` is the UTC time in ISO format, ``seconds`` the length of the run. ``counters_before`` and
    ``counters_after`` are the engine's totals (``messages.EngineStats``) before and after the run. ``block`` is the
    number of the experiment's repetition.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["serve", "offline"]
    arm: str = ""
    block: int = 0
    workload: str
    workload_hash: str
    config_hash: str | None = None
    config: dict[str, Any] | None = None
    target: str = ""
    machine: MachineFacts
    started: str
    seconds: float
    startup_seconds: float | None = None
    peak_memory_bytes: int | None = None
    peak_device_bytes: int | None = None
    warmup_calls: int = 0
    lag: ClientLag | None = None
    measurements: tuple[Measurement, ...]
    counters_before: dict[str, float] | None = None
    counters_after: dict[str, float] | None = None

    def counter(self, name: str) -> float | None:
        """Return the increase of a counter of the engine during the run; None if the server has no such counter."""
        before, after = self.counters_before or {}, self.counters_after or {}
        return after[name] - before[name] if name in before and name in after else None


def write_json(data: BaseModel, file: Path) -> None:
    """Write ``data`` to ``file`` so that ``read_record`` or ``model_validate_json`` can read it again."""
    write_atomically(file, data.model_dump_json(indent=1) + "\n")


def read_record(file: Path) -> RunRecord:
    """Read the record of a run from ``file``. Raises ``ConfigError``."""
    try:
        return RunRecord.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the record {file} cannot be read: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{file} is not the record of a run (schema version {SCHEMA_VERSION}): {error}") from error
