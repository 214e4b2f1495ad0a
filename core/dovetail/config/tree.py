"""From a raw tree to a frozen ``Config`` and back.

The sections of plugins are a union discriminated by ``kind``: each component brings its own pydantic class, found
through ``Choices`` and imported only for the components that are named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from dovetail.config.longform import OPTIONAL_SECTIONS, PHASES, PLUGIN_SECTIONS, is_phased, reserved_words
from dovetail.config.plugin import AttentionSelection, GrammarSelection, GrammarSettings, PluginConfig, Selection
from dovetail.config.problems import Problem, from_pydantic, report, suggest
from dovetail.config.sections import Config, PluginsSection
from dovetail.config.sources import Path_, Raw, read
from dovetail.errors import UnknownComponentError


class Choices(Protocol):
    """What the tree asks of the installed components; ``plugins.Registry`` answers. ``kind`` is a section's name."""

    def names(self, kind: str) -> Sequence[str]:
        """The installed names, sorted."""
        ...

    def canonical(self, kind: str, name: str) -> str:
        """The name that ``name``, perhaps an alias, stands for. Raises ``UnknownComponentError``."""
        ...

    def label(self, kind: str, name: str) -> str:
        """How messages call a component, its distribution included."""
        ...

    def config_class(self, kind: str, name: str) -> type[PluginConfig]:
        """The component's own section. Raises ``PluginLoadError``."""
        ...


def load_config(files: Sequence[Path], sets: Sequence[str], env: Mapping[str, str], choices: Choices) -> Config:
    """Read, merge and validate. Raises ``ConfigError`` with every problem at once."""
    return validate(read(files, sets, env), choices)


def validate(raw: Raw, choices: Choices) -> Config:
    """The typed tree. Raises ``ConfigError`` with every problem at once."""
    problems: list[Problem] = []
    tree = {key: value for key, value in raw.tree.items() if key not in PLUGIN_SECTIONS}
    chosen: dict[str, BaseModel] = {}
    for section in PLUGIN_SECTIONS:
        if section in raw.tree:
            chosen[section] = _section(section, raw.tree[section], choices, problems)
    try:
        config = Config.model_validate({**tree, **chosen})
    except ValidationError as error:
        problems = from_pydantic(error, Config, tree, (), "the config") + problems
        raise report(problems, raw) from None
    if problems:
        raise report(problems, raw)
    return config


def plugins_section(raw: Raw) -> PluginsSection:
    """The ``plugins`` section alone: which plugins may load must be known before the others can be validated."""
    given = raw.tree.get("plugins", {})
    try:
        return PluginsSection.model_validate(given)
    except ValidationError as error:
        raise report(from_pydantic(error, PluginsSection, given, ("plugins",), "plugins"), raw) from None


def dump(config: Config) -> dict[str, Any]:
    """``config`` as it could be written in a file: ``load_config`` of it gives an equal config."""
    tree = config.model_dump(mode="json", exclude=set(PLUGIN_SECTIONS))
    for section in PLUGIN_SECTIONS:
        tree[section] = _dump_section(getattr(config, section))
    if not config.experiment.arms:  # so that a config without one keeps its hash
        del tree["experiment"]
    return {key: tree[key] for key in type(config).model_fields if key in tree}


def config_hash(config: Config) -> str:
    """SHA-256 of the config's canonical JSON: equal configs have equal hashes, on any machine."""
    return hashlib.sha256(json.dumps(dump(config), sort_keys=True).encode()).hexdigest()


def _section(section: str, value: Any, choices: Choices, problems: list[Problem]) -> BaseModel:
    if section == "grammar":
        return _grammar(value, choices, problems)
    if section != "attention":
        return _selection(section, value, (section,), choices, problems)
    if not is_phased(value):
        both = _selection(section, value, (section,), choices, problems)
        return AttentionSelection(prefill=both, decode=both)
    for key in value:
        if key not in PHASES:
            text = f" is no key of attention by phase; allowed: {', '.join(PHASES)}{suggest(key, PHASES)}"
            problems.append(Problem((section, key), text))
    phases = {p: _selection(section, value[p], (section, p), choices, problems) for p in PHASES if p in value}
    return AttentionSelection(**phases)


