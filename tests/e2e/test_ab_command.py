"""Test `dovetail ab` on real engines: a planted wrong mask is stopped before any speed is measured, and a planted
slow-down is found. tests/e2e/test_new_user.py tests arms that are equal.

Run: pytest tests/e2e/test_ab_command.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail.cli import main
from dovetail.experiment import jobs
from dovetail.experiment.result import read_experiment
from dovetail.registry.measured import read_records
from fresh import ForkedWorker

HERE = Path(__file__).parent
SMALL = "{kind: shared_prefix, groups: 2, per_group: 3, prefix: 40, suffix: 8, output: 10}"
GRAMMAR = "grammar={backend: xgrammar, isolation: thread}"
COMMON = ("--set", "device=cpu", "--set", "threads=1", "--set", GRAMMAR, "--warm-up", "2")
SECONDS = 560

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 20)]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Return a folder in which the planted plugin is installed, and its environment."""
    about = tmp_path / "planted-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[dovetail.plugins]\nplanted = planted_plugin\n")
    paths = [str(tmp_path), str(HERE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_a_wrong_mask_is_stopped_before_any_speed_is_measured(planted):
    """The command starts its processes as it does for a user."""
    arm, out = "attention={kind: planted, fault: oldest}", planted / "out"
    command = [sys.executable, "-c", "from dovetail.cli import main; main()", "ab", *COMMON, "--output", str(out)]
    words = [*command, "--a", "attention=planted", "--b", arm, "-w", SMALL]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert (out / "experiment.json").exists(), done.stdout + done.stderr
    status, found, text = done.returncode, read_experiment(out / "experiment.json"), done.stdout
    assert status == 2
    assert found.gate.outcome == "failed"
    assert found.gate.aa_identical == found.gate.compared == 6
    assert not found.comparisons
    assert not found.blocks
    assert not list((out / "runs").glob("*")), "nothing was measured"
    assert "No speed was measured" in text
    assert "No speed was measured" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("no_engine", "none", "arm a, record"),
        ("none", "many_rows", "arm b, answer"),
    ],
)
def test_an_arm_that_raises_is_exit_status_4(planted, monkeypatch, capfd, a, b, reason):
    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(PIPE=None, Popen=ForkedWorker))
    for folder in (HERE, planted):
        monkeypatch.syspath_prepend(str(folder))
    arms = [
        word
        for arm, fault in (("--a", a), ("--b", b))
        for word in (arm, f"attention={{kind: planted, fault: {fault}}}")
    ]
    with pytest.raises(SystemExit) as ended:
        main(["ab", *arms, "-w", SMALL, *COMMON, "--output", str(planted / "out")])
    shown = capfd.readouterr()
    assert ended.value.code == 4
    printed = shown.out + shown.err
    assert f"error: {reason}" in printed
    assert ("this backend was not built" if a == "no_engine" else "more rows than planned for") in printed
    assert not list((planted / "out" / "runs").glob("*")), "nothing was measured"


def test_a_slow_down_is_found_and_the_winner_kept_for_auto(planted, monkeypatch, capfd):
    """One arm runs Dovetail's own attention, the other runs attention in plain torch that sleeps. The two round
    differently, and the gate accepts that. The ten processes of the arms are forked from a process that has imported
    torch."""
    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(PIPE=None, Popen=ForkedWorker))
    for folder in (HERE, planted):
        monkeypatch.syspath_prepend(str(folder))
    settings = ("--blocks", "2", "--alpha", "0.2", "--primary", "tpot_mean", "--write-tuning")
    slow, out = "attention.decode={kind: planted, sleep_ms: 25}", planted / "out"
    words = ["--a", "attention=torch_native", "--b", slow, "-w", SMALL, *settings, *COMMON, "--output", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(["ab", *words])
    status, found, text = ended.value.code, read_experiment(out / "experiment.json"), capfd.readouterr().out
    assert found.gate.outcome == "passed", found.gate
    (tpot,) = found.primary
    assert tpot.verdict == "slower", tpot
    assert tpot.ratio is not None
    assert tpot.ratio > 2
    assert status == 1
    assert [d.key for d in found.differences if d.intended] == ["attention.decode"]
    assert [block.order for block in found.blocks] == ["abba", "baab"]
    (record,) = read_records(planted / "data" / "dovetail" / "tuning.json")
    assert (record.slot, record.winner.name, record.loser.name) == ("attention.decode", "torch_native", "planted")
    assert "tuning: attention.decode: torch_native" in text
