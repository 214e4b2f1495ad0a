"""Test that threads of OpenMP which wait for work sleep soon, in the processes in which engines run.

Run: python -m pytest -q tests/core/test_waiting_threads.py
"""

import os
import subprocess
import sys

import pytest

from dovetail.waiting_threads import SPINS, limit_spinning

WAIT = """
import time, torch
torch.set_num_threads(2)
numbers = torch.zeros(1 << 22)
waited = []
for _ in range(5):
    numbers.add_(1)
    start = time.process_time()
    time.sleep(0.1)
    waited.append(time.process_time() - start)
print(min(waited))
"""


@pytest.mark.parametrize("before", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_settings_of_the_user_have_precedence(before, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == before.get("GOMP_SPINCOUNT", None if before else str(SPINS))
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)  # also the one that was set


def test_nothing_changes_once_torch_is_imported(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", sys)
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.skipif(
    (os.cpu_count() or 1) < 2 or sys.platform != "linux", reason="it needs two processors and GNU's OpenMP"
)
def test_threads_of_an_engine_sleep_while_there_is_no_work():
    start = "import dovetail.server.engine_process as process; process.limit_spinning()\n"
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", start + WAIT], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.0015  # without the limit about 0.004
