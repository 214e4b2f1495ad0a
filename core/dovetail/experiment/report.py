"""Write the report of a finished experiment: one HTML page without external resources. ``ExperimentRecord.write`` writes the JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dovetail.atomic_files import write_atomically
from dovetail.bench.html import render
from dovetail.experiment import words
from dovetail.experiment.plots import plots
from dovetail.experiment.result import ExperimentRecord

_TEMPLATE = Path(__file__).parent / "templates" / "report.html"
_FORMATTERS: tuple[Callable[..., Any], ...] = (
    words.number,
    words.change,
    words.interval,
    words.floor,
    words.p_text,
    words.side_ratio,
)


def write_html(experiment: ExperimentRecord, file: Path) -> None:
    """Write the page. If matplotlib is missing, raise ``ConfigError`` with the command that installs it (``plots.ensure``)."""
    write_atomically(file, html(experiment))


def html(experiment: ExperimentRecord) -> str:
    """Return the page as text."""
    return render(
        _TEMPLATE,
        {formatter.__name__: formatter for formatter in _FORMATTERS},
        e=experiment,
        tone=words.tone(experiment),
        headline=words.headline(experiment),
        summary=words.summary(experiment),
        confidence=words.confidence(experiment),
        gate_title=words.gate_title(experiment.gate),
        gate_facts=words.gate_facts(experiment.gate),
        measured_how=words.measured_how(experiment),
        machine=[(name.replace("_", " "), text) for name, text in experiment.machine.items()],
        plots=plots(experiment),
        configs=[(arm, yaml.safe_dump(arm.config, sort_keys=False)) for arm in (experiment.a, experiment.b)],
    )
