"""Which workload, and when its calls arrive: what a command line or an experiment's file says, before any call is made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator

from dovetail.bench.records import Data
from dovetail.errors import ConfigError


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError("the first bound is above the second")
    return bounds


_Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
_Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[tuple[_Tokens, _Tokens], AfterValidator(_ordered)] | _Tokens
"""A number, or [low, high]: drawn evenly from both ends and all between."""
Seconds = Annotated[tuple[_Seconds, _Seconds], AfterValidator(_ordered)] | _Seconds
"""Seconds, or [low, high]."""
Content = Literal["tokens", "text"]
"""``tokens``: random token ids, no special ones, and outputs of exactly the length asked for. ``text``: words and questions
that the embedded model can answer, lengths counted in words; an output ends where the model ends it."""
Topic = Literal["facts", "arithmetic", "extraction", "sorting", "tools", "copy"]
TOPICS: tuple[Topic, ...] = get_args(Topic)
"""What ``questions`` can be about."""


class RandomSpec(Data):
    """Independent prompts of random lengths."""

    kind: Literal["random"] = "random"
    count: int = Field(default=64, ge=1, description="Calls.")
    input: Count = Field(default=128, description="Length of each prompt.")
    output: Count = Field(default=64, description="Length of each output.")
    content: Content = "tokens"


class SharedPrefixSpec(Data):
    """Groups of prompts that begin alike: few-shot prompts, system prompts, one document asked many things. The calls of
    the groups are mixed."""

    kind: Literal["shared_prefix"] = "shared_prefix"
    groups: int = Field(default=8, ge=1, description="Prefixes.")
    per_group: int = Field(default=8, ge=1, description="Calls that share one.")
    prefix: Count = Field(default=256, description="Length of a prefix.")
    suffix: Count = Field(default=32, description="Length of what follows it.")
    output: Count = Field(default=32, description="Length of each output.")
    content: Content = "tokens"


class ChatSpec(Data):
    """Conversations of several turns, all with one system prompt. A turn is sent when the answer to the last one is there
    and has been thought about; its prompt holds the answers given so far."""

    kind: Literal["chat"] = "chat"
    conversations: int = Field(default=16, ge=1)
    turns: Count = Field(default=(2, 5), description="Of each conversation.")
    system: Count = Field(default=64, description="Length of the system prompt.")
    user: Count = Field(default=32, description="Length of each question.")
    output: Count = Field(default=64, description="Length of each answer.")
    think: Seconds = Field(default=0.0, description="Between an answer and the next question.")
    content: Content = "tokens"


class JsonSpec(Data):
    """Extraction to JSON: each call has a schema that its output must follow. Texts are for the embedded model."""

    kind: Literal["json"] = "json"
    count: int = Field(default=64, ge=1, description="Calls.")
    schemas: int = Field(default=4, ge=1, description="Different schemas among them.")
    output: Count = Field(default=160, description="At most so many tokens an output.")


class AgentSpec(Data):
    """Programs that call tools in a loop: a long prompt of instructions and tools that all programs share, a task, and at
    each step a call whose context has grown by the last answer and the tool's result. Time passes in the tools."""

    kind: Literal["agent"] = "agent"
    programs: int = Field(default=8, ge=1)
    steps: Count = Field(default=(3, 6), description="Calls of each program.")
    system: Count = Field(default=256, description="Length of instructions and tools.")
    task: Count = Field(default=32, description="Length of the task.")
    result: Count = Field(default=(32, 128), description="Length of a tool's result.")
    output: Count = Field(default=(16, 48), description="Length of each output.")
    think: Seconds = Field(default=(0.02, 0.1), description="That a tool takes.")
    content: Content = "tokens"


class QuestionsSpec(Data):
    """Single questions that the embedded model can answer, of one topic."""

    kind: Literal["questions"] = "questions"
    topic: Topic = "facts"
    count: int = Field(default=20, ge=1, description="Calls.")
    output: int = Field(default=128, ge=1, description="At most so many tokens an output.")


