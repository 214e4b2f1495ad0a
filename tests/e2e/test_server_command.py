"""Test ``dovetail serve`` as a user runs it: what it refuses, its exit status, and keys. tests/e2e/test_readme.py has the servers of
the README.

.venv/bin/python -m pytest -q tests/e2e/test_server_command.py
"""

import subprocess
import sys
from pathlib import Path

import httpx
from served import served

DOVETAIL = Path(sys.executable).with_name("dovetail")


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


def test_a_setting_that_does_not_fit_is_one_message_and_status_2():
    command = [DOVETAIL, "serve", "tiny", "--port", "0", "--device", "cpu", "--attention-backend", "fa3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("cannot use what config names") == 1
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_takes_a_model_and_an_api_key():
    command = [DOVETAIL, "serve", "tiny", "--port", "0", "--api-key", "a-key", "--served-model-name", "mine"]
    with served(command, "mine") as url:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": "Bearer a-key"}
        assert httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "mine"
        assert "a-key" not in httpx.get(f"{url}/server_info", headers=headers).text
