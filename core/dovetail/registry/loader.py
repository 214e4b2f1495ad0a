"""Load plugins from their entry points. Only this module reads entry points.

pluggy's own loader stops at the first plugin that cannot be imported. This one applies the policy to names before
anything is imported, and records for each plugin how loading ended: loaded, blocked, incompatible or failed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import pluggy

from dovetail.config import PluginsSection
from dovetail.config.problems import suggest
from dovetail.errors import ConfigError, PluginError, PluginLoadError, RequestError
from dovetail.registry import builtin, hookspecs
from dovetail.registry.checks import api_fault, faults
from dovetail.registry.installed import DuplicateName, PluginRecord, PluginStatus, RegisteredComponent, Registry
from dovetail.registry.kinds import Kinds

log = logging.getLogger(__name__)

_REGISTERS = ("register_kinds", "register_features", "register_components")


class InstalledDistribution(Protocol):
    """Describe the part of ``importlib.metadata.Distribution`` that is read."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


class PluginEntry(Protocol):
    """Describe the part of ``importlib.metadata.EntryPoint`` that is read; tests pass their own."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def dist(self) -> InstalledDistribution | None: ...
    def load(self) -> Any: ...


def installed_plugins() -> list[PluginEntry]:
    """Return every entry point in the group ``dovetail.plugins``; import none."""
    return cast("list[PluginEntry]", list(importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)))


def load_plugins(
    policy: PluginsSection, entries: Iterable[PluginEntry] | None = None, *, strict: bool = True
) -> Registry:
    """Load what ``policy`` allows. Raises ``ConfigError`` for a name in ``allow`` or ``require`` that is not
    installed, and ``PluginLoadError`` if a required plugin does not load, but not if ``strict`` is False, for commands
    that report what is wrong. A name that two components claim selects neither of them (``Registry.duplicates``)."""
    found = sorted(installed_plugins() if entries is None else entries, key=lambda entry: (_dist(entry), entry.name))
    if strict:
        _check_names(policy, found)
    loader = _Loader(policy)
    registry = loader.registry(found)
    if strict:
        _check_required(policy, registry.plugins)
    return registry


def _dist(entry: PluginEntry) -> str:
    return _about(entry.dist)[0] if entry.dist else "unknown"


@functools.lru_cache(64)
def _about(dist: InstalledDistribution) -> tuple[str, str]:
    """Return the name and the version of a distribution. They are cached, because they are read often and the metadata
    would be parsed each time."""
    return dist.name, dist.version


def _is_named(name: str, distribution: str, names: Iterable[str]) -> bool:
    wanted = {normal(given) for given in names}
    return normal(name) in wanted or normal(distribution) in wanted


def normal(name: str) -> str:
    """Return the name of a distribution or plugin in the form in which names are compared."""
    return name.lower().replace("_", "-").replace(".", "-")


def _check_names(policy: PluginsSection, entries: Sequence[PluginEntry]) -> None:
    installed = sorted({entry.name for entry in entries} | {_dist(entry) for entry in entries})
    known = {normal(name) for name in installed}
    for key in ("allow", "require"):
        for name in getattr(policy, key) or ():
            if normal(name) not in known:
                raise ConfigError(
                    f"plugins.{key} names {name!r}, which is not installed; installed: "
                    f"{', '.join(installed) or 'none'}{suggest(name, installed)}"
                )


def _check_required(policy: PluginsSection, records: Sequence[PluginRecord]) -> None:
    for record in records:
        if _is_named(record.name, record.distribution, policy.require) and record.status is not PluginStatus.LOADED:
            raise PluginLoadError(
                f"plugins.require names {record.name!r} of {record.distribution} {record.version}, which is "
                f"{record.status}: {record.reason}" + (f"\n{record.traceback}" if record.traceback else "")
            )


def _blocked(entry: PluginEntry, policy: PluginsSection) -> str | None:
    named = (entry.name, _dist(entry))
    if _is_named(*named, policy.deny):
        return "plugins.deny names it"
    if policy.allow is not None:
        return None if _is_named(*named, policy.allow) else "plugins.allow does not name it"
    if not policy.autoload and not _is_named(*named, policy.require):
        return "plugins.autoload is off and no list names it"
    return None


@dataclass(slots=True)
class _Plugin:
    """Hold one entry point while it loads: its module, or the record that explains why it has none."""

    entry: PluginEntry
    module: Any = None
    record: PluginRecord | None = None
    kinds: Sequence[Any] = ()
    features: Sequence[Any] = ()
    components: list[RegisteredComponent] = field(default_factory=list)


class _Loader:
    """Load plugins in three rounds: import the modules, register their kinds and features, register their components."""

    def __init__(self, policy: PluginsSection) -> None:
        self._policy = policy
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._kinds = Kinds()
        self._kinds.add(builtin.register_kinds(), builtin.register_features(), "Dovetail")

    def registry(self, entries: Sequence[PluginEntry]) -> Registry:
        """Return the registry of ``entries``."""
        plugins = [self._imported(entry) for entry in entries]
        self._register_kinds(plugins)
        for plugin in plugins:
            if plugin.record is None:
                self._tried(plugin, self._register_components)
        records = [plugin.record or _outcome(plugin.entry, plugin.components) for plugin in plugins]
        components = [component for plugin in plugins for component in plugin.components]
        table, duplicates = _by_name(components)
        for duplicate in duplicates.values():
            log.warning("%s. Until then neither of them is used", duplicate.text)
        return Registry(records, table, self._kinds, self._manager.hook, duplicates)

    def _imported(self, entry: PluginEntry) -> _Plugin:
        """Import a plugin's module, if it may load, and register its hooks with pluggy, which checks their arguments."""
        blocked = _blocked(entry, self._policy)
        if blocked:
            fix = "change the plugins section to load it"
            return _Plugin(entry, record=_record(entry, PluginStatus.BLOCKED, blocked, fix))
        try:
            module = entry.load()
        except Exception as error:
            reason, fix = _text(error), _import_fix(error, entry)
            return _Plugin(entry, record=_record(entry, PluginStatus.FAILED, reason, fix, trace=_trace()))
        try:
            _register_hooks(self._manager, module, entry)
        except (PluginLoadError, pluggy.PluginValidationError, ValueError) as error:
            return _Plugin(entry, record=_record(entry, PluginStatus.INCOMPATIBLE, str(error), _update(entry)))
        return _Plugin(entry, module)

    def _tried(self, plugin: _Plugin, step: Callable[[_Plugin], None]) -> bool:
        """Return True if ``step`` succeeds. If it raises, the plugin has failed."""
        try:
            step(plugin)
        except Exception as error:
            self._manager.unregister(plugin.module)
            fix = f"report it to {_dist(plugin.entry)}"
            plugin.record = _record(plugin.entry, PluginStatus.FAILED, _text(error), fix, trace=_trace())
        return plugin.record is None

    def _register_kinds(self, plugins: Sequence[_Plugin]) -> None:
        """Register kinds and features. A plugin may build on the kinds and features of any other, so one that is refused is tried
        again as long as others register."""
        waiting = [plugin for plugin in plugins if plugin.record is None and self._tried(plugin, self._declare)]
        while refused := [plugin for plugin in waiting if not self._can_add(plugin)]:
            if len(refused) == len(waiting):
                break
            waiting = refused
        for plugin in refused:
            self._tried(plugin, self._add_declared)

    def _declare(self, plugin: _Plugin) -> None:
        plugin.kinds, plugin.features = (
            self._returned(plugin, hook) for hook in ("register_kinds", "register_features")
        )

    def _can_add(self, plugin: _Plugin) -> bool:
        try:
            self._add_declared(plugin)
        except Exception:
            return False
        return True

    def _add_declared(self, plugin: _Plugin) -> None:
        self._kinds.add(plugin.kinds, plugin.features, _dist(plugin.entry))

    def _register_components(self, plugin: _Plugin) -> None:
        entry, components = plugin.entry, []
        for spec in self._returned(plugin, "register_components"):
            _refuse(faults(spec, self._kinds), spec)
            descriptor = self._kinds[spec.kind]
            fault = api_fault(spec, descriptor)
            components.append(RegisteredComponent(spec, _dist(entry), _version(entry), entry.name, descriptor, fault))
        plugin.components = components

    def _returned(self, plugin: _Plugin, hook: str) -> Sequence[Any]:
        """Return what a plugin's own implementation of a hook returns; nothing if it has none."""
        implementations = getattr(self._manager.hook, hook).get_hookimpls()
        return [
            value
            for implementation in implementations
            if implementation.plugin is plugin.module
            for value in _sequence(implementation.function(), hook)
        ]


