"""Test ``dovetail serve`` as a user runs it: a process, one ready line, answers, a signal, a clean end.

.venv/bin/python -m pytest -q tests/e2e/test_server_command.py
"""

import subprocess
import sys
from pathlib import Path

from served import ask, served

DOVETAIL = Path(sys.executable).with_name("dovetail")


def test_serve(tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text("threads: 1\nserver:\n  port: 0\nmodel:\n  served_name: mine\n")
    with served([DOVETAIL, "serve", config], "mine") as url:
        assert "Paris" in ask(url, "mine")


def test_a_server_that_cannot_start_says_why(tmp_path: Path):
    done = subprocess.run(
        [DOVETAIL, "serve", "--set", "server.port=0", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert str(tmp_path) in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
