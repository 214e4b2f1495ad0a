"""What measurements are made of, and what they leave on disk: calls, workloads, measurements of calls, records of runs.

Everything here is data that can be written as JSON and read again. Times are seconds; those of a run count from its start.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dovetail.errors import ConfigError

SCHEMA_VERSION = 1
"""Of all files written with these types. It goes up when a reader of the last version would misunderstand a new one."""


class Data(BaseModel):
    """A value: it does not change, and has no field that is not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CallSampling(Data):
    """How the tokens of a call are chosen. Names and meanings are those of ``types.SamplingParams``."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


class LoadCall(Data):
    """One request to be made.

    The prompt is one of ``token_ids``, ``text`` (to be continued) and ``messages`` (a conversation, with ``tools``). A call
    with a ``parent`` is due ``think`` seconds after the end of that call; others ``arrival`` seconds after the start. With
    ``continues`` the prompt is what is appended to the parent's prompt and the answer that it got. ``group`` are the calls
    that are not independent of each other: those of one conversation, one program or one shared prefix.
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
        """Which kind of prompt it has."""
        return "token_ids" if self.token_ids is not None else "text" if self.text is not None else "messages"

    @model_validator(mode="after")
    def _one_prompt(self) -> LoadCall:
        given = [name for name in ("token_ids", "text", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a call has {' and '.join(given) or 'no prompt'}; give one of token_ids, text and messages"
            )
        if self.continues and self.parent is None:
            raise ValueError("a call that continues needs a parent")
        return self


class Workload(Data):
    """Calls, parents before their children, frozen: whoever runs it makes the same requests.

    ``concurrency`` bounds the conversations in flight (a closed loop: so many users, each of whom begins the next call without
    a parent when the last one and all that followed from it are done); None leaves the times to the
    calls (an open loop: a late server delays none of them). ``seed`` and ``description`` say how it was made.
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
                raise ValueError(f"call {call.id!r} continues with {call.form} what began with other than that")
            seen[call.id] = call
        return self

    @property
    def content_hash(self) -> str:
        """What is asked and when, in 16 hex digits: the same on any machine for the same calls."""
        content = {"calls": [call.model_dump(mode="json") for call in self.calls], "concurrency": self.concurrency}
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)  # the order of a schema's keys counts
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Measurement(Data):
    """What came of one call.

    ``due`` is when it should have been sent and ``sent`` when it was; latencies count from ``due``, so that a client that is
    late, or a queue in it, cannot make a server look faster than its users would find it. ``token_times`` are the
    arrivals of the output tokens; tokens that came together have the same. Where a server does not say how many tokens an
    event brought, each event counts as one, and ``output_tokens`` (from its usage) is the number that counts.
    ``cached_tokens`` of the prompt were found in a prefix cache. None stands for what the server did not say.
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
        """When the first output token arrived."""
        return self.token_times[0] if self.token_times else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a step with drafts brought on average; None where there was no such step."""
        if not self.verify_steps or self.accepted is None:
            return None
        return 1 + self.accepted / self.verify_steps


class MachineFacts(Data):
    """Where a run took place."""

    host_cpu: str
    cpus: int
    memory_gib: float
    device: str
    platform: str
    python: str
    packages: dict[str, str] = Field(default_factory=dict)


class ClientLag(Data):
    """How late the load client itself was: of its event loop (a timer that should fire every few milliseconds), and of
    sending calls that were due. A share of the client's CPU near 1 says that the client, not the server, was measured."""

    loop_p50: float = 0.0
    loop_p99: float = 0.0
    loop_max: float = 0.0
    send_p50: float = 0.0
    send_p99: float = 0.0
    send_max: float = 0.0
    cpu_share: float = 0.0


class RunRecord(Data):
    """One run of one workload: by whom, on what, and every measurement.

    ``started`` is the UTC time in ISO format, ``seconds`` the length of the run. ``counters_before`` and ``counters_after``
    are the engine's totals (``messages.EngineStats``) around it. ``block`` numbers repetitions of an experiment.
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
        """By how much a counter of the engine rose during the run; None where the server has no such counter."""
        before, after = self.counters_before or {}, self.counters_after or {}
        return after[name] - before[name] if name in before and name in after else None


def write_json(data: BaseModel, file: Path) -> None:
    """Write it, so that ``read_record`` or ``model_validate_json`` reads it again."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(data.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_record(file: Path) -> RunRecord:
    """The record in a file. Raises ``ConfigError``."""
    try:
        return RunRecord.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the record {file} cannot be read: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{file} is no record of a run (schema version {SCHEMA_VERSION}): {error}") from error