def _outcome(entry: PluginEntry, components: Sequence[RegisteredComponent]) -> PluginRecord:
    """Return the record of a plugin that has registered: loaded, unless every component was built for another
    version of its interface."""
    names = tuple(f"{component.spec.kind}/{component.spec.name}" for component in components)
    unusable = [
        f"{component.spec.name}: {component.incompatible}" for component in components if component.incompatible
    ]
    if components and len(unusable) == len(components):
        return _record(entry, PluginStatus.INCOMPATIBLE, "; ".join(unusable), _update(entry), names)
    return _record(entry, PluginStatus.LOADED, "; ".join(unusable), components=names)


def _record(
    entry: PluginEntry,
    status: PluginStatus,
    reason: str,
    fix: str = "",
    components: tuple[str, ...] = (),
    trace: str = "",
) -> PluginRecord:
    return PluginRecord(entry.name, _dist(entry), _version(entry), entry.value, status, reason, fix, trace, components)


def _version(entry: PluginEntry) -> str:
    return _about(entry.dist)[1] if entry.dist else "unknown"


def _trace() -> str:
    return traceback.format_exc()


def _update(entry: PluginEntry) -> str:
    return f"pip install --upgrade {_dist(entry)}, or update dovetail"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, PluginLoadError) else str(error)


