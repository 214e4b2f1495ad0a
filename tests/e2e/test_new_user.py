"""Test the way from the first command of docs/plugins.md to a report: a policy is generated, installed in a separate
environment, checked, served and measured against the built-in one, and the page of the result is opened in a browser.
The environment starts with the packages of this one, because torch takes minutes to install, so this does not show
that the dependencies which a package names are sufficient.

.venv/bin/python -m pytest -q tests/e2e/test_new_user.py
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from environments import DOVETAIL, Environment
from served import ask, served

from dovetail.experiment.result import ExperimentRecord, read_experiment

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text("utf-8")
SMALL = (
    *("-w", "{kind: json, count: 4, output: 24}", "--warm-up", "2", "--set", "device=cpu", "--set", "threads=1"),
    *("--set", "grammar={backend: xgrammar, isolation: thread}"),
    *("--blocks", "2", "--alpha", "0.001", "--slo", "ttft:5000"),
)
FORKED_ARMS = f"""
import sys
from types import SimpleNamespace
sys.path.append({str(Path(__file__).parents[1])!r})
import fresh
from dovetail.cli import main
from dovetail.experiment import jobs
jobs.subprocess = SimpleNamespace(PIPE=None, Popen=fresh.ForkedWorker)
main()
"""
"""``dovetail`` whose processes of arms are forked from one of this environment's Python that has imported torch: there are ten.
tests/e2e/test_ab_command.py starts them as users do."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> tuple[Environment, list[str]]:
    """Return the user's environment after the page's first steps, and what these have printed."""
    (commands,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    environment, printed = Environment(tmp_path_factory.mktemp("user")), []
    for program, *arguments in map(shlex.split, commands.splitlines()):
        if program == "pip":
            assert arguments[:2] == ["install", "-e"]
            environment.install(f"./{arguments[2].partition('[')[0]}")  # as -e needs more of hatchling than is here
        else:
            assert program == "dovetail"
            printed.append(environment.run(*DOVETAIL, *arguments))
    return environment, printed


def test_the_first_steps_of_the_docs(user: tuple[Environment, list[str]]) -> None:
    new, check, show, doctor, generate = user[1]
    assert "pip install -e 'dovetail-my-turn[dev]'" in new
    found = re.search(r"policy/my_turn: (\d+) passed, 0 failed", check)
    assert found, check
    assert f"version 0.1.0: {found[1]} passed" in show
    assert "policy/my_turn" in doctor
    assert generate.strip()


def test_it_is_served(user: tuple[Environment, list[str]]) -> None:
    environment, _ = user
    settings = ("--set", "policy=my_turn", "--set", "threads=1", "--set", "server.port=0")
    command = [environment.python, *DOVETAIL, "serve", *settings]
    with served(command, cwd=environment.folder, env=environment.env) as url:
        assert "Paris" in ask(url)


@pytest.fixture(scope="module")
def compared(user: tuple[Environment, list[str]]) -> tuple[Path, ExperimentRecord]:
    """Return the folder of the page's comparison, at small settings, and its result."""
    environment, _ = user
    (line,) = re.findall(r"`dovetail (ab --a policy=my_turn --b \S+)`", PAGE)
    folder = environment.folder / "out"
    words = [*shlex.split(line), *SMALL, "--output", str(folder)]
    printed = environment.run("-c", FORKED_ARMS, *words, status=(0, 3))
    found = read_experiment(folder / "experiment.json")
    assert "my_turn" in printed
    assert str(folder / "report.html") in printed
    return folder, found


def test_it_is_no_worse_than_the_built_in_one(compared: tuple[Path, ExperimentRecord]) -> None:
    """Both policies put the few requests of this small workload in the same order, so every measured difference is
    noise."""
    folder, found = compared
    assert found.verdict in ("equivalent", "inconclusive")
    assert found.exit_code in (0, 3)
    assert [difference.key for difference in found.differences if difference.intended] == ["policy"]
    assert found.gate.identical == found.gate.compared == 4
    assert found.gate.grammar_valid_a == found.gate.grammar_valid_b
    beside = {row.label for row in found.side_by_side}
    assert {"Start-up, process to ready", "Peak host memory", "Grammar masks, per output token"} <= beside
    trace = json.loads((folder / "trace.json").read_text())
    assert all(call["token_ids"] for call in trace["calls"])
    runs = sorted((folder / "runs").glob("???-??.json"))
    assert [run.stem[-1] for run in runs] == list("abbabaab")
    hashes = {json.loads(run.read_text())["workload_hash"] for run in runs}
    assert len(hashes) == 1, "every run has the same requests"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH to look at the page")
def test_the_report_is_a_page_to_show(compared: tuple[Path, ExperimentRecord], tmp_path: Path) -> None:
    """Headline, tiles, table and plots fit into a screen, and the browser logs no error."""
    folder, found = compared
    with browser(tmp_path / "profile") as page:
        page.look(1180, 1400)
        page.open((folder / "report.html").as_uri())
        seen = page.run("document.body.innerText")
        headline = page.run("document.querySelector('h1').innerText")
        verdicts = page.run("[...document.querySelectorAll('.tile .chip')].map(one => one.innerText.toLowerCase())")
        tiles = page.run("document.querySelectorAll('.tile').length")
        drawn = page.run("[...document.querySelectorAll('figure svg')].map(one => one.getBoundingClientRect().width)")
        wide = page.run("document.documentElement.scrollWidth")
        picture = page.picture(tmp_path / "report.png")
        assert page.trouble == []
    assert headline
    assert verdicts == [comparison.verdict for comparison in found.primary]
    for name in ("my_turn", "fcfs", "Peak host memory", "Start-up, process to ready"):
        assert name in seen
    for comparison in found.primary:
        assert comparison.label.lower() in seen.lower()
    assert tiles == len(found.primary) > 0
    assert len(drawn) > 1
    assert min(drawn) > 300
    assert wide <= 1180, "nothing is beyond the right edge"
    assert len(picture) > 20_000, "something is drawn on it"
