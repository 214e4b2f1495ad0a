"""Run ``dovetail serve`` in a separate process as a user does: one ready line, answers, a signal, a clean end."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx


@contextmanager
def killed_at_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill the process at the end if it still runs, so that a test that fails does not wait for it."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def is_gone(pid: int) -> bool:
    """Return True if a process has ended, though its parent may not have noticed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@contextmanager
def served(command: Sequence[Any], name: str = "tiny", **given: Any) -> Iterator[str]:
    """Yield the URL of the server that ``command`` starts. The server must print when it is ready, and end cleanly
    after a signal."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **given) as process:
        assert process.stderr
        seen: list[str] = []
        for line in process.stderr:
            seen.append(line)
            if "ready in" in line:
                break
        found = re.search(rf"serving {name} on http://(127\.0\.0\.1|0\.0\.0\.0):(\d+), ready in [\d.]+ s", seen[-1])
        assert found, "".join(seen)
        try:
            yield f"http://127.0.0.1:{found[2]}"
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
        assert process.wait(20) == 0
        assert "Traceback" not in "".join(seen) + rest


def ask(url: str, name: str = "tiny") -> str:
    """Return what the model generates as the capital of France."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": name, "messages": [question], "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["message"]["content"]