def _import_fix(error: Exception, entry: PluginEntry) -> str:
    missing = error.name if isinstance(error, ImportError) and error.name else ""
    if missing.partition(".")[0] == "dovetail":  # a module or name of another version of Dovetail
        return _update(entry)
    if isinstance(error, ModuleNotFoundError) and missing and not entry.value.startswith(missing):
        return f"pip install {missing.partition('.')[0].replace('_', '-')}"
    return f"pip install --force-reinstall {_dist(entry)}, or plugins.deny: [{entry.name}]"


def _register_hooks(manager: pluggy.PluginManager, module: Any, entry: PluginEntry) -> None:
    """Register with pluggy, which checks arguments. A hook that is not declared is refused as well."""
    _refuse_unknown_hooks(manager, module)
    try:
        manager.register(module, f"{_dist(entry)}:{entry.name}")
        manager.check_pending()
    except pluggy.PluginValidationError:
        if manager.is_registered(module):
            manager.unregister(module)
        raise
    for caller in manager.get_hookcallers(module) or ():
        for implementation in caller.get_hookimpls():
            if implementation.plugin is module and not (implementation.wrapper or implementation.hookwrapper):
                named = _naming(implementation.function, caller.name, f"plugin {entry.name!r} of {_named(entry)}")
                implementation.function = named  # pyright: ignore[reportAttributeAccessIssue]


