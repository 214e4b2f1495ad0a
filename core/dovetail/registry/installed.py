"""Hold the installed plugins with their status, and the installed components with their origin."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import pluggy

from dovetail.config import PluginConfig
from dovetail.config.kinds import Sections
from dovetail.config.problems import suggest
from dovetail.errors import DuplicateComponentError, PluginLoadError, ResolutionError, UnknownComponentError
from dovetail.registry.kinds import Kinds
from dovetail.registry.specs import ComponentSpec, KindDescriptor
from dovetail.registry.targets import load_attribute


class PluginStatus(enum.StrEnum):
    """Enumerate how loading a plugin can end."""

    LOADED = "loaded"
    BLOCKED = "blocked"
    INCOMPATIBLE = "incompatible"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """Describe one entry point: where it comes from and how loading it ended. If it did not load, ``reason`` is the
    reason, ``fix`` is what to do about it, and ``traceback`` is the traceback of the plugin's exception."""

    name: str
    distribution: str
    version: str
    target: str
    status: PluginStatus
    reason: str = ""
    fix: str = ""
    traceback: str = ""
    components: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RegisteredComponent:
    """Hold a component and where it comes from. ``descriptor`` describes its kind. ``incompatible`` is the reason why
    its interface version cannot be used, or None."""

    spec: ComponentSpec
    distribution: str
    version: str
    plugin: str
    descriptor: KindDescriptor
    incompatible: str | None = None

    @property
    def status(self) -> PluginStatus:
        """Return ``loaded`` or ``incompatible``."""
        return PluginStatus.INCOMPATIBLE if self.incompatible else PluginStatus.LOADED

    @property
    def label(self) -> str:
        """Return what messages call the component: its kind, name and distribution."""
        return f"{self.spec.kind} {self.spec.name!r} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class DuplicateName:
    """Name the distributions that claim the same kind and name. ``text`` says what to do about it."""

    distributions: tuple[str, ...]
    text: str


class Registry:
    """Hold the installed components by kind and name. ``load_plugins`` makes it, and nothing changes it afterwards.

    It satisfies ``config.Choices``. ``duplicates`` has the (kind, name) pairs that several plugins claim; no
    component has such a name, and selecting it is an error. ``kinds`` are the registered kinds and features; ``hooks`` calls the hooks of the
    loaded plugins. A registry does not cross process boundaries: another process makes its own from the same config.
    """

    def __init__(
        self,
        plugins: Sequence[PluginRecord],
        components: Mapping[str, Mapping[str, RegisteredComponent]],
        kinds: Kinds,
        hooks: pluggy.HookRelay,
        duplicates: Mapping[tuple[str, str], DuplicateName] | None = None,
    ) -> None:
        self.plugins = tuple(plugins)
        self.hooks = hooks
        self.kinds = kinds
        self.duplicates = dict(duplicates or {})
        self._components = {kind: dict(sorted(components.get(kind, {}).items())) for kind in kinds.names}

    @property
    def sections(self) -> Sections:
        """Return the config sections of all kinds."""
        return self.kinds.sections

    @property
    def absent(self) -> list[str]:
        """Return a text for each plugin that did not load and registered no component, with the reason."""
        absent = [p for p in self.plugins if p.status is not PluginStatus.LOADED and not p.components]
        return [f"{p.name} of {p.distribution} ({p.status}: {p.reason})" for p in absent]

    def with_absent(self, error: ResolutionError) -> ResolutionError:
        """Return ``error`` with the plugins that did not load, one of which may have what is missing."""
        if not self.absent:
            return error
        lines = [str(error), "plugins that did not load, one of which may have what is missing:"]
        return ResolutionError("\n".join([*lines, *(f"  - {plugin}" for plugin in self.absent)]))

    @property
    def every_component(self) -> list[RegisteredComponent]:
        """Return every component, by kind and name."""
        return [component for kind in self.kinds.names for component in self.components(kind)]

    def components(self, kind: str) -> tuple[RegisteredComponent, ...]:
        """Return every component of a kind, sorted by name. Raises ``UnknownComponentError`` for a kind that does
        not exist."""
        return tuple(self._components[self.kinds[kind].kind].values())

    def names(self, kind: str) -> list[str]:
        """Return the names of a kind's components, sorted."""
        return list(self._components[self.kinds[kind].kind])

    def get(self, kind: str, name: str) -> RegisteredComponent:
        """Return the component of this name or alias. Raises ``UnknownComponentError``, and
        ``DuplicateComponentError`` for a name that several plugins claim."""
        if (str(kind), name) in self.duplicates:
            raise DuplicateComponentError(self.duplicates[str(kind), name].text)
        found = self._components[self.kinds[kind].kind].get(name)
        aliased = [found] if found else self.aliased(kind, name)
        if len(aliased) == 1:
            return aliased[0]
        if aliased:
            names = ", ".join(component.spec.name for component in aliased)
            raise UnknownComponentError(f"{kind} {name!r} is an alias of several components; choose one of: {names}")
        raise UnknownComponentError(self._unknown(kind, name))

    def aliased(self, kind: str, alias: str) -> list[RegisteredComponent]:
        """Return every component that lists this alias, sorted by name."""
        return [component for component in self.components(kind) if alias in component.spec.aliases]

    def canonical(self, kind: str, name: str) -> str:
        """Return the name that ``name``, which may be an alias, stands for. Raises ``UnknownComponentError``."""
        return self.get(kind, name).spec.name

    def label(self, kind: str, name: str) -> str:
        """Return what messages call a component: its kind, name and distribution."""
        return self.get(kind, name).label

    def config_class(self, kind: str, name: str) -> type[PluginConfig]:
        """Import and return the component's own section. Raises ``PluginLoadError``, also if its ``kind`` is not a
        Literal of the component's name."""
        return load_config_class(self.get(kind, name))

    def _unknown(self, kind: str, name: str) -> str:
        names = self.names(kind)
        known = [*names, *(alias for component in self.components(kind) for alias in component.spec.aliases)]
        text = f"no {kind} component is called {name!r}; installed: {', '.join(names) or 'none'}{suggest(name, known)}"
        return f"{text}. Plugins that did not load: {'; '.join(self.absent)}" if self.absent else text


def load_config_class(component: RegisteredComponent) -> type[PluginConfig]:
    """Import and return a component's own section. Raises ``PluginLoadError``."""
    name = component.spec.name
    cls = load_attribute(component.spec.config, component.label)
    if not (isinstance(cls, type) and issubclass(cls, PluginConfig)):
        raise PluginLoadError(f"{component.label}: config is {cls!r}; expected a subclass of PluginConfig")
    field = cls.model_fields["kind"]
    if get_args(field.annotation) != (name,) or field.default != name:
        raise PluginLoadError(
            f"{component.label}: {component.spec.config} has `kind: {field.annotation} = {field.default!r}`; "
            f"expected `kind: Literal[{name!r}] = {name!r}`"
        )
    return cls
