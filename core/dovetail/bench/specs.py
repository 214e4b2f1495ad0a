"""Specify workloads and arrivals, as command lines and the files of experiments give them."""

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
"""A number, or [low, high] for a uniform draw that includes both ends."""
Seconds = Annotated[tuple[_Seconds, _Seconds], AfterValidator(_ordered)] | _Seconds
"""A number of seconds, or [low, high] for a uniform draw."""
Content = Literal["tokens", "text"]
"""The content of prompts.

``tokens`` stands for random token ids without special tokens, and outputs of exactly the required length. ``text``
stands for words and questions that the embedded model can answer; lengths are counted in words, and the model ends each
output.
"""
Topic = Literal["facts", "arithmetic", "extraction", "sorting", "tools", "copy"]
TOPICS: tuple[Topic, ...] = get_args(Topic)
"""The possible topics of ``questions``."""


class RandomSpec(Data):
    """Specify independent prompts of random lengths."""

    kind: Literal["random"] = "random"
    count: int = Field(default=64, ge=1, description="The number of calls.")
    input: Count = Field(default=128, description="Length of each prompt.")
    output: Count = Field(default=64, description="Length of each output.")
    content: Content = "tokens"


class SharedPrefixSpec(Data):
    """Specify groups of prompts with a common prefix: few-shot prompts, system prompts, many questions about one
    document.

    The calls of the groups are sent in mixed order.
    """

    kind: Literal["shared_prefix"] = "shared_prefix"
    groups: int = Field(default=8, ge=1, description="The number of prefixes.")
    per_group: int = Field(default=8, ge=1, description="The number of calls that share one prefix.")
    prefix: Count = Field(default=256, description="Length of a prefix.")
    suffix: Count = Field(default=32, description="Length of the text after the prefix.")
    output: Count = Field(default=32, description="Length of each output.")
    content: Content = "tokens"


class ChatSpec(Data):
    """Specify conversations of several turns, all with one system prompt.

    A turn is sent ``think`` seconds after the answer to the previous turn has arrived. Its prompt contains the answers
    so far.
    """

    kind: Literal["chat"] = "chat"
    conversations: int = Field(default=16, ge=1)
    turns: Count = Field(default=(2, 5), description="The number of turns of each conversation.")
    system: Count = Field(default=64, description="Length of the system prompt.")
    user: Count = Field(default=32, description="Length of each question.")
    output: Count = Field(default=64, description="Length of each answer.")
    think: Seconds = Field(default=0.0, description="Seconds between an answer and the next question.")
    content: Content = "tokens"


class JsonSpec(Data):
    """Specify extraction to JSON: each call has a schema that its output must follow. The texts suit the embedded
    model."""

    kind: Literal["json"] = "json"
    count: int = Field(default=64, ge=1, description="The number of calls.")
    schemas: int = Field(default=4, ge=1, description="The number of different schemas among them.")
    output: Count = Field(default=160, description="The maximum number of tokens of each output.")


class AgentSpec(Data):
    """Specify programs that call tools in a loop.

    All programs share a long prompt of instructions and tools. A program has a task and makes one call per step. The
    context of each call grows by the previous answer and the tool's result. Time passes in the tools between two calls.
    """

    kind: Literal["agent"] = "agent"
    programs: int = Field(default=8, ge=1)
    steps: Count = Field(default=(3, 6), description="The number of calls of each program.")
    system: Count = Field(default=256, description="Length of instructions and tools.")
    task: Count = Field(default=32, description="Length of the task.")
    result: Count = Field(default=(32, 128), description="Length of a tool's result.")
    output: Count = Field(default=(16, 48), description="Length of each output.")
    think: Seconds = Field(default=(0.02, 0.1), description="Seconds that a tool takes.")
    content: Content = "tokens"


class QuestionsSpec(Data):
    """Specify single questions of one topic that the embedded model can answer."""

    kind: Literal["questions"] = "questions"
    topic: Topic = "facts"
    count: int = Field(default=20, ge=1, description="The number of calls.")
    output: int = Field(default=128, ge=1, description="The maximum number of tokens of each output.")


