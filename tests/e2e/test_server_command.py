"""``dovetail serve`` as a user runs it: a process, one ready line, answers, a signal, a clean end.

.venv/bin/python -m pytest -q tests/e2e/test_server_command.py
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

DOVETAIL = Path(sys.executable).with_name("dovetail")


def test_serve(tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text("threads: 1\nserver:\n  port: 0\nmodel:\n  served_name: mine\n")
    process = subprocess.Popen([DOVETAIL, "serve", config], stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr
        seen: list[str] = []
        for line in process.stderr:
            seen.append(line)
            if "ready in" in line:
                break
        found = re.search(r"serving mine on (http://127\.0\.0\.1:\d+), ready in [\d.]+ s", seen[-1])
        assert found, "".join(seen)
        body = {
            "model": "mine",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(20) == 0
        assert "Traceback" not in "".join(seen) + rest


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
