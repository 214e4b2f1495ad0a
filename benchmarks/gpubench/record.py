"""Hold what a run has found so far, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpubench.plan import Measure
from gpubench.targets import gain, reached, target

ALLOWED = {"max": 3.0, "mean": 1.5}
"""A backend's log-probabilities may differ from float32 by this multiple of the difference of torch's own bfloat16
kernel."""

LEAST = {"max": 0.02, "mean": 0.002}
"""The difference that is allowed in any case."""


@dataclass(slots=True)
class Record:
    """Hold numbers by model, correctness by task, and what is missing: ``failed`` with its error, ``left_out``
    because there was no time."""

    about: dict[str, Any] = field(default_factory=dict)
    measures: dict[str, list[Measure]] = field(default_factory=dict)
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    breakdowns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    engines: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def baseline(self) -> dict[str, Any]:
        """Return the differences of torch's own kernel in bfloat16; empty if it was not checked."""
        found = self.checks.get("torch_native:16", {})
        return found if "extend_max" in found else {}

    def verdict(self, task: str) -> bool | None:
        """Return whether a check passed; None if its backend cannot be used here."""
        found = self.checks[task]
        if "unusable" in found:
            return None
        if "same" in found:
            return found["same"] == found["of"]
        return all(
            found[f"{phase}_{kind}"] <= max(LEAST[kind], times * self.baseline.get(f"{phase}_{kind}", 0.0))
            for phase in ("extend", "decode")
            for kind, times in ALLOWED.items()
        )

    @property
    def wrong(self) -> list[str]:
        """Return the backends whose log-probabilities are wrong. (Greedy tokens may diverge at a near tie; they are
        shown.)"""
        return [task for task in self.checks if "same" not in self.checks[task] and self.verdict(task) is False]

    def value(self, model: str, row: str, case: str) -> float | None:
        """Return a measured number, or None."""
        return next((m.value for m in self.measures.get(model, []) if (m.row, m.case) == (row, case)), None)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON."""
        rows = [
            {"model": model, **asdict(m), **_against(model, m)} for model, found in self.measures.items() for m in found
        ]
        checks = [{"task": task, **found, "passed": self.verdict(task)} for task, found in self.checks.items()]
        return {
            "about": self.about,
            "correctness": {"baseline": self.baseline, "checks": checks},
            "rows": rows,
            "breakdown": self.breakdowns,
            "engines": self.engines,
            "failed": self.failed,
            "left_out": self.left_out,
        }

    def save(self, file: Path) -> None:
        """Write the record completely or not at all."""
        partial = file.with_name(file.name + ".partial")
        partial.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        partial.replace(file)


def _against(model: str, m: Measure) -> dict[str, Any]:
    wanted = target(model, m.row, m.case)
    return {
        **wanted._asdict(),
        "meets_must": reached(m.value, wanted.must, m.unit),
        "meets_goal": reached(m.value, wanted.goal, m.unit),
        "over_must": gain(m.value, wanted.must, m.unit) if wanted.must else None,
    }
