"""Run the conformance suites of a package and store a report of the results: ``dovetail plugins check``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlparse

import typer

from dovetail.cli.sources import Json
from dovetail.errors import ConfigError, DuplicateComponentError, PluginLoadError

if TYPE_CHECKING:
    from dovetail.registry import RegisteredComponent, Registry
    from dovetail.registry.reports import CheckReport, Findings

NOTHING_COLLECTED = 5


def check(
    package: Annotated[str, typer.Argument(help="The folder of a package, or the name of an installed distribution.")],
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which a suite that hangs is ended.")] = 3600.0,
    as_json: Json = False,
) -> None:
    """Import each component of a package, compare it with its interface and build it; then run the package's
    conformance suites, and store a report of the results for `plugins show`. The exit
    status is 1 if a case fails, or if a component has no case."""
    from dovetail.cli.sources import load_registry
    from dovetail.registry.reports import store

    directory, tests, distribution = _located(package)
    components = _components(load_registry(None, None), distribution, directory)
    _refuse_unready(components)
    began = time.monotonic()
    findings = _run(directory, tests, timeout, components[0], quiet=as_json)
    report = _report(distribution, components, findings, time.monotonic() - began)
    path = store(report)
    typer.echo(report.model_dump_json(indent=1) if as_json else f"\n{report.text()}\nStored in {path}")
    if not report.passed:
        raise typer.Exit(1)


def _located(package: str) -> tuple[Path, list[str], str]:
    """Return the folder to run pytest in, the test files, and the distribution. An empty list of test files means the
    files that the folder's own pytest settings select. Raises ``ConfigError``."""
    folder = Path(package).expanduser()
    if folder.is_dir():
        return folder.resolve(), [], _project_name(folder)
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"{package!r} is neither a folder nor an installed distribution; give the folder of a package, or one of: "
            f"{', '.join(_with_plugins())}"
        ) from None
    source, shipped = _source(found), _shipped(found)
    if source is None and not shipped:
        raise ConfigError(
            f"{package} {found.version} was not installed from a folder and contains no tests; give the folder of its "
            "source: dovetail plugins check FOLDER"
        )
    return (source, [], found.name) if source else (Path(str(found.locate_file(""))), shipped, found.name)


