"""Prompts to measure with: six kinds that the embedded model can answer, or a file of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dovetail.errors import ConfigError

_NAMES = ("Ada Brown", "Omar Lind", "Ines Cole", "Felix Moreau", "Mila Stone", "Viola Hart", "Hugo Park", "Lea Novak")
_CITIES = ("Paris", "Lima", "Oslo", "Cebu", "Porto", "Kyoto", "Quito", "Turin")
_COUNTRIES = ("France", "Peru", "Norway", "Japan", "Italy", "Spain", "Egypt", "Kenya", "Chile", "Poland")
_WORDS = ("planet", "axe", "station", "phrase", "stone", "horn", "cookie", "basket", "lamp", "river", "chair", "bridge")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation, or a plain ``text`` to continue."""

    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str = ""


def _ask(text: str, *tools: Mapping[str, Any]) -> Prompt:
    return Prompt(({"role": "user", "content": text},), tools)


def _fact(rng: Random) -> Prompt:
    return _ask(f"{rng.choice(('What is', 'Tell me', 'Name'))} the capital of {rng.choice(_COUNTRIES)}?")


def _arithmetic(rng: Random) -> Prompt:
    return _ask(f"What is {rng.randrange(2, 60)} {rng.choice('+-')} {rng.randrange(2, 60)}?")


def _extraction(rng: Random) -> Prompt:
    name, words = rng.choice(_NAMES), rng.sample(_WORDS, 4)
    role, level, points = rng.choice(("rogue", "druid", "knight")), rng.randrange(1, 20), rng.randrange(20, 140)
    said = f"There is a {role} named {name} at level {level}, with {points} hp, armed with a {words[0]}, a {words[1]}"
    return _ask(f"I need the character sheet of this hero as JSON.\n{said}, a {words[2]} and a {words[3]}.")


def _sorting(rng: Random) -> Prompt:
    if rng.random() < 0.5:
        numbers = ", ".join(str(rng.randrange(1, 600)) for _ in range(rng.randrange(4, 9)))
        return _ask(f"I have these numbers: {numbers}. Please sort them.")
    return _ask(f"Put the following words in alphabetical order: {', '.join(rng.sample(_WORDS, rng.randrange(3, 7)))}")


def _tool_call(rng: Random) -> Prompt:
    properties = {"city": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    tool = {"name": "get_weather", "description": "Get the weather of a city", "parameters": schema}
    wording = rng.choice(
        ("What is the weather in {}?", "Can you check the weather in {}?", "How is the weather in {} now?")
    )
    return _ask(wording.format(rng.choice(_CITIES)), {"type": "function", "function": tool})


def _copy(rng: Random) -> Prompt:
    words = " ".join(rng.choice((*_WORDS, str(rng.randrange(1000)))) for _ in range(rng.randrange(12, 30)))
    return _ask(f"Copy the following: {words}")


WORKLOADS: Mapping[str, Callable[[Random], Prompt]] = {
    "facts": _fact,
    "arithmetic": _arithmetic,
    "extraction": _extraction,
    "sorting": _sorting,
    "tools": _tool_call,
    "copy": _copy,
}
"""Makers of prompts, by name."""


def make_prompts(name: str, count: int, seed: int) -> list[Prompt]:
    """``count`` prompts of a workload, always the same for a seed. Raises ``ConfigError`` for an unknown name."""
    if name not in WORKLOADS:
        raise ConfigError(f"workload {name!r} is unknown; there are {', '.join(WORKLOADS)}")
    rng = Random(f"{seed} {name}")
    return [WORKLOADS[name](rng) for _ in range(count)]


def read_prompts(file: Path) -> list[Prompt]:
    """One prompt a line: a JSON string, or an object with ``prompt`` (a text to continue), or with ``messages`` (and
    ``tools``). Raises ``ConfigError``, naming the line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"the prompts {file} cannot be read: {error}") from error
    prompts = [_read(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{file} has no prompts; give one JSON object a line")
    return prompts


def _read(line: str, where: str) -> Prompt:
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if isinstance(given, str):
        return Prompt(text=given)
    if isinstance(given, dict) and isinstance(given.get("prompt"), str):
        return Prompt(text=given["prompt"])
    if isinstance(given, dict) and isinstance(given.get("messages"), Sequence):
        return Prompt(tuple(given["messages"]), tuple(given.get("tools") or ()))
    raise ConfigError(f"{where} is {line:.80}; allowed: a string, {{'prompt': text}} or {{'messages': [...]}}")
