"""Resolve the two arms of an experiment, a base config with the settings of each arm on top, and list how they differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.config import Config, config_hash, dump, read
from dovetail.config.sources import Raw, read_set
from dovetail.config.tree import by_phase, selection_keys
from dovetail.errors import ConfigError, PluginError, ResolutionError
from dovetail.registry.machine import Machine
from dovetail.registry.resolution import Resolved
from dovetail.registry.resolver import resolve
from dovetail.registry.setup import setup

FILE_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
SILENT = ("tuning", "server")
"""Sections that define how a server listens and where records are stored. No measurement depends on them."""


@dataclass(frozen=True, slots=True)
class ResolvedArm:
    """Hold one arm. ``given`` are its settings as the user wrote them, ``config`` is the base config with these settings, and
    ``resolved`` is what would run. ``named`` are the dotted keys that its own settings name."""

    name: str
    given: tuple[str, ...]
    named: frozenset[str]
    config: Config
    resolved: Resolved

    @property
    def hash(self) -> str:
        """Return the hash of the resolved config."""
        return config_hash(self.resolved.config)


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """Describe a setting that differs between the resolved arms. It is ``intended`` if the settings of an arm name it."""

    key: str
    a: str
    b: str
    intended: bool


def make_arm(
    name: str, base: Sequence[Path], common: Sequence[str], given: Sequence[str], env: Mapping[str, str]
) -> ResolvedArm:
    """Return the arm with the settings ``given``: ``key=value`` texts and config files, which override the ``base`` files and the
    ``common`` texts. Raises ``ConfigError`` and ``PluginError``, as ``resolve`` does."""
    files = [Path(text) for text in given if _is_file(text)]
    sets = [text for text in given if not _is_file(text)]
    try:
        config, registry = setup([*base, *files], [*common, *sets], env)
        resolved = resolve(config, registry, Machine.detect(config.device))
    except (ConfigError, PluginError) as error:
        hint = f"\nsettings of this arm are given as --{name} KEY=VALUE, those of both arms as --set KEY=VALUE"
        raise type(error)(f"arm {name}: {error}{hint if isinstance(error, ResolutionError) else ''}") from error
    sources = [read(files, (), {}), *(Raw((read_set(text),)) for text in sets)]
    named = {key for raw in sources for key in _leaves(raw.with_sections(registry.sections).tree)}
    return ResolvedArm(name, tuple(given), frozenset(named), config, resolved)


def differences(a: ResolvedArm, b: ResolvedArm) -> list[ConfigDifference]:
    """Return every setting that differs between the resolved configs, those that the arms name first. If the component of a slot
    differs, the settings of that slot are left out, because settings of different components cannot be compared."""
    left, right = flat(a.resolved.config), flat(b.resolved.config)
    named = _contrast(a, b)
    found = [
        ConfigDifference(key.removesuffix(".kind"), left.get(key, "-"), right.get(key, "-"), _covers(named, key))
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key) and not _other_component(key, left, right)
    ]
    return sorted(found, key=lambda d: not d.intended)


def intended_sections(found: Iterable[ConfigDifference]) -> list[str]:
    """Return the sections with intended differences. With more than one, a result cannot be attributed to one of them."""
    return list(dict.fromkeys(d.key.partition(".")[0] for d in found if d.intended))


def flat(config: Config) -> dict[str, str]:
    """Return a config as one text for each setting, by dotted key. Attention is always listed by phase."""
    tree = {key: value for key, value in by_phase(dump(config)).items() if key not in SILENT}
    return {key: _shown(value) for key, value in _flattened(tree, "", selection_keys(config))}


def _flattened(value: Any, key: str, selections: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted key. ``selections`` are the keys at which a plain text is ``none`` or ``auto``."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flattened(inner, f"{key}.{name}" if key else str(name), selections)
    elif key in selections and isinstance(value, str):
        yield f"{key}.kind", value
    else:
        yield key, value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item.get("kind", item)) if isinstance(item, dict) else str(item) for item in value)
    return str(value)


def _other_component(key: str, left: Mapping[str, str], right: Mapping[str, str]) -> bool:
    """Return True for a setting of a slot for which the arms chose different components."""
    section, _, last = key.rpartition(".")
    kind = f"{section}.kind"
    return last != "kind" and kind in {**left, **right} and left.get(kind) != right.get(kind)


def _contrast(a: ResolvedArm, b: ResolvedArm) -> frozenset[str]:
    """Return the keys that only one arm names, or that both name with different values. Two complete config files name many keys with
    the same values."""
    left, right = flat(a.config), flat(b.config)
    return frozenset(key for key in a.named | b.named if _under(key, left) != _under(key, right))


def _under(key: str, settings: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if _covers((key,), name)}


def _covers(named: Iterable[str], key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in named)


def _leaves(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys that a tree in long form names, in the form of the resolved config: a component is one key."""
    for key, _ in _flattened(dict(tree), "", ()):
        section, _, last = key.rpartition(".")
        if key:
            yield section if last in ("kind", "path") else key


def _is_file(text: str) -> bool:
    return "=" not in text and text.endswith(FILE_SUFFIXES)