def _grammar(value: dict[str, Any], choices: Choices, problems: list[Problem]) -> GrammarSelection:
    path: Path_ = ("grammar",)
    given = {key: setting for key, setting in value.items() if key != "backend"}
    allowed = ["backend", *GrammarSettings.model_fields]
    for key in given.keys() - allowed:
        text = f" is no key of grammar; allowed: {', '.join(allowed)}{suggest(key, allowed)}"
        problems.append(Problem((*path, key), text))
    known = {key: setting for key, setting in given.items() if key in allowed}
    chosen = Selection()
    if "backend" in value:
        chosen = _selection("grammar", value["backend"], (*path, "backend"), choices, problems)
    try:
        settings = GrammarSettings.model_validate(known)
    except ValidationError as error:
        problems += from_pydantic(error, GrammarSettings, known, path, "grammar")
        settings = GrammarSettings()
    return GrammarSelection(**dict(settings), disabled=chosen.disabled, candidates=chosen.candidates)


def _selection(section: str, value: Any, path: Path_, choices: Choices, problems: list[Problem]) -> Selection:
    if isinstance(value, dict) and value == {"kind": "auto"}:
        return Selection()
    if section in OPTIONAL_SECTIONS and value == {"kind": "none"}:
        return Selection(disabled=True)
    if not isinstance(value, list):
        candidate = _candidate(section, value, path, choices, problems)
        return Selection(candidates=(candidate,) if candidate else ())
    if not value:
        problems.append(Problem(path, f" is an empty list; {_forms(section, choices)}"))
    candidates = [_candidate(section, item, (*path, i), choices, problems) for i, item in enumerate(value)]
    return Selection(candidates=tuple(candidate for candidate in candidates if candidate))


def _candidate(section: str, value: Any, path: Path_, choices: Choices, problems: list[Problem]) -> PluginConfig | None:
    if not isinstance(value, dict):
        problems.append(Problem(path, f" is {value!r}; {_forms(section, choices)}"))
        return None
    if "kind" not in value:
        problems.append(Problem(path, f" has no `kind` (given {value}); {_forms(section, choices)}"))
        return None
    kind = value["kind"]
    if not isinstance(kind, str):
        problems.append(Problem((*path, "kind"), f" is {kind!r}; {_forms(section, choices)}"))
        return None
    if kind in reserved_words(section):
        problems.append(Problem((*path, "kind"), f" is {kind!r}, which stands alone and takes no settings"))
        return None
    try:
        name = choices.canonical(section, kind)
    except UnknownComponentError as error:
        problems.append(Problem((*path, "kind"), f": {error}"))
        return None
    return _component(section, name, value, path, choices, problems)


def _component(
    section: str, name: str, value: dict[str, Any], path: Path_, choices: Choices, problems: list[Problem]
) -> PluginConfig | None:
    cls = choices.config_class(section, name)
    given = {**value, "kind": name}
    try:
        return cls.model_validate(given)
    except ValidationError as error:
        problems += from_pydantic(error, cls, given, path, choices.label(section, name))
        return None


def _forms(section: str, choices: Choices) -> str:
    names = ", ".join(dict.fromkeys([*reserved_words(section), *choices.names(section)]))
    return f"allowed: one of {names}, or a mapping or list of them, as in {section}: {{kind: name, ...}}"


def _dump_section(selection: Selection | AttentionSelection) -> Any:
    if isinstance(selection, GrammarSelection):
        settings = {key: getattr(selection, key) for key in GrammarSettings.model_fields}
        return {"backend": _dump_selection(selection), **settings}
    if isinstance(selection, Selection):
        return _dump_selection(selection)
    if selection.prefill == selection.decode:
        return _dump_selection(selection.prefill)
    return {phase: _dump_selection(getattr(selection, phase)) for phase in PHASES}


def _dump_selection(selection: Selection) -> Any:
    if selection.disabled:
        return "none"
    trees = [candidate.model_dump(mode="json") for candidate in selection.candidates]
    return trees[0] if len(trees) == 1 else trees or "auto"