class JsonlSpec(Data):
    """Specify a file provided by the user with one call per line; docs/bench.md describes the format."""

    kind: Literal["jsonl"] = "jsonl"
    path: Path
    count: int | None = Field(
        default=None, ge=1, description="Use only this number of calls from the beginning of the file."
    )
    output: int = Field(
        default=128, ge=1, description="The maximum number of tokens of an output whose line gives none."
    )


WorkloadSpec = Annotated[
    RandomSpec | SharedPrefixSpec | ChatSpec | JsonSpec | AgentSpec | QuestionsSpec | JsonlSpec,
    Field(discriminator="kind"),
]


class AllAtOnce(Data):
    """Make every call due at the start, to measure how fast a full queue is processed."""

    kind: Literal["all_at_once"] = "all_at_once"


class FixedConcurrency(Data):
    """Specify a closed loop with ``limit`` calls in flight at any time.

    Latencies under load are better measured in an open loop: in a closed loop a slow server receives fewer calls.
    """

    kind: Literal["concurrency"] = "concurrency"
    limit: int = Field(ge=1)


class Poisson(Data):
    """Specify independent arrivals, ``rate`` per second on average."""

    kind: Literal["poisson"] = "poisson"
    rate: float = Field(gt=0, allow_inf_nan=False)


class Gamma(Data):
    """Specify gaps from a gamma distribution with shape ``burstiness``.

    The value 1 is a Poisson process. Smaller values arrive in bursts (the coefficient of variation of the gaps is
    1/sqrt(burstiness)), and larger values are more even.
    """

    kind: Literal["gamma"] = "gamma"
    rate: float = Field(gt=0, allow_inf_nan=False)
    burstiness: float = Field(default=1.0, gt=0)


class ArrivalTrace(Data):
    """Specify offsets in seconds in ascending order, one for each call without a parent.

    They are given here, or one per line of a ``file``. They are repeated with a shift if there are more calls.
    ``speed`` 2 is twice as fast.
    """

    kind: Literal["trace"] = "trace"
    offsets: tuple[_Seconds, ...] | None = Field(default=None, min_length=1)
    file: Path | None = None
    speed: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _one_source(self) -> ArrivalTrace:
        if (self.offsets is None) == (self.file is None):
            raise ValueError("a trace needs offsets or a file; give exactly one of them")
        return self


class AsGiven(Data):
    """Keep the arrival times that a user's file gives to its calls. Calls without a time arrive at the start."""

    kind: Literal["as_given"] = "as_given"


ArrivalSpec = Annotated[
    AllAtOnce | FixedConcurrency | Poisson | Gamma | ArrivalTrace | AsGiven, Field(discriminator="kind")
]

_WORKLOADS: TypeAdapter[Any] = TypeAdapter(WorkloadSpec)
_ARRIVALS: TypeAdapter[Any] = TypeAdapter(ArrivalSpec)


def parse_workload(text: str) -> WorkloadSpec:
    """Parse ``random``, ``{kind: random, input: [64, 256]}`` (YAML), or the path of a .jsonl file. Raises
    ``ConfigError``."""
    if text.endswith(".jsonl") and not text.lstrip().startswith("{"):
        return JsonlSpec(path=Path(text))
    return _parse(text, _WORKLOADS, "workload")


def parse_arrivals(text: str) -> ArrivalSpec:
    """Parse ``all_at_once`` or ``{kind: poisson, rate: 4}`` (YAML). Raises ``ConfigError``."""
    return _parse(text, _ARRIVALS, "arrivals")


def _parse(text: str, adapter: TypeAdapter[Any], what: str) -> Any:
    try:
        given = yaml.safe_load(text)
        return adapter.validate_python({"kind": given} if isinstance(given, str) else given)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} {text!r} is not valid YAML: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{what} {text!r}: {_problems(error)}; docs/bench.md lists every kind and field") from error


def _problems(error: ValidationError) -> str:
    found: dict[str, str] = {}
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"] if str(part).isidentifier())
        text = problem["msg"].removeprefix("Value error, ")
        found[where] = f"{found[where]}, or {text[:1].lower()}{text[1:]}" if where in found else text
    return "; ".join(f"{where}: {text}" if where else text for where, text in found.items())
