"""Turn a raw tree into a frozen ``Config``, and back.

The sections that select components are unions discriminated by ``kind``: each component has its own pydantic class,
which is found through ``Choices`` and imported only for the components that the config names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from dovetail.config.kinds import BACKEND, BUILT_IN, KindSection, Sections
from dovetail.config.plugin import PhasedSelection, PluginConfig, Section, Selection
from dovetail.config.problems import ConfigProblem, from_pydantic, report, suggest, unknown_key
from dovetail.config.sections import Config, PluginsSection
from dovetail.config.sources import Path_, Raw, read
from dovetail.errors import UnknownComponentError

OPEN = "kinds"
"""The field of ``Config`` that holds the sections of third-party kinds. In a config file each section has its own
key."""


class Choices(Protocol):
    """Define the access to installed components that validation needs. ``registry.Registry`` implements it. ``kind`` is
    the key of a section."""

    @property
    def sections(self) -> Sections:
        """Return the sections of all kinds that have one."""
        ...

    @property
    def absent(self) -> Sequence[str]:
        """Return a text for each plugin that did not load, with the reason."""
        ...

    def names(self, kind: str) -> Sequence[str]:
        """Return the installed names, sorted."""
        ...

    def canonical(self, kind: str, name: str) -> str:
        """Return the name that ``name``, which may be an alias, stands for. Raises ``UnknownComponentError``."""
        ...

    def label(self, kind: str, name: str) -> str:
        """Return the component's name in messages, including its distribution."""
        ...

    def config_class(self, kind: str, name: str) -> type[PluginConfig]:
        """Return the component's own section. Raises ``PluginLoadError``."""
        ...


def load_config(files: Sequence[Path], sets: Sequence[str], env: Mapping[str, str], choices: Choices) -> Config:
    """Read, merge and validate. Raises ``ConfigError`` with every problem at once."""
    return validate(read(files, sets, env), choices)


def validate(raw: Raw, choices: Choices) -> Config:
    """Return the typed tree. Raises ``ConfigError`` with every problem at once."""
    raw = raw.with_sections(choices.sections)
    by_key = {section.key: section for section in choices.sections}
    problems: list[ConfigProblem] = []
    chosen: dict[str, Section] = {}
    for key, section in by_key.items():
        if key in raw.tree:
            chosen[key] = _Reader(section, choices, problems).read(raw.tree[key])
    known = [key for key in Config.model_fields if key != OPEN]
    others = {key: chosen.get(key, section.value) for key, section in by_key.items() if key not in known}
    tree = {key: value for key, value in raw.tree.items() if key in known and key not in by_key}
    given = {**tree, **{key: value for key, value in chosen.items() if key in known}, OPEN: others}
    allowed = [*known, *others]
    unknown = [ConfigProblem((key,), _unknown_key(key, allowed, choices)) for key in raw.tree if key not in allowed]
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        problems = [*from_pydantic(error, Config, given, (), "the config"), *unknown, *problems]
        raise report(problems, raw) from None
    if unknown or problems:
        raise report([*unknown, *problems], raw)
    return config


def _unknown_key(key: str, allowed: Sequence[str], choices: Choices) -> str:
    """Return the text of the problem, with the plugins that did not load if none of the keys resembles ``key``: it may be the
    section of a kind of theirs."""
    text = unknown_key(key, allowed, "the config")
    if suggest(key, allowed) or not choices.absent:
        return text
    return f"{text}. Kinds of plugins that did not load are not known: {'; '.join(choices.absent)}"


def plugins_section(raw: Raw) -> PluginsSection:
    """Return the ``plugins`` section. It is validated first, because plugins must be loaded before other sections can
    be validated."""
    given = raw.tree.get("plugins", {})
    try:
        return PluginsSection.model_validate(given)
    except ValidationError as error:
        raise report(from_pydantic(error, PluginsSection, given, ("plugins",), "plugins"), raw) from None


def dump(config: Config) -> dict[str, Any]:
    """Return ``config`` as it could be written in a file: ``load_config`` of it gives an equal config."""
    values = {key: getattr(config, key) for key in type(config).model_fields}
    selections = {key: value for key, value in values.items() if isinstance(value, Selection | PhasedSelection)}
    rest = config.model_dump(mode="json", exclude={*selections, OPEN})
    if not config.experiment.arms:  # so that a config without an experiment keeps its hash
        del rest["experiment"]
    tree = {**rest, **{key: _dump_section(value) for key, value in selections.items()}}
    ordered = {key: tree[key] for key in values if key in tree}
    return ordered | {key: _dump_section(config.kinds[key]) for key in sorted(config.kinds)}


def config_hash(config: Config) -> str:
    """Return the SHA-256 of the config's canonical JSON: equal configs have equal hashes, on any machine. An installed kind
    that is switched off does not count."""
    unused = {key for key, selection in config.kinds.items() if selection.disabled}
    tree = {key: value for key, value in dump(config).items() if key not in unused}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def component_keys(config: Config) -> tuple[str, ...]:
    """Return the top-level keys of ``config`` that select components."""
    return (*(section.key for section in BUILT_IN), *config.kinds)


def selection_keys(config: Config) -> tuple[str, ...]:
    """Return the dotted keys under which ``dump`` writes selections. A section by phase or with settings has them
    below its own key."""
    keys = [key for section in BUILT_IN for key in _places(section)]
    return (*keys, *config.kinds)


