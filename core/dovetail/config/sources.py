"""Read settings from files, environment variables and ``--set``, and merge them in a documented order.

    defaults  <  files, left to right (first the one DOVETAIL_CONFIG names)  <  environment  <  --set

Nothing is validated here: ``Raw`` holds what was written, with the origin of every key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dovetail.config.kinds import BUILT_IN, Sections
from dovetail.config.longform import combine, long_form
from dovetail.config.unique_keys import refuse_repeated
from dovetail.errors import ConfigError

PREFIX = "DOVETAIL_"
FILE_VARIABLE = "DOVETAIL_CONFIG"
KEY_VARIABLE = "DOVETAIL_API_KEY"
"""The variable that holds the key of a client. It is not a setting."""
Tree = dict[str, Any]
Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """Hold the settings from one place, as they were written; ``origin`` names the place in error messages."""

    origin: str
    tree: Tree


@dataclass(frozen=True)
class Raw:
    """Hold the settings of all sources, in order of precedence.

    ``sections`` describe the kinds whose shorthands are known. Which plugins may load is a setting itself, so the
    sections of third-party kinds are known only after the plugins were loaded, and ``with_sections`` adds them.
    ``base`` is a tree (long form) that the sources override; errors name no origin for it.
    """

    sources: tuple[SettingsSource, ...]
    sections: Sections = BUILT_IN
    base: Tree = field(default_factory=dict)

    def with_sections(self, sections: Sections) -> Raw:
        """Return the same settings, read with these sections."""
        return replace(self, sections=tuple(sections))

    @cached_property
    def tree(self) -> Tree:
        """Return the tree that base and sources make together, in its long form."""
        merged = self.base
        for _, tree in self._long:
            merged = combine(merged, tree, self.sections)
        return merged

    def origin(self, path: Path_) -> str | None:
        """Return where the value at ``path``, or the innermost value around it, was set last; None for a default."""
        for length in range(len(path), 0, -1):
            for origin, tree in reversed(self._long):
                if _contains(tree, path[:length]):
                    return origin
        return None

    @cached_property
    def _long(self) -> tuple[tuple[str, Tree], ...]:
        return tuple((source.origin, long_form(source.tree, self.sections)) for source in self.sources)


def read(
    files: Sequence[Path], sets: Sequence[str], env: Mapping[str, str], arguments: Mapping[str, Any] | None = None
) -> Raw:
    """Read every source; ``arguments`` (sections given in Python) override all others. Raises ``ConfigError`` for a
    source that cannot be read or parsed."""
    named = [Path(env[FILE_VARIABLE])] if env.get(FILE_VARIABLE) else []
    sources = [*map(read_file, [*named, *files]), *read_env(env), *map(read_set, sets)]
    if arguments:
        sources.append(SettingsSource("arguments", dict(arguments)))
    return Raw(tuple(sources))


def read_file(file: Path, what: str = "config file") -> SettingsSource:
    """Read a YAML, TOML or JSON file, depending on its suffix. ``what`` names it in errors. Raises ``ConfigError``."""
    parsers = {".yaml": parse_yaml, ".yml": parse_yaml, ".toml": _toml, ".json": _json}
    parse = parsers.get(file.suffix.lower())
    if parse is None:
        raise ConfigError(f"{what} {file} has suffix {file.suffix!r}; allowed: {', '.join(parsers)}")
    try:
        tree = parse(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what} {file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{what} {file} cannot be parsed: {error}") from error
    return SettingsSource(str(file), _mapping(tree, f"{what} {file}"))


def read_env(env: Mapping[str, str]) -> list[SettingsSource]:
    """Read the environment: ``DOVETAIL_SCHEDULER__MAX_RUNNING=8`` sets ``scheduler.max_running``. Values are parsed as YAML.
    Shorter names come first, so that a section's variable does not undo those of its keys."""
    names = sorted(
        (n for n in env if n.startswith(PREFIX) and n not in (FILE_VARIABLE, KEY_VARIABLE)),
        key=lambda n: (n.count("__"), n),
    )
    return [_assign(n.removeprefix(PREFIX).lower().split("__"), env[n], f"environment variable {n}") for n in names]


def read_set(text: str) -> SettingsSource:
    """Read ``a.b=c``, the value parsed as YAML. Raises ``ConfigError``."""
    key, equals, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(f"--set is {text!r}; allowed: key.path=value, for example scheduler.max_running=8")
    return _assign(path, value, f"--set {text}")


def _assign(path: Sequence[str], text: str, origin: str) -> SettingsSource:
    try:
        value: Any = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: {text!r} is not valid YAML: {error}") from error
    for key in reversed(path):
        value = {key: value}
    return SettingsSource(origin, value)


def parse_yaml(text: str) -> Any:
    """Parse YAML without repeated keys. Raises ``ValueError``."""
    from dovetail.config.yaml_text import load

    return load(text)


def _toml(text: str) -> Tree:
    import tomllib

    return tomllib.loads(text)


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_pairs)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> Tree:
    refuse_repeated([key for key, _ in pairs], "JSON object")
    return dict(pairs)


def _mapping(tree: Any, what: str) -> Tree:
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{what} holds {type(tree).__name__} {tree!r:.60}; allowed: a mapping of sections")
    return tree


def _contains(tree: Any, path: Path_) -> bool:
    for key in path:
        children: dict[Any, Any] = dict(enumerate(tree)) if isinstance(tree, list) else tree
        if not isinstance(children, dict) or key not in children:
            return False
        tree = children[key]
    return True
