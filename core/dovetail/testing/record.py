"""Run only conformance suites and record their results: a pytest plugin for ``dovetail plugins check``.

python -m pytest -p dovetail.testing.record --dovetail-record FILE
"""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import pytest

from dovetail.registry.reports import Findings, SuiteCase
from dovetail.testing.component import ComponentSuite


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--dovetail-record``."""
    text = "File to which the results of conformance suites are written as JSON."
    parser.addoption("--dovetail-record", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder if a record is requested; under xdist only in the process that receives the reports of all
    cases."""
    path = config.getoption("--dovetail-record")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ReportRecorder(path.resolve()), "dovetail-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect every test that belongs to no suite."""
    if config.getoption("--dovetail-record") is None:
        return
    kept = [item for item in items if issubclass(getattr(item, "cls", None) or object, ComponentSuite)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


class ReportRecorder:
    """Collect reports and write them as ``Findings`` at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cases: dict[str, SuiteCase] = {}
        self._errors: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that could not be imported."""
        if report.failed:
            self._errors.append(f"{report.nodeid}: {_last_line(report.longreprtext)}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record each case once: by its call, or by an error before or after it."""
        if report.when != "call" and report.passed:
            return
        features = dict.fromkeys(value for key, value in report.user_properties if key == "feature")
        component = next((str(value) for key, value in report.user_properties if key == "component"), "")
        self._cases[report.nodeid] = SuiteCase(
            name=report.nodeid,
            component=component,
            outcome=report.outcome,
            seconds=round(report.duration, 3),
            features=tuple(map(str, features)),
            reason="" if report.passed else _reason(report),
        )

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        findings = Findings(cases=tuple(self._cases.values()), errors=tuple(self._errors), machine=machine())
        self._path.write_text(findings.model_dump_json(), encoding="utf-8")


def machine() -> dict[str, str]:
    """Return the versions and the device on which the cases run, by name."""
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return {
        "dovetail": importlib.metadata.version("dovetail"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
    }


def _reason(report: pytest.TestReport) -> str:
    """Return the message of a skip, or the last line of a failure."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.splitlines()[0][:300] if crash else _last_line(report.longreprtext)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]
