"""Make questions that the embedded model can answer, and extractions to JSON by a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dovetail.bench.draws import Draws
from dovetail.bench.records import LoadCall
from dovetail.bench.specs import JsonSpec, QuestionsSpec
from dovetail.bench.workloads.words import CITIES, COUNTRIES, NAMES, WORDS

_ROLES = ("rogue", "druid", "knight")
_WEATHER = ("What is the weather in {}?", "Can you check the weather in {}?", "How is the weather in {} now?")


def _fact(draws: Draws) -> str:
    return f"{draws.choice(('What is', 'Tell me', 'Name'))} the capital of {draws.choice(COUNTRIES)}?"


def _arithmetic(draws: Draws) -> str:
    return f"What is {2 + draws.below(58)} {draws.choice('+-')} {2 + draws.below(58)}?"


def _extraction(draws: Draws) -> str:
    words = draws.sample(WORDS, 4)
    level, points = 1 + draws.below(19), 20 + draws.below(120)
    hero = f"a {draws.choice(_ROLES)} named {draws.choice(NAMES)} at level {level}, with {points} hp"
    equipment = f"There is {hero}, armed with a {words[0]}, a {words[1]}, a {words[2]} and a {words[3]}."
    return f"I need the character sheet of this hero as JSON.\n{equipment}"


def _sorting(draws: Draws) -> str:
    if draws.unit() < 0.5:
        numbers = ", ".join(str(1 + draws.below(599)) for _ in range(4 + draws.below(5)))
        return f"I have these numbers: {numbers}. Please sort them."
    return f"Put the following words in alphabetical order: {', '.join(draws.sample(WORDS, 3 + draws.below(4)))}"


def _weather(draws: Draws) -> str:
    return draws.choice(_WEATHER).format(draws.choice(CITIES))


def _copy(draws: Draws) -> str:
    words = (draws.choice(WORDS) if draws.below(4) else str(draws.below(1000)) for _ in range(12 + draws.below(18)))
    return f"Copy the following: {' '.join(words)}"


_QUESTIONS: Mapping[str, Callable[[Draws], str]] = {
    "facts": _fact,
    "arithmetic": _arithmetic,
    "extraction": _extraction,
    "sorting": _sorting,
    "tools": _weather,
    "copy": _copy,
}
_WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def question_calls(spec: QuestionsSpec, seed: int) -> Iterator[LoadCall]:
    """Yield independent questions of one topic."""
    draws = Draws(seed, "questions", spec.topic)
    tools = (_WEATHER_TOOL,) if spec.topic == "tools" else ()
    for i in range(spec.count):
        name, messages = f"q{i}", ({"role": "user", "content": _QUESTIONS[spec.topic](draws)},)
        yield LoadCall(id=name, group=name, messages=messages, tools=tools, max_tokens=spec.output)


def json_calls(spec: JsonSpec, seed: int) -> Iterator[LoadCall]:
    """Yield extractions of character sheets, each by one of ``spec.schemas`` schemas."""
    schemas = [_schema(Draws(seed, "json", "schema", i)) for i in range(spec.schemas)]
    for i in range(spec.count):
        draws, name = Draws(seed, "json", i), f"j{i}"
        yield LoadCall(
            id=name,
            group=name,
            messages=({"role": "user", "content": _extraction(draws)},),
            max_tokens=draws.count(spec.output),
            json_schema=draws.choice(schemas),
        )


def _schema(draws: Draws) -> dict[str, Any]:
    """Return a schema of some of a sheet's fields, bounded so that every output ends. The order of the properties is
    part of it."""
    fields: dict[str, Any] = {
        "name": {"type": "string", "maxLength": 24},
        "role": {"enum": list(_ROLES)},
        "level": {"type": "integer", "minimum": 1, "maximum": 20},
        "hp": {"type": "integer", "minimum": 0, "maximum": 200},
        "items": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 1, "maxItems": 4},
    }
    kept = draws.sample(list(fields), 2 + draws.below(len(fields) - 1))
    return {
        "type": "object",
        "properties": {key: fields[key] for key in kept},
        "required": kept,
        "additionalProperties": False,
    }
