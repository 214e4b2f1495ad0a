"""`dovetail ab` on real engines: a planted wrong mask is stopped before any speed is measured, a planted slow-down is found.
Arms that are alike: tests/e2e/test_new_user.py. Run: pytest tests/e2e/test_ab_command.py"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.experiment.result import Experiment, read_experiment
from dovetail.plugins.measured import read_records

HERE = Path(__file__).parent
SMALL = "{kind: shared_prefix, groups: 2, per_group: 3, prefix: 40, suffix: 8, output: 10}"
GRAMMAR = "grammar={backend: xgrammar, isolation: thread}"
COMMON = ("--set", "device=cpu", "--set", "threads=1", "--set", GRAMMAR, "--warm-up", "2")
SECONDS = 560

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 20)]


def ab(folder: Path, *arguments: str) -> tuple[int, Experiment, str]:
    """Run the command with the planted plugin installed; its exit status, what it wrote, what it printed."""
    about = folder / "planted-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[dovetail.plugins]\nplanted = planted_plugin\n")
    paths = [str(folder), str(HERE), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "XDG_DATA_HOME": str(folder / "data")}
    command = [sys.executable, "-c", "from dovetail.cli import main; main()", "ab", *arguments, *COMMON]
    done = subprocess.run(
        [*command, "--output", str(folder / "out")], env=env, capture_output=True, text=True, timeout=SECONDS
    )
    assert (folder / "out" / "experiment.json").exists(), done.stdout + done.stderr
    return done.returncode, read_experiment(folder / "out" / "experiment.json"), done.stdout


def test_a_wrong_mask_is_stopped_before_any_speed_is_measured(tmp_path):
    arm = "attention={kind: planted, fault: oldest}"
    status, found, text = ab(tmp_path, "--a", "attention=planted", "--b", arm, "-w", SMALL)
    assert status == 2
    assert found.gate.outcome == "failed"
    assert found.gate.aa_identical == found.gate.compared == 6
    assert not found.comparisons
    assert not found.blocks
    assert not list((tmp_path / "out" / "runs").glob("*")), "nothing was measured"
    assert "No speed was measured" in text
    assert "No speed was measured" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_slow_down_is_found_and_the_winner_kept_for_auto(tmp_path):
    """Attention in plain torch against the house's own: rounded otherwise, so the gate lets it pass; and asleep."""
    settings = ("--blocks", "2", "--alpha", "0.2", "--primary", "tpot_mean", "--write-tuning")
    slow = "attention.decode={kind: planted, sleep_ms: 25}"
    status, found, text = ab(tmp_path, "--a", "attention=torch_native", "--b", slow, "-w", SMALL, *settings)
    assert found.gate.outcome == "passed", found.gate
    (tpot,) = found.primary
    assert tpot.verdict == "slower", tpot
    assert tpot.ratio is not None
    assert tpot.ratio > 2
    assert status == 1
    assert [d.key for d in found.differences if d.intended] == ["attention.decode"]
    assert [block.order for block in found.blocks] == ["abba", "baab"]
    (record,) = read_records(tmp_path / "data" / "dovetail" / "tuning.json")
    assert (record.slot, record.winner.name, record.loser.name) == ("attention.decode", "torch_native", "planted")
    assert "tuning: attention.decode: torch_native" in text
