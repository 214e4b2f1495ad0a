"""Collect everything that is wrong with a config, and report it in one error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dovetail.config.sources import Path_, Raw
from dovetail.errors import ConfigError

MISSING = object()


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """Describe one thing that is wrong, at one key."""

    path: Path_
    text: str


def suggest(name: object, allowed: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of ``allowed``, or an empty string."""
    close = difflib.get_close_matches(str(name), list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def report(problems: Sequence[ConfigProblem], raw: Raw) -> ConfigError:
    """Return one error for all problems, each with its key and where it was set."""
    lines = [f"{dotted(p.path)}{p.text}{_origin(raw, p.path)}" for p in problems]
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError("\n".join([f"{len(lines)} settings are wrong:", *(f"  - {line}" for line in lines)]))


def dotted(path: Path_) -> str:
    """Return ``("attention", 0, "kind")`` as ``attention[0].kind``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _origin(raw: Raw, path: Path_) -> str:
    origin = raw.origin(path)
    return f" [{origin}]" if origin else ""


def from_pydantic(
    error: ValidationError, model: type[BaseModel], given: Any, prefix: Path_, owner: str
) -> list[ConfigProblem]:
    """Return the problems of one section. ``given`` is what was validated, ``owner`` names the section's owner."""
    texts: dict[Path_, list[str]] = {}
    inputs: dict[Path_, Any] = {}
    problems = []
    for detail in error.errors(include_url=False):
        path = _real_path(detail["loc"], given)
        if detail["type"] == "extra_forbidden":
            keys = [key for key in _keys_at(model, path[:-1]) if key != "kind"]
            problems.append(
                ConfigProblem(
                    prefix + path, unknown_key(str(path[-1]), keys, dotted(prefix + path[:-1]) if path[1:] else owner)
                )
            )
        else:
            texts.setdefault(path, []).append(_allowed(detail["msg"]))
            inputs[path] = detail["input"] if detail["type"] != "missing" else MISSING
    wrong = [ConfigProblem(prefix + path, _wrong_value(inputs[path], parts)) for path, parts in texts.items()]
    return problems + wrong


def unknown_key(key: str, keys: Sequence[str], owner: str) -> str:
    """Return the text of the problem that ``owner`` has no ``key``; ``keys`` are those that it has."""
    allowed = f"allowed: {', '.join(keys)}" if keys else "it has no settings"
    return f" is not a key of {owner}; {allowed}{suggest(key, keys)}"


def _wrong_value(given: Any, allowed: Sequence[str]) -> str:
    first, *others = dict.fromkeys(allowed)
    text = " or ".join([first, *(other.removeprefix("allowed: ") for other in others)])
    hint = suggest(given, re.findall(r"'([^']*)'", text)) if isinstance(given, str) else ""
    return f" is {'missing' if given is MISSING else repr(given)[:200]}; {text}{hint}"


def _allowed(message: str) -> str:
    if not message.startswith("Input should be "):
        return message.removeprefix("Value error, ")
    rest = message.removeprefix("Input should be ").split(", unable to", 1)[0].split(", got a number", 1)[0]
    return "allowed: " + (f"a number {rest}" if rest.startswith(("greater", "less")) else rest)


def _real_path(loc: Sequence[str | int], given: Any) -> Path_:
    """Return ``loc`` without the tags that pydantic adds for the members of unions: only what exists in ``given``."""
    path: list[str | int] = []
    for index, key in enumerate(loc):
        if isinstance(given, dict):
            known = key in given
            if not known and index < len(loc) - 1:
                continue
            given = given.get(key)
        elif isinstance(given, list) and isinstance(key, int) and key < len(given):
            given = given[key]
        else:
            break
        path.append(key)
    return tuple(path)


def _keys_at(model: type[BaseModel], path: Path_) -> list[str]:
    """Return the fields of the section at ``path``, which may lead through mappings and lists of sections."""
    at: Any = model
    for key in path:
        if isinstance(at, type) and issubclass(at, BaseModel):
            field = at.model_fields.get(str(key))
            at = field.annotation if field else None
        else:  # dict[name, section] or tuple[section, ...]
            at = next((arg for arg in get_args(at) if isinstance(arg, type) and issubclass(arg, BaseModel)), None)
    return list(at.model_fields) if isinstance(at, type) and issubclass(at, BaseModel) else []
