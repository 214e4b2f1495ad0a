"""Store the results of ``dovetail plugins check`` for ``plugins show``: one report per distribution, as JSON and as
text, in ``$XDG_DATA_HOME/dovetail/checks`` (``~/.local/share/dovetail/checks``)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dovetail.atomic_files import write_atomically
from dovetail.folders import data_folder
from dovetail.registry.installed import RegisteredComponent


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class SuiteCase(_Record):
    """Record one case of a suite. ``features`` are the features that it proves if it passes; ``reason`` is the reason
    why it did not pass."""

    name: str
    component: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    features: tuple[str, ...] = ()
    reason: str = ""


class Findings(_Record):
    """Record a run of suites. ``machine`` describes the machine on which it ran, ``errors`` the files that could not be
    collected."""

    cases: tuple[SuiteCase, ...]
    errors: tuple[str, ...] = ()
    machine: dict[str, str] = {}


class ComponentReport(_Record):
    """Record one component: what it claims, and the cases of its suites."""

    component: str
    claimed: tuple[str, ...]
    cases: tuple[SuiteCase, ...]

    def count(self, outcome: str) -> int:
        """Return the number of cases with this outcome."""
        return sum(case.outcome == outcome for case in self.cases)

    @property
    def proven(self) -> list[str]:
        """Return the features for which a case passed and none failed."""
        named = {outcome: self._features(outcome) for outcome in ("passed", "failed")}
        return sorted(named["passed"] - named["failed"])

    @property
    def unproven(self) -> list[str]:
        """Return the features that are claimed and not proven."""
        return sorted(set(self.claimed) - set(self.proven))

    def _features(self, outcome: str) -> set[str]:
        return {feature for case in self.cases if case.outcome == outcome for feature in case.features}


class CheckReport(_Record):
    """Record a distribution and its components, as they were checked. ``digest`` identifies its files."""

    schema_version: Literal[1] = 1
    distribution: str
    version: str
    digest: str
    checked: datetime
    seconds: float
    machine: dict[str, str]
    components: tuple[ComponentReport, ...]
    errors: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return True if every component has cases, none of which failed, and every test could be collected."""
        judged = all(part.count("passed") and not part.count("failed") for part in self.components)
        return bool(self.components) and judged and not self.errors

    def text(self) -> str:
        """Return the report as text."""
        lines = [
            f"{self.distribution} {self.version}, checked {self.checked:%Y-%m-%d %H:%M} UTC in {self.seconds:.0f} s: "
            + ("passed" if self.passed else "not passed"),
            "  " + ", ".join(f"{name} {value}" for name, value in self.machine.items()),
        ]
        for part in self.components:
            lines += _component_lines(part)
        return "\n".join([*lines, *(f"not collected: {error}" for error in self.errors)]) + "\n"


def _component_lines(part: ComponentReport) -> list[str]:
    counts = ", ".join(f"{part.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
    lines = [f"{part.component}: {counts if part.cases else 'no conformance test'}"]
    lines += [f"  proven: {', '.join(part.proven)}"] if part.proven else []
    lines += [f"  claimed, not proven: {', '.join(part.unproven)}"] if part.unproven else []
    return lines + [f"  failed: {case.name}: {case.reason}" for case in part.cases if case.outcome == "failed"]


def folder() -> Path:
    """Return the folder in which reports are kept."""
    return data_folder() / "checks"


def store(report: CheckReport) -> Path:
    """Write ``<distribution>.json`` and ``.txt`` over older ones. Returns the path of the first."""
    path = _path(report.distribution)
    write_atomically(path, report.model_dump_json(indent=1))
    write_atomically(path.with_suffix(".txt"), report.text())
    return path


def stored(distribution: str) -> CheckReport | None:
    """Return the last report; None if there is none, or none that this version can read."""
    try:
        return CheckReport.model_validate_json(_path(distribution).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _path(distribution: str) -> Path:
    return folder() / f"{re.sub(r'[-_.]+', '-', distribution).lower()}.json"


def stale(report: CheckReport, components: Sequence[RegisteredComponent]) -> str | None:
    """Return why ``report`` no longer describes its distribution as it is installed with ``components``; None if it
    does."""
    version = components[0].version
    if report.version != version:
        return f"it was version {report.version}, {version} is installed"
    checked_with, here = report.machine.get("dovetail"), importlib.metadata.version("dovetail")
    if checked_with != here:
        return f"it was checked with dovetail {checked_with}, this is {here}"
    return None if report.digest == digest(components) else "its files have changed"


def digest(components: Iterable[RegisteredComponent]) -> str:
    """Return a hash of the Python files of the packages that ``components`` come in. Import none of them."""
    total = hashlib.sha256()
    for package in sorted({component.spec.target.partition(".")[0] for component in components}):
        found = importlib.util.find_spec(package.partition(":")[0])
        for base in sorted((found and found.submodule_search_locations) or ()):
            for file in sorted(Path(base).rglob("*.py")):
                total.update(file.relative_to(base).as_posix().encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]