def _places(section: KindSection) -> list[str]:
    below = (BACKEND,) if section.settings is not None else section.phases
    return [f"{section.key}.{word}" for word in below] or [section.key]


def by_phase(tree: dict[str, Any]) -> dict[str, Any]:
    """Return what ``dump`` wrote, with each section that may differ by phase written out by phase."""
    sections = [section for section in BUILT_IN if section.phases and not section.is_phased(tree[section.key])]
    return tree | {section.key: dict.fromkeys(section.phases, tree[section.key]) for section in sections}


class _Reader(NamedTuple):
    """Read one section, and add what is wrong with it to ``problems``."""

    section: KindSection
    choices: Choices
    problems: list[ConfigProblem]

    @property
    def key(self) -> str:
        return self.section.key

    def read(self, value: Any) -> Section:
        """Return the section's selection for ``value`` (long form)."""
        if self.section.settings is not None:
            return self._with_settings(value, self.section.settings)
        if not self.section.phases:
            return self._selection(value, (self.key,))
        if self.section.is_phased(value):
            return self._phased(value)
        one = self._selection(value, (self.key,))
        return self.section.selection(**dict.fromkeys(self.section.phases, one))

    def _phased(self, value: dict[str, Any]) -> Section:
        phases = self.section.phases
        for key in value:
            if key not in phases:
                text = f" is not a key of {self.key} by phase; allowed: {', '.join(phases)}{suggest(key, phases)}"
                self.problems.append(ConfigProblem((self.key, key), text))
        chosen = {p: self._selection(value[p], (self.key, p)) for p in phases if p in value}
        return self.section.selection(**chosen)

    def _with_settings(self, value: dict[str, Any], settings: type[Section]) -> Section:
        path: Path_ = (self.key,)
        given = {key: setting for key, setting in value.items() if key != BACKEND}
        allowed = [BACKEND, *settings.model_fields]
        for key in given.keys() - allowed:
            text = f" is not a key of {self.key}; allowed: {', '.join(allowed)}{suggest(key, allowed)}"
            self.problems.append(ConfigProblem((*path, key), text))
        known = {key: setting for key, setting in given.items() if key in allowed}
        chosen = Selection()
        if BACKEND in value:
            chosen = self._selection(value[BACKEND], (*path, BACKEND))
        try:
            checked = settings.model_validate(known)
        except ValidationError as error:
            self.problems.extend(from_pydantic(error, settings, known, path, self.key))
            checked = settings()
        return self.section.selection.model_validate({**dict(checked), **dict(chosen)})

    def _selection(self, value: Any, path: Path_) -> Selection:
        if isinstance(value, dict) and value == {"kind": "auto"}:
            return Selection()
        if self.section.optional and value == {"kind": "none"}:
            return Selection(disabled=True)
        if not isinstance(value, list):
            candidate = self._candidate(value, path)
            return Selection(candidates=(candidate,) if candidate else ())
        if not value:
            self.problems.append(ConfigProblem(path, f" is an empty list; {self._forms()}"))
        candidates = [self._candidate(item, (*path, i)) for i, item in enumerate(value)]
        return Selection(candidates=tuple(candidate for candidate in candidates if candidate))

    def _candidate(self, value: Any, path: Path_) -> PluginConfig | None:
        kind = value.get("kind") if isinstance(value, dict) else None
        if not isinstance(value, dict):
            self.problems.append(ConfigProblem(path, f" is {value!r}; {self._forms()}"))
        elif "kind" not in value:
            self.problems.append(ConfigProblem(path, f" has no `kind` (given {value}); {self._forms()}"))
        elif not isinstance(kind, str):
            self.problems.append(ConfigProblem((*path, "kind"), f" is {kind!r}; {self._forms()}"))
        elif kind in self.section.reserved:
            text = f" is {kind!r}, which stands alone and takes no settings"
            self.problems.append(ConfigProblem((*path, "kind"), text))
        else:
            return self._component(kind, value, path)
        return None

    def _component(self, kind: str, value: dict[str, Any], path: Path_) -> PluginConfig | None:
        try:
            name = self.choices.canonical(self.key, kind)
        except UnknownComponentError as error:
            self.problems.append(ConfigProblem((*path, "kind"), f": {error}"))
            return None
        cls = self.choices.config_class(self.key, name)
        given = {**value, "kind": name}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            self.problems.extend(from_pydantic(error, cls, given, path, self.choices.label(self.key, name)))
            return None

    def _forms(self) -> str:
        names = ", ".join(dict.fromkeys([*self.section.reserved, *self.choices.names(self.key)]))
        return f"allowed: one of {names}, or a mapping or list of them, as in {self.key}: {{kind: name, ...}}"


def _dump_section(selection: Section) -> Any:
    if isinstance(selection, PhasedSelection):
        phases = [getattr(selection, phase) for phase in type(selection).model_fields]
        if all(phase == phases[0] for phase in phases):
            return _dump_selection(phases[0])
        return {phase: _dump_selection(getattr(selection, phase)) for phase in type(selection).model_fields}
    assert isinstance(selection, Selection)
    settings = [key for key in type(selection).model_fields if key not in Selection.model_fields]
    if not settings:
        return _dump_selection(selection)
    return {BACKEND: _dump_selection(selection), **{key: getattr(selection, key) for key in settings}}


def _dump_selection(selection: Selection) -> Any:
    if selection.disabled:
        return "none"
    trees = [candidate.model_dump(mode="json") for candidate in selection.candidates]
    return trees[0] if len(trees) == 1 else trees or "auto"
