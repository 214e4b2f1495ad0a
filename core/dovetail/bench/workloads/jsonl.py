"""Read calls from a user's file; docs/bench.md describes the format."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, ValidationError

from dovetail.bench.records import CallSampling, Data, LoadCall
from dovetail.bench.specs import JsonlSpec
from dovetail.errors import ConfigError


class Line(Data):
    """Describe one line.

    ``prompt`` is text to continue or token ids; ``messages`` is a conversation. ``records.LoadCall`` and
    ``records.CallSampling`` describe the other fields.
    """

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    id: str | None = None
    group: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    json_schema: dict[str, Any] | None = None
    arrival: float = Field(default=0.0, ge=0)
    parent: str | None = None
    think: float = Field(default=0.0, ge=0)
    continues: bool = False

    def call(self, number: int, groups: dict[str, str], max_tokens: int) -> LoadCall:
        """Return the call of this line. ``groups`` maps the ids of the calls before it to their groups. Raises
        ``ValueError``."""
        name = self.id or f"line{number}"
        if self.parent is not None and self.parent not in groups:
            raise ValueError(f"its parent {self.parent!r} is not the id of a line before it")
        if name in groups:
            raise ValueError(f"the id {name!r} is already used by a line before it")
        if not (self.prompt or self.messages):
            raise ValueError("it has no prompt; give one of prompt and messages")
        group = self.group or (groups[self.parent] if self.parent is not None else name)
        same = {key: getattr(self, key) for key in ("messages", "tools", "json_schema", "arrival", "parent", "think")}
        sampling = CallSampling(**{key: getattr(self, key) for key in CallSampling.model_fields})
        return LoadCall(
            **same,
            id=name,
            group=group,
            text=self.prompt if isinstance(self.prompt, str) else None,
            token_ids=None if isinstance(self.prompt, str) else self.prompt,
            max_tokens=self.max_tokens or max_tokens,
            sampling=sampling,
            continues=self.continues,
        )


def read_calls(spec: JsonlSpec) -> list[LoadCall]:
    """Read the calls of a file. Raises ``ConfigError`` that names the line and what is wrong with it."""
    try:
        lines = spec.path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the workload {spec.path} cannot be read: {error}") from error
    calls, groups = list[LoadCall](), dict[str, str]()
    for number, text in enumerate(lines, 1):
        if not text.strip() or len(calls) == spec.count:
            continue
        call = _read(text, f"{spec.path}, line {number}", number, groups, spec.output)
        calls.append(call)
        groups[call.id] = call.group
    if not calls:
        raise ConfigError(f"{spec.path} has no calls; give one JSON object per line")
    return calls


def _read(text: str, where: str, number: int, groups: dict[str, str], max_tokens: int) -> LoadCall:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if isinstance(given, str):
        given = {"prompt": given}
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is {text:.80}; allowed: a string, or an object with prompt or messages")
    try:
        return Line.model_validate(given).call(number, groups, max_tokens)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_problem(error, given)}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _problem(error: ValidationError, given: dict[str, Any]) -> str:
    first = error.errors()[0]
    if first["type"] == "extra_forbidden":
        return f"{first['loc'][0]!r} is not a field of a call; allowed: {', '.join(Line.model_fields)}"
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    field = str(first["loc"][0])
    return f"{field} is {json.dumps(given.get(field))[:80]}: {first['msg']}"