class JsonlSpec(Data):
    """A file of one's own, one call a line: docs/bench.md has the format."""

    kind: Literal["jsonl"] = "jsonl"
    path: Path
    count: int | None = Field(default=None, ge=1, description="Only the first calls.")
    output: int = Field(default=128, ge=1, description="At most so many tokens an output, where a line does not say.")


WorkloadSpec = Annotated[
    RandomSpec | SharedPrefixSpec | ChatSpec | JsonSpec | AgentSpec | QuestionsSpec | JsonlSpec,
    Field(discriminator="kind"),
]


class AllAtOnce(Data):
    """Every call is due at the start: how fast can a full queue be worked off?"""

    kind: Literal["all_at_once"] = "all_at_once"


class FixedConcurrency(Data):
    """A closed loop: so many calls in flight at any time. Latencies under load are better measured in an open loop: here a
    slow server is asked less."""

    kind: Literal["concurrency"] = "concurrency"
    limit: int = Field(ge=1)


class Poisson(Data):
    """Independent arrivals, ``rate`` a second on average."""

    kind: Literal["poisson"] = "poisson"
    rate: float = Field(gt=0, allow_inf_nan=False)


class Gamma(Data):
    """Gaps of a gamma distribution with shape ``burstiness``: 1 is poisson, less comes in bursts (the coefficient of
    variation of the gaps is 1/sqrt(burstiness)), more is more even."""

    kind: Literal["gamma"] = "gamma"
    rate: float = Field(gt=0, allow_inf_nan=False)
    burstiness: float = Field(default=1.0, gt=0)


class ArrivalTrace(Data):
    """Offsets in seconds, ascending, one for each call without a parent: given here, or one a line of a ``file``. They are
    repeated, shifted, where there are more calls. ``speed`` 2 is twice as fast."""

    kind: Literal["trace"] = "trace"
    offsets: tuple[_Seconds, ...] | None = Field(default=None, min_length=1)
    file: Path | None = None
    speed: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _one_source(self) -> ArrivalTrace:
        if (self.offsets is None) == (self.file is None):
            raise ValueError("a trace has offsets or a file; give one of them")
        return self


class AsGiven(Data):
    """The times that the calls have: those of a user's file."""

    kind: Literal["as_given"] = "as_given"


ArrivalSpec = Annotated[
    AllAtOnce | FixedConcurrency | Poisson | Gamma | ArrivalTrace | AsGiven, Field(discriminator="kind")
]

_WORKLOADS: TypeAdapter[Any] = TypeAdapter(WorkloadSpec)
_ARRIVALS: TypeAdapter[Any] = TypeAdapter(ArrivalSpec)


def parse_workload(text: str) -> WorkloadSpec:
    """``random``, ``{kind: random, input: [64, 256]}`` (YAML), or the path of a .jsonl file. Raises ``ConfigError``."""
    if text.endswith(".jsonl") and not text.lstrip().startswith("{"):
        return JsonlSpec(path=Path(text))
    return _parse(text, _WORKLOADS, "workload")


def parse_arrivals(text: str) -> ArrivalSpec:
    """``all_at_once``, ``{kind: poisson, rate: 4}`` (YAML). Raises ``ConfigError``."""
    return _parse(text, _ARRIVALS, "arrivals")


def _parse(text: str, adapter: TypeAdapter[Any], what: str) -> Any:
    try:
        given = yaml.safe_load(text)
        return adapter.validate_python({"kind": given} if isinstance(given, str) else given)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} {text!r} is no YAML: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{what} {text!r}: {_problems(error)}; docs/bench.md has every kind and field") from error


def _problems(error: ValidationError) -> str:
    found: dict[str, str] = {}
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"] if str(part).isidentifier())
        text = problem["msg"].removeprefix("Value error, ")
        found[where] = f"{found[where]}, or {text[:1].lower()}{text[1:]}" if where in found else text
    return "; ".join(f"{where}: {text}" if where else text for where, text in found.items())
