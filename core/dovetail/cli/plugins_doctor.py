"""Show what is installed, blocked, broken or missing, and the command that fixes it: ``dovetail plugins doctor``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dovetail.cli.sources import FileOptions, Json, Sets
from dovetail.config.kinds import BACKEND

if TYPE_CHECKING:
    from dovetail.config import PluginsSection
    from dovetail.registry import KindDescriptor, RegisteredComponent, Registry


@dataclass(frozen=True, slots=True)
class Finding:
    """Describe the state of a plugin, a component or a name that the config uses. ``why`` is the reason and ``fix`` the
    command that fixes it. If a finding is ``broken``, the exit status is 1. A component whose requirements are missing
    is broken only if the config names it."""

    what: str
    status: str
    why: str = ""
    fix: str = ""
    broken: bool = False


def doctor(files: FileOptions = None, sets: Sets = None, as_json: Json = False) -> None:
    """Show the state of every plugin and component, and of components that the config names and no plugin provides,
    with the reason and the command that fixes it. Every component is imported, compared with its interface and, where
    that needs neither a device nor a model, built. The exit status is 1 if something is broken or missing."""
    findings, registry = examined_plugins(files, sets)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        typer.echo(json.dumps({"findings": rows, "broken": any(f.broken for f in findings)}, indent=2))
    else:
        _print(findings, registry)
    if any(finding.broken for finding in findings):
        raise typer.Exit(1)


def examined_plugins(files: Sequence[Path] | None, sets: Sequence[str] | None) -> tuple[list[Finding], Registry]:
    """Return the findings about all plugins, components and names of the config, and the registry with the plugins.
    Raises ``ConfigError``."""
    from dovetail.config import plugins_section, read
    from dovetail.registry.loader import load_plugins

    raw = read(files or (), sets or (), os.environ)
    policy = plugins_section(raw)
    registry = load_plugins(policy, strict=False)
    named = set(_named(raw.with_sections(registry.sections).tree, registry))
    findings = [*_installed(registry, policy, named), *_duplicates(registry)]
    findings += [*_unknown_plugins(policy, registry), *_missing(named, registry)]
    return findings, registry


def _print(findings: Iterable[Finding], registry: Registry) -> None:
    from dovetail.cli.tables import STATUS_STYLE, add, console, styled, table

    grid = table("plugin or component", "status", "why", "to fix it")
    for finding in findings:
        add(grid, finding.what, styled(finding.status, STATUS_STYLE), finding.why, finding.fix)
    console().print(grid)
    for record in registry.plugins:
        if record.traceback:
            console().print(f"\n{record.name} of {record.distribution} failed with:\n{record.traceback}", markup=False)


def _installed(registry: Registry, policy: PluginsSection, named: set[tuple[str, str]]) -> Iterator[Finding]:
    """Yield the state of every plugin, each followed by the states of its components."""
    from dovetail.registry.loader import normal

    required = set(map(normal, policy.require))
    for record in registry.plugins:
        wanted = bool(required & {normal(record.name), normal(record.distribution)})
        bad = record.status.value in ("failed", "incompatible") or (wanted and record.status.value != "loaded")
        why = f"plugins.require names it; {record.reason}" if wanted and bad else record.reason
        label = f"{record.name} ({record.distribution} {record.version})"
        yield Finding(label, record.status.value, why, record.fix, bad)
        for component in registry.every_component:
            if (component.plugin, component.distribution) == (record.name, record.distribution):
                names = (component.spec.name, *component.spec.aliases)
                yield _examined(component, any((component.spec.kind, name) in named for name in names))


def _examined(component: RegisteredComponent, asked: bool) -> Finding:
    """Return the state of one component; ``asked`` is True if the config names it."""
    from dovetail.registry.machine import Machine
    from dovetail.registry.readiness import readiness_fault
    from dovetail.registry.stages import unmet

    what = f"  {component.spec.kind}/{component.spec.name}"
    if component.incompatible:
        fix = f"pip install --upgrade {component.distribution}"
        return Finding(what, "incompatible", component.incompatible, fix, asked)
    reasons = [reason for requirement in component.spec.requires for reason in unmet(requirement)]
    if reasons:
        why = "; ".join(f"{reason.expected}; {reason.got}" for reason in reasons)
        why = f"the config names it, and it {why}" if asked else why
        return Finding(what, "unusable", why, "; ".join(reason.fix for reason in reasons), asked)
    fault = readiness_fault(component)
    if fault is None:
        return Finding(what, "ready", component.spec.deprecated or "")
    devices = component.spec.constraints.devices
    if devices and not asked and Machine.detect().device_type not in devices:
        return Finding(what, "unusable", f"needs {' or '.join(devices)}, and here {fault}")
    fix = f"dovetail plugins check {component.distribution}, or report it to its author"
    return Finding(what, "failed", fault, fix, broken=True)


def _duplicates(registry: Registry) -> Iterator[Finding]:
    """Yield the names that several plugins claim."""
    for (kind, name), duplicate in registry.duplicates.items():
        why, _, fix = duplicate.text.partition("; ")
        yield Finding(f"{kind}/{name}", "duplicate", why, fix, broken=True)


def _unknown_plugins(policy: PluginsSection, registry: Registry) -> Iterator[Finding]:
    """Yield the names in ``plugins.allow`` and ``plugins.require`` that no installed plugin has."""
    from dovetail.config.problems import suggest
    from dovetail.registry.loader import normal

    known = [name for record in registry.plugins for name in (record.name, record.distribution)]
    plain = {normal(name) for name in known}
    for key in ("allow", "require"):
        for name in getattr(policy, key) or ():
            if normal(name) not in plain:
                why = f"plugins.{key} names it, and it is not installed{suggest(name, known)}"
                yield Finding(name, "missing", why, f"pip install {name}, or take it out of plugins.{key}", broken=True)


def _missing(named: Iterable[tuple[str, str]], registry: Registry) -> Iterator[Finding]:
    """Yield the components that the config names and no loaded plugin provides."""
    from dovetail.config.problems import suggest

    absent = [record.name for record in registry.plugins if record.status.value != "loaded"]
    for kind, name in sorted(named):
        names = registry.names(kind)
        if (kind, name) not in registry.duplicates and name not in names and not registry.aliased(kind, name):
            why = f"the config names it, and no loaded plugin brings it{suggest(name, names)}"
            why += f". Not loaded: {', '.join(absent)}" if absent else ""
            fix = f"install the package that brings it, or choose one of: {', '.join(names) or 'none'}"
            yield Finding(f"{kind}/{name}", "missing", why, fix, broken=True)


def _named(tree: dict[str, Any], registry: Registry) -> Iterator[tuple[str, str]]:
    """Yield kind and name of every component in a config tree (long form)."""
    for descriptor in registry.kinds:
        kind = str(descriptor.kind)
        for name in _names_at(tree, descriptor):
            if isinstance(name, str) and name not in descriptor.reserved:
                yield kind, name


def _names_at(tree: dict[str, Any], descriptor: KindDescriptor) -> Iterator[object]:
    """Yield the values at the places of a config tree where components of a kind are named."""
    section = descriptor.section
    if section is None:
        key, _, last = descriptor.named_at.rpartition(".")
        value = tree.get(key)
        yield value.get(last) if isinstance(value, dict) else None
        return
    value = tree.get(section.key)
    if section.settings is not None and isinstance(value, dict):
        value = value.get(BACKEND)
    parts = (
        [value.get(phase) for phase in section.phases]
        if isinstance(value, dict) and section.is_phased(value)
        else [value]
    )
    for choice in (one for part in parts for one in (part if isinstance(part, list) else [part])):
        yield choice.get("kind") if isinstance(choice, dict) else None