def _naming(function: Callable[..., Any], hook: str, plugin: str) -> Callable[..., Any]:
    """Return ``function`` so that its exceptions name the plugin. Errors that a hook may raise are unchanged, and the
    loader handles those of ``register_kinds``, ``register_features`` and ``register_components``."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (RequestError, PluginError) as error:
            error.add_note(f"raised by the hook {hook} of {plugin}")
            raise
        except Exception as error:
            raise PluginError(f"the hook {hook} of {plugin} raised {type(error).__name__}: {error}") from error

    return function if hook in _REGISTERS else call


def _named(entry: PluginEntry) -> str:
    return f"{_dist(entry)} {_version(entry)}"


def _refuse_unknown_hooks(manager: pluggy.PluginManager, module: Any) -> None:
    """Raise ``PluginLoadError`` if a function of ``module`` is marked as a hook and implements none."""
    known = [hook for hook in vars(hookspecs) if manager.parse_hookspec_opts(hookspecs, hook) is not None]
    marked = {name: manager.parse_hookimpl_opts(module, name) for name in dir(module)}
    hooks = [options["specname"] or name for name, options in marked.items() if options and not options["optionalhook"]]
    unknown = [hook for hook in hooks if hook not in known]
    if unknown:
        text = f"it implements {', '.join(unknown)}, which this dovetail does not call; hooks: {', '.join(known)}"
        text += "".join(dict.fromkeys(suggest(hook, known) for hook in unknown))
        if any(hook.startswith("register_") for hook in unknown):
            text += ". Components of every kind are returned by register_components"
        raise PluginLoadError(text)
    unmarked = [name for name, options in marked.items() if options is None and _is_own_function(module, name)]
    forgotten = [name for name in unmarked if name in known]
    if forgotten:
        raise PluginLoadError(
            f"it defines {', '.join(forgotten)} without @hookimpl, so nothing calls it; put @hookimpl (from "
            "dovetail.registry.hookspecs) above it, or give it another name if it is no hook"
        )
    meant = {} if hooks else {name: suggest(name, known) for name in unmarked}
    for name, hint in meant.items():
        if hint:
            raise PluginLoadError(
                f"it implements no hook, and defines {name} without @hookimpl{hint} (with @hookimpl from "
                "dovetail.registry.hookspecs)"
            )


def _is_own_function(module: Any, name: str) -> bool:
    """Return True if ``module`` itself defines the function ``name``."""
    value = getattr(module, name, None)
    return inspect.isfunction(value) and value.__module__ == getattr(module, "__name__", None)


def _sequence(value: Any, hook: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise PluginLoadError(f"{hook} returned {value!r:.80}; expected a list")
    return value


def _refuse(reasons: Sequence[str], spec: Any) -> None:
    if reasons:
        name = getattr(spec, "name", spec)
        raise PluginLoadError(f"register_components: spec {name!r} is wrong: {'; '.join(reasons)}")


def _by_name(
    components: Sequence[RegisteredComponent],
) -> tuple[dict[str, dict[str, RegisteredComponent]], dict[tuple[str, str], DuplicateName]]:
    """Return the components by kind and name, and a record of each name that several of them claim."""
    claims: dict[tuple[str, str], list[RegisteredComponent]] = {}
    for component in components:
        claims.setdefault((component.spec.kind, component.spec.name), []).append(component)
    table: dict[str, dict[str, RegisteredComponent]] = {}
    duplicates: dict[tuple[str, str], DuplicateName] = {}
    for (kind, name), claimants in claims.items():
        replaced = {normal(c.spec.replace) for c in claimants if c.spec.replace}
        left = [c for c in claimants if normal(c.distribution) not in replaced]
        if len(left) == 1:
            table.setdefault(kind, {})[name] = left[0]
        else:
            duplicates[kind, name] = _duplicate(claimants)
    return table, duplicates


def _duplicate(claimants: Sequence[RegisteredComponent]) -> DuplicateName:
    spec = claimants[0].spec
    sides = " and ".join(f"plugin {c.plugin!r} of {c.distribution} {c.version}" for c in claimants)
    return DuplicateName(
        tuple(c.distribution for c in claimants),
        f"{spec.kind} {spec.name!r} is claimed by {sides}; deny one of them (plugins.deny: [{claimants[-1].plugin}]), or "
        f'set replace="{claimants[0].distribution}" in the spec that should be used',
    )
