"""List the installed components and show what each one declares: ``dovetail plugins``."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.plugins_check import check
from dovetail.cli.plugins_doctor import doctor
from dovetail.cli.plugins_new import new
from dovetail.cli.sources import FileOptions, Json, Sets, load_registry

if TYPE_CHECKING:
    from dovetail.registry import ComponentSpec, RegisteredComponent, Registry

app = typer.Typer(help="List, show, check and create plugins.", no_args_is_help=True)
app.command()(new)
app.command()(check)
app.command()(doctor)


@app.command("list")
def list_(files: FileOptions = None, sets: Sets = None, as_json: Json = False) -> None:
    """List every component, by kind, and every plugin that did not load."""
    from dovetail.cli.tables import STATUS_STYLE, add, console, styled, table

    registry = load_registry(files, sets)
    if as_json:
        typer.echo(json.dumps({"plugins": _records(registry), "components": _rows(registry)}, indent=2))
        return
    grid = table("kind", "name", "summary", "from")
    for component in _components(registry):
        spec = component.spec
        add(grid, spec.kind, _named(component), spec.summary, f"{component.distribution} {component.version}")
    console().print(grid)
    absent = [record for record in registry.plugins if record.status.value != "loaded"]
    for duplicate in registry.duplicates.values():
        console().print("", duplicate.text)
    if absent:
        grid = table("plugin", "from", "status", "reason")
        for record in absent:
            status = styled(record.status.value, STATUS_STYLE)
            add(grid, record.name, f"{record.distribution} {record.version}", status, record.reason)
        console().print("", grid)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A component: radix, or with its kind, cache/radix.")],
    files: FileOptions = None,
    sets: Sets = None,
) -> None:
    """Show everything that one component declares, its settings, and the results of its last check."""
    from dovetail.cli.tables import console, facts

    registry = load_registry(files, sets)
    for component in _find(registry, name):
        spec = component.spec
        rows = {
            "summary": spec.summary,
            "from": f"{component.distribution} {component.version}, plugin {component.plugin}",
            "status": component.incompatible or f"{spec.stability.value}, interface {spec.api[0]}.{spec.api[1]}",
            "offers": ", ".join(sorted(spec.offers)),
            "needs": ", ".join(sorted(spec.needs)),
            "requires": ", ".join(f"{r.distribution}{r.versions}" for r in spec.requires),
            "constraints": _constraints(spec),
            "aliases": ", ".join(spec.aliases),
            "priority": str(spec.priority),
            "target": spec.target,
            "proven": _proven(registry, component),
            "settings": _settings(registry, component),
        }
        console().print(facts(f"{spec.kind}/{spec.name}", {key: text for key, text in rows.items() if text}))


def _components(registry: Registry) -> list[RegisteredComponent]:
    return registry.every_component


def _find(registry: Registry, name: str) -> list[RegisteredComponent]:
    from dovetail.config.problems import suggest
    from dovetail.errors import UnknownComponentError

    kind, _, bare = name.rpartition("/")
    found = [c for c in _components(registry) if bare in (c.spec.name, *c.spec.aliases) and kind in ("", c.spec.kind)]
    if not found:
        names = [f"{c.spec.kind}/{c.spec.name}" for c in _components(registry)]
        hint = suggest(bare, [c.spec.name for c in _components(registry)])
        raise UnknownComponentError(f"no component is called {name!r}; installed: {', '.join(names)}{hint}")
    return found


def _named(component: RegisteredComponent) -> str:
    stability = component.spec.stability.value
    notes = [] if stability == "stable" else [stability]
    notes += ["incompatible"] if component.incompatible else []
    return component.spec.name + (f" ({', '.join(notes)})" if notes else "")


def _constraints(spec: ComponentSpec) -> str:
    given = {key: value for key, value in dataclasses.asdict(spec.constraints).items() if value}
    return ", ".join(f"{key} {' '.join(map(str, value))}" for key, value in given.items())


def _settings(registry: Registry, component: RegisteredComponent) -> str:
    fields = registry.config_class(component.spec.kind, component.spec.name).model_fields
    lines = [
        f"{name}: {field.default!r}  {field.description or ''}" for name, field in fields.items() if name != "kind"
    ]
    return "\n".join(lines)


def _proven(registry: Registry, component: RegisteredComponent) -> str:
    """Return what the last ``plugins check`` of the component's distribution found about the component, and whether that
    result is stale."""
    from dovetail.registry.reports import stale, stored

    report = stored(component.distribution)
    label = f"{component.spec.kind}/{component.spec.name}"
    part = next((part for part in report.components if part.component == label), None) if report else None
    if report is None or part is None:
        return f"not checked: dovetail plugins check {component.distribution}"
    counts = ", ".join(f"{part.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
    siblings = [other for other in _components(registry) if other.distribution == component.distribution]
    why = stale(report, siblings)
    lines = [
        f"on {report.checked:%Y-%m-%d}, version {report.version}: {counts}" if part.cases else "no conformance test"
    ]
    lines += [f"STALE: {why}; dovetail plugins check {component.distribution}"] if why else []
    lines += [f"features proven: {', '.join(part.proven)}"] if part.proven else []
    lines += [f"claimed, not proven: {', '.join(part.unproven)}"] if part.unproven else []
    lines += [f"on {', '.join(f'{name} {value}' for name, value in report.machine.items())}"]
    return "\n".join(lines)


def _records(registry: Registry) -> list[dict[str, Any]]:
    return [dataclasses.asdict(record) for record in registry.plugins]


def _rows(registry: Registry) -> list[dict[str, Any]]:
    return [
        {
            "kind": c.spec.kind,
            "name": c.spec.name,
            "summary": c.spec.summary,
            "distribution": c.distribution,
            "version": c.version,
            "plugin": c.plugin,
            "offers": sorted(c.spec.offers),
            "needs": sorted(c.spec.needs),
            "incompatible": c.incompatible,
        }
        for c in _components(registry)
    ]
