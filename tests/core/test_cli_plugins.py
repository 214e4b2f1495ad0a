"""Test ``dovetail plugins check``, what ``show`` reports about it, and ``dovetail plugins doctor``.

.venv/bin/python -m pytest -q tests/core/test_cli_plugins.py
"""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from types import SimpleNamespace
from typing import TextIO

import pytest

from dovetail.cli import main, plugins_check
from dovetail.config import PluginsSection
from dovetail.interfaces.features import Feature
from dovetail.registry import ComponentKind, Requirement, load_plugins
from dovetail.registry import loader as loader_module
from dovetail.registry.reports import CheckReport, ComponentReport, SuiteCase, folder, stale, store, stored
from dovetail.scaffold import named, render, write
from fresh import run_python

K = ComponentKind


@pytest.fixture
def call(monkeypatch, capfd, tmp_path):
    """Run ``dovetail plugins ...`` with a separate folder for reports; return (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in [n for n in os.environ if n.startswith("DOVETAIL_")]:
        monkeypatch.delenv(name)

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = 0
        try:
            main(["plugins", *words])
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return run


# -- check -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Generate a policy in the folder that it is imported from, as after ``pip install -e``."""
    source = tmp_path / "dovetail-checked-turn"
    write(render(named(load_plugins(PluginsSection()), "policy", "checked_turn")), source)
    install(source, "0.1.0")
    for path in (str(source), str(source / "site")):
        monkeypatch.syspath_prepend(path)
    paths = [str(source), str(source / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    yield source
    for name in [name for name in sys.modules if name.startswith("dovetail_checked_turn")]:
        del sys.modules[name]


def install(source: Path, version: str) -> None:
    info = source / "site" / "dovetail_checked_turn-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dovetail-checked-turn\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[dovetail.plugins]\nchecked_turn = dovetail_checked_turn.plugin\n")
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}}))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run suites in processes that need not import torch."""

    def run(command: list[str], cwd: str, stdout: TextIO | None, timeout: float, check: bool) -> CompletedProcess[str]:
        done = run_python(command[1:], Path(cwd), os.environ, timeout)
        (stdout or sys.stdout).write(done.stdout + done.stderr)
        return done

    monkeypatch.setattr(plugins_check, "subprocess", SimpleNamespace(run=run, TimeoutExpired=TimeoutExpired))


def test_a_suite_that_hangs_is_ended(call, project):
    for file in (project / "tests").glob("test_*.py"):
        file.write_text("import time\ntime.sleep(60)\n")
    status, _, err = call("check", str(project), "--timeout", "2")
    assert status == 2
    assert "had not finished after 2 s and were ended" in err


def test_a_check_is_kept_and_shown_until_it_is_stale(call, project, forked):
    status, out, _ = call("show", "checked_turn")
    assert "not checked: dovetail plugins check dovetail-checked-turn" in out
    status, out, err = call("check", str(project))
    assert status == 0, out + err
    found = re.search(r"policy/checked_turn: (\d+) passed, 0 failed, 1 skipped", out)
    assert found, out
    assert int(found[1]) > 30
    report = stored("dovetail_checked.turn")
    assert report is not None
    assert report.passed
    assert report.version == "0.1.0"
    assert set(report.machine) == {"dovetail", "python", "torch", "system", "device"}
    assert (folder() / "dovetail-checked-turn.txt").read_text() in out
    shown = call("show", "checked_turn")[1]
    assert f"on {datetime.now(UTC):%Y-%m}" in shown
    assert f"version 0.1.0: {found[1]} passed" in shown
    assert "STALE" not in shown
    install(project, "0.2.0")
    assert "STALE: it was version 0.1.0, 0.2.0 is installed; dovetail plugins check" in call("show", "checked_turn")[1]
    install(project, "0.1.0")
    policy = project / "dovetail_checked_turn" / "policy.py"
    policy.write_text(policy.read_text().replace("key=self._rank)", "key=self._rank, reverse=True)"))
    assert "STALE: its files have changed" in call("show", "checked_turn")[1]

    status, out, err = call("check", "dovetail-checked-turn", "--json")
    assert status == 1
    data = json.loads(out)
    failed = {
        case["name"].rpartition("::")[2].partition("[")[0]
        for case in data["components"][0]["cases"]
        if case["outcome"] == "failed"
    }
    assert failed == {"test_patience_is_bounded", "test_equals_are_served_in_order_of_arrival"}
    assert "failed" in err, "pytest's own output does not disturb the JSON"
    assert "STALE" not in (shown := call("show", "checked_turn")[1])
    count = sum(case["outcome"] == "failed" for case in data["components"][0]["cases"])
    assert f"{count} failed" in shown


def test_what_cannot_be_checked_says_why(call, project, forked, tmp_path):
    status, _, err = call("check", "no-such-dist")
    assert status == 2
    assert "neither a folder nor an installed distribution; give the folder of a package, or one of: dovetail" in err
    assert "has no pyproject.toml with a project.name" in call("check", str(tmp_path))[2]
    write(render(named(load_plugins(PluginsSection()), "policy", "not_here")), tmp_path / "elsewhere")
    assert f"install it (pip install -e {tmp_path / 'elsewhere'})" in " ".join(
        call("check", str(tmp_path / "elsewhere"))[2].split()
    )
    (project / "tests" / "test_checked_turn.py").write_text("def test_nothing():\n    assert False\n")
    status, _, err = call("check", str(project))
    assert status == 2
    assert "has no conformance test; needed for each component" in err
    policy = project / "dovetail_checked_turn" / "policy.py"
    text = policy.read_text()
    policy.write_text(text.replace("def order(", "def oder("))
    sys.modules.pop("dovetail_checked_turn.policy", None)
    status, _, err = call("check", str(project))
    assert status == 2
    assert "does not define order, which SchedulePolicy requires. Did you mean 'oder'?" in " ".join(err.split())
    policy.write_text(text)
    (project / "dovetail_checked_turn" / "plugin.py").write_text("1 / 0\n")
    sys.modules.pop("dovetail_checked_turn.plugin", None)
    assert "is failed: ZeroDivisionError" in call("check", str(project))[2]


def test_tests_that_are_installed_with_a_package_are_run(call, project, forked):
    info = project / "site" / "dovetail_checked_turn-0.dist-info"
    (info / "direct_url.json").unlink()
    assert "contains no tests; give the folder of its source" in call("check", "dovetail-checked-turn")[2]
    (project / "site" / "dovetail_checked_turn_tests").mkdir()
    shipped = project / "site" / "dovetail_checked_turn_tests" / "test_turn.py"
    (project / "tests" / "test_checked_turn.py").rename(shipped)
    (info / "RECORD").write_text("dovetail_checked_turn_tests/test_turn.py,,\n")
    before = sorted((project / "site").rglob("*"))
    status, out, err = call("check", "dovetail-checked-turn")
    assert status == 0, out + err
    assert re.search(r"policy/checked_turn: \d\d passed, 0 failed", out), out
    assert [
        path for path in sorted((project / "site").rglob("*")) if path not in before and "__pycache__" not in path.parts
    ] == []


def case(outcome: str, *features: str, name: str = "x") -> SuiteCase:
    return SuiteCase(name=name, component="cache/x", outcome=outcome, seconds=0.1, features=features, reason="because")


def test_a_feature_is_proven_by_a_case_that_passes_and_none_that_fails():
    cases = (case("passed", "a", "b"), case("failed", "b"), case("skipped", "c"), case("passed"), case("passed", "d"))
    part = ComponentReport(component="cache/x", claimed=("a", "b", "c", "e"), cases=cases)
    assert part.proven == ["a", "d"]
    assert part.unproven == ["b", "c", "e"]
    assert [part.count(outcome) for outcome in ("passed", "failed", "skipped")] == [3, 1, 1]


def report(*parts: ComponentReport, **more) -> CheckReport:
    given = {
        "distribution": "x",
        "version": "1",
        "digest": "",
        "checked": datetime.now(UTC),
        "seconds": 1.0,
        "machine": {},
    }
    return CheckReport(**{**given, **more}, components=parts)


def test_a_package_passes_if_all_of_its_components_are_tested():
    good = ComponentReport(component="cache/x", claimed=(), cases=(case("passed"), case("skipped")))
    untested = ComponentReport(component="cache/y", claimed=("a",), cases=())
    skipped = ComponentReport(component="cache/z", claimed=(), cases=(case("skipped"),))
    assert report(good).passed
    assert not report().passed
    assert not report(good, untested).passed
    assert not report(good, skipped).passed
    assert not report(good, errors=("tests/test_x.py: ImportError",)).passed
    text = report(good, untested, errors=("tests/test_x.py: ImportError",)).text()
    assert "cache/y: no conformance test\n  claimed, not proven: a\n" in text
    assert "not collected: tests/test_x.py: ImportError" in text


def test_a_report_that_cannot_be_read_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = store(report())
    assert stored("X") == stored("x") is not None
    path.write_text('{"schema_version": 2}')
    assert stored("x") is None


def test_another_dovetail_makes_a_report_stale(fakes):
    (component,) = fakes.registry(fakes.spec(K.CACHE, "x"), basics=False).components("cache")
    assert "dovetail 0.0.1" in (stale(report(version="1.0", machine={"dovetail": "0.0.1"}), [component]) or "")


# -- doctor ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def doctor(call, fakes, monkeypatch):
    """Run ``plugins doctor`` over plugins made in memory; return (exit status, findings by what they are about)."""
    missing = Requirement("no-such-dist", ">=2", "pip install no-such-dist[fast]")
    specs = [*fakes.basics(), fakes.spec(K.ATTENTION, "fast", requires=(missing,))]
    specs.append(fakes.spec(K.CACHE, "newer", api=(9, 0)))
    entries = [
        fakes.entry("fakes", specs),
        fakes.entry("extra", [fakes.spec(K.DRAFTER, "ngram", offers=frozenset({Feature.DRAFT_CHAIN}))]),
    ]
    monkeypatch.setattr(loader_module, "installed_plugins", lambda: entries)

    def run(*sets: str, config: dict | None = None, tmp: Path = fakes.directory):
        (tmp / "config.json.yaml").write_text(json.dumps(config or {}))
        words = [word for text in sets for word in ("--set", text)]
        status, out, _ = call("doctor", "--json", "--config", str(tmp / "config.json.yaml"), *words)
        data = json.loads(out)
        assert data["broken"] == (status == 1)
        return status, {finding["what"].strip(): finding for finding in data["findings"]}

    run.entries = entries
    return run


def test_doctor_finds_nothing_wrong_with_what_is_not_required(doctor):
    status, found = doctor()
    assert status == 0
    assert found["attention/plain"]["status"] == "ready"
    assert found["attention/fast"]["status"] == "unusable"
    assert found["attention/fast"]["fix"] == "pip install no-such-dist[fast]"
    assert found["cache/newer"]["status"] == "incompatible"


@pytest.mark.parametrize(
    ("config", "what", "status", "said"),
    [
        ({"attention": "fast"}, "attention/fast", "unusable", "the config names it, and it needs no-such-dist>=2"),
        ({"attention": {"prefill": "plain", "decode": "fast"}}, "attention/fast", "unusable", "no-such-dist"),
        ({"cache": "newer"}, "cache/newer", "incompatible", "version 9.0"),
        ({"attention": ["plain", {"kind": "paln"}]}, "attention/paln", "missing", "did you mean 'plain'?"),
        ({"cache": "tre"}, "cache/tre", "missing", "no loaded plugin brings it"),
        ({"grammar": "nosuch"}, "grammar/nosuch", "missing", "no loaded plugin brings it"),
        ({"grammar": {"backend": ["nosuch"], "timeout": 3}}, "grammar/nosuch", "missing", "the config names it"),
        ({"speculative": {"kind": "ngran", "depth": 3}}, "speculative/ngran", "missing", "did you mean 'ngram'?"),
        ({"model": {"path": "x", "arch": "nosuch"}}, "model/nosuch", "missing", "the config names it"),
        ({"plugins": {"deny": ["extra"]}, "speculative": "ngram"}, "speculative/ngram", "missing", "Not loaded: extra"),
        (
            {"plugins": {"require": ["absent"]}},
            "absent",
            "missing",
            "plugins.require names it, and it is not installed",
        ),
        ({"plugins": {"allow": ["fakes", "extr"]}}, "extr", "missing", "did you mean 'extra'?"),
        (
            {"plugins": {"require": ["extra"], "deny": ["extra"]}},
            "extra (extra-dist 1.0)",
            "blocked",
            "plugins.require names it",
        ),
    ],
)
def test_doctor_finds_what_the_config_asks_for_in_vain(doctor, config, what, status, said):
    code, found = doctor(config=config)
    assert code == 1
    assert found[what]["status"] == status
    assert said in found[what]["why"]
    assert found[what]["fix"]
    assert [name for name, finding in found.items() if finding["broken"]] == [what]


@pytest.mark.parametrize("target", ["dovetail_policies.simple:Fcsf", "no_such_package:Fcfs", "json:JSONDecoder"])
def test_doctor_finds_a_component_that_cannot_be_used(doctor, fakes, target):
    doctor.entries.append(fakes.entry("odd", [fakes.spec(K.POLICY, "odd", target=target)]))
    code, found = doctor()
    assert code == 1
    assert found["policy/odd"]["status"] == "failed"
    assert found["policy/odd"]["why"].startswith("policy 'odd' (odd-dist 1.0): ")
    assert "dovetail plugins check odd-dist" in found["policy/odd"]["fix"]
    assert [name for name, finding in found.items() if finding["broken"]] == ["policy/odd"]


def test_doctor_and_list_show_a_duplicate_name_and_other_commands_go_on(call, doctor, fakes):
    doctor.entries.append(fakes.entry("twice", [fakes.spec(K.CACHE, "tree")]))
    code, found = doctor()
    assert code == 1
    assert found["cache/tree"]["status"] == "duplicate"
    assert "'fakes' of fakes-dist 1.0 and plugin 'twice' of twice-dist 1.0" in found["cache/tree"]["why"]
    assert found["cache/tree"]["fix"].startswith("deny one of them (plugins.deny: [twice])")
    status, out, _ = call("list")
    assert status == 0
    assert "cache 'tree' is claimed by" in out
    assert call("show", "fcfs")[0] == 0
    assert call("list", "--set", "cache=none")[0] == 0
    assert doctor(config={"cache": "tree"})[0] == 1


def test_doctor_names_what_a_broken_plugin_lacks(doctor, fakes):
    doctor.entries.append(
        fakes.broken("bad", ModuleNotFoundError("No module named 'fast_kernels'", name="fast_kernels"))
    )
    code, found = doctor()
    assert code == 1
    assert found["bad (bad-dist 1.0)"]["fix"] == "pip install fast-kernels"


@pytest.mark.parametrize(
    "config",
    [{"attention": "plain", "cache": "tree"}, {"cache": "auto", "speculative": "none"}, {"speculative": "ngram"}],
)
def test_doctor_is_content_with_what_is_there(doctor, config):
    assert doctor(config=config)[0] == 0


def test_doctor_prints_a_table(call, doctor):
    status, out, _ = call("doctor", "--set", "cache=tre")
    assert status == 1
    assert "cache/tre" in out
    assert "missing" in out
    assert "choose one of: newer, none, tree" in out