def _project_name(folder: Path) -> str:
    try:
        return str(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise ConfigError(
            f"{folder} has no pyproject.toml with a project.name, so it is not a package; give the folder that holds one, or an "
            "installed distribution"
        ) from error


def _source(found: importlib.metadata.Distribution) -> Path | None:
    """Return the folder that a distribution was installed from (PEP 610), if it still exists."""
    direct = json.loads(found.read_text("direct_url.json") or "{}")
    url = urlparse(str(direct.get("url", "")))
    folder = Path(unquote(url.path))
    return folder if url.scheme == "file" and folder.is_dir() else None


def _shipped(found: importlib.metadata.Distribution) -> list[str]:
    """Return the test files that were installed with the package itself."""
    files = [Path(str(file)) for file in found.files or ()]
    return [str(file) for file in files if file.suffix == ".py" and file.name.startswith("test_")]


def _with_plugins() -> list[str]:
    """Return the names of the installed distributions that contain plugins."""
    from dovetail.registry.loader import installed_plugins

    return sorted({entry.dist.name for entry in installed_plugins() if entry.dist})


def _components(registry: Registry, distribution: str, directory: Path) -> list[RegisteredComponent]:
    """Return the components of a distribution. Raises ``PluginLoadError`` if it has none, or if one of its plugins did not
    load."""
    from dovetail.registry.loader import normal

    wanted = normal(distribution)
    for record in registry.plugins:
        if normal(record.distribution) == wanted and record.status.value != "loaded":
            raise PluginLoadError(
                f"plugin {record.name!r} of {distribution} {record.version} is {record.status}: {record.reason}; {record.fix}"
            )
    for duplicate in registry.duplicates.values():
        if wanted in map(normal, duplicate.distributions):
            raise DuplicateComponentError(duplicate.text)
    found = [component for component in registry.every_component if normal(component.distribution) == wanted]
    if not found:
        raise PluginLoadError(
            f"{distribution} has no component here: install it (pip install -e {directory}), and check that its pyproject.toml "
            'has an entry point in [project.entry-points."dovetail.plugins"]'
        )
    return found


def _refuse_unready(components: Sequence[RegisteredComponent]) -> None:
    """Raise ``PluginLoadError`` if components cannot be imported, do not implement their interface or cannot be
    built. Components whose requirements are not met are left to their suites."""
    from dovetail.registry.readiness import readiness_fault
    from dovetail.registry.stages import unmet

    ready = [c for c in components if not any(True for requirement in c.spec.requires for _ in unmet(requirement))]
    faults = [(component, fault) for component in ready if (fault := readiness_fault(component)) is not None]
    if faults:
        raise PluginLoadError("\n".join(_each_cause_once(faults)))


def _each_cause_once(faults: Sequence[tuple[RegisteredComponent, str]]) -> list[str]:
    """Return a line for each cause: the fault of the first component that has it, and the names of the others."""
    by_cause: dict[str, list[tuple[RegisteredComponent, str]]] = {}
    for component, fault in faults:
        own = fault.removeprefix(component.label)
        by_cause.setdefault(own.partition(" cannot be imported: ")[2] or own, []).append((component, fault))
    lines: list[str] = []
    for same in by_cause.values():
        others = ", ".join(f"{component.spec.kind} {component.spec.name!r}" for component, _ in same[1:])
        lines.append(same[0][1] + (f"; the same holds for {others}" if others else ""))
    return lines


def _run(
    directory: Path, tests: Sequence[str], timeout: float, example: RegisteredComponent, *, quiet: bool
) -> Findings:
    """Run pytest over the suites in ``directory``, or over the files ``tests`` in it, and show its output, on stderr if
    ``quiet``. Raises ``ConfigError`` and ``PluginLoadError``."""
    from dovetail.registry.reports import Findings

    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the suites need {' and '.join(missing)}: pip install {' '.join(missing)}")
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "record.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "dovetail.testing.record", f"--dovetail-record={record}"]
        if tests:  # tests of an installed package: pytest must not write files next to them
            command += ["-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={scratch}", *tests]
        output = sys.stderr if quiet else None
        try:
            done = subprocess.run(command, cwd=directory, stdout=output, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise PluginLoadError(
                f"the suites in {directory} had not finished after {timeout:g} s and were ended; find the case that hangs with "
                "pytest -v, or give them longer with --timeout"
            ) from None
        if not record.exists():
            raise PluginLoadError(f"pytest ended with status {done.returncode} in {directory} and wrote no record")
        findings = Findings.model_validate_json(record.read_bytes())
    if done.returncode == NOTHING_COLLECTED:
        module, _, suite = example.descriptor.suite.partition(":")
        raise ConfigError(
            f"{directory} has no conformance test; needed for each component, as in tests/test_it.py: "
            f'class TestIt({suite}): name = "{example.spec.name}"  (from {module} import {suite})'
        )
    return findings


def _report(
    distribution: str, components: Sequence[RegisteredComponent], findings: Findings, seconds: float
) -> CheckReport:
    from datetime import UTC, datetime

    from dovetail.registry.reports import CheckReport, ComponentReport, digest

    labels = {f"{c.spec.kind}/{c.spec.name}": c for c in components}
    return CheckReport(
        distribution=distribution,
        version=components[0].version,
        digest=digest(components),
        checked=datetime.now(UTC),
        seconds=round(seconds, 1),
        machine=findings.machine,
        components=tuple(
            ComponentReport(
                component=label,
                claimed=tuple(sorted(component.spec.offers)),
                cases=tuple(case for case in findings.cases if case.component == label),
            )
            for label, component in labels.items()
        ),
        errors=findings.errors,
    )
