"""Test that two checkouts are compared in turns, each with its own plugins.

Run: pytest tests/core/test_in_turns.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PathDistribution, entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import in_turns

    return in_turns


class Recorded:
    """Measure the numbers given, one after the other, and note who measured."""

    def __init__(self, name: str, values: list[float], order: list[str]) -> None:
        self.name, self.values, self.order = name, iter(values), order

    def measure(self, task: str) -> list[dict[str, object]]:
        self.order.append(self.name)
        return [{"row": task, "case": "", "unit": "ms", "value": next(self.values)}]


def test_the_order_changes_and_the_run_that_warms_up_does_not_count(in_turns) -> None:
    order: list[str] = []
    before, after = Recorded("before", [90, 2, 4, 3], order), Recorded("after", [80, 6, 9, 3], order)
    (row,) = in_turns.in_turns(before, after, "mixed", 3)
    assert order == ["before", "after", "before", "after", "after", "before", "before", "after"]
    assert (row.name, row.before, row.after, row.ratio) == ("mixed", [2, 4, 3], [6, 9, 3], 2.0)


def test_the_plugins_are_those_of_the_checkout(in_turns, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project.entry-points."dovetail.plugins"]\nmodels = "other_models.plugin"\n'
    )
    folder = in_turns.entry_points(tmp_path, tmp_path / "before")
    found = PathDistribution(folder / "dovetail-0.dist-info").entry_points
    assert [(one.name, one.value, one.group) for one in found] == [
        ("models", "other_models.plugin", "dovetail.plugins")
    ]
    assert {one.name for one in entry_points(group="dovetail.plugins")} > {"models"}, (
        "nothing is hidden in this process"
    )


def test_what_is_no_checkout_is_refused(in_turns, tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match="no-such-commit is neither a directory with a checkout of Dovetail nor a commit"
    ):
        in_turns.checked_out("no-such-commit", tmp_path)
    assert in_turns.checked_out(str(ROOT), tmp_path) == ROOT


@pytest.mark.full
def test_a_checkout_against_itself(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "in_turns.py"),
        str(ROOT),
        "--model",
        "tiny",
        "--device",
        "cpu",
    ]
    more = ["--kv-gib", "0.1", "--rows", "decode:4,mixed", "--turns", "1", "--json", str(out)]
    subprocess.run([*command, *more], check=True, timeout=200)
    rows = json.loads(out.read_text())
    assert [(row["name"], row["unit"], len(row["before"]), len(row["after"])) for row in rows] == [
        ("decode bs 4", "ms", 1, 1),
        ("mixed", "tok/s", 1, 1),
    ]
