"""Test the executors: the suite for each, and what is particular to one of them.

Run: python -m pytest -q tests/plugins/test_executors.py
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from dovetail.errors import RankLostError
from dovetail.testing.executor import ExecutorSuite
from dovetail.testing.executor_ranks import RankScript
from dovetail.testing.executor_runs import has_ended


class TestLocal(ExecutorSuite):
    name = "local"


class TestWorkers(ExecutorSuite):
    name = "workers"
    settings: ClassVar[Mapping[str, Any]] = {"step_seconds": 3.0}
    deadline_seconds = 3.0

    def test_ranks_import_nothing_from_the_current_folder(self, tmp_path, monkeypatch):
        (tmp_path / "json.py").write_text("raise SystemExit(3)")
        monkeypatch.chdir(tmp_path)
        with self.open(RankScript()) as executor:
            assert executor.call("echo", 1) == [[0, 1]]

    def test_the_first_reason_stays(self):
        with self.open(RankScript()) as executor:
            group = executor._group
            for call in (lambda: group.lose("first"), lambda: group.await_finished(9), lambda: group.lose("second")):
                with pytest.raises(RankLostError, match="first"):
                    call()
            assert executor.lost(RuntimeError()) == "first"

    def test_a_process_that_cannot_be_killed_does_not_hold_the_group(self, monkeypatch):
        executor = self.start(RankScript(), 1)
        process, waits = executor._group.workers[0].process, []

        def wait(self, timeout=None):
            waits.append(timeout)
            raise subprocess.TimeoutExpired("rank", timeout)

        with monkeypatch.context() as patched:
            patched.setattr(subprocess.Popen, "wait", wait)
            executor._group.end()
        assert len(waits) == 1
        assert waits[0] is not None
        process.wait(5)

    def test_an_interrupt_while_it_closes_ends_the_ranks(self, monkeypatch):
        executor = self.start(RankScript(), 2)
        pids = [entry["pid"] for entry in executor.describe()["ranks"]]

        def send(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(executor._group, "send", send)
        with pytest.raises(KeyboardInterrupt):
            executor.close()
        assert all(map(has_ended, pids))
