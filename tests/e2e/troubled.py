"""Run servers whose attention fails on demand (``trouble_attention``), and check how they must react on any device.
Every wait has a limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

HERE = Path(__file__).parent
START_SECONDS = 80
PATIENCE = 20.0
COMMON = [
    "attention=trouble",
    "server.port=0",
    "server.drain_seconds=1",
    "supervision.backoff_seconds=3600",
    "threads=1",
    "grammar=none",
]
STORY = {"text": "The quick brown", "sampling_params": {"max_new_tokens": 48, "temperature": 0, "ignore_eos": True}}


def environment(directory: Path, **more: str) -> dict[str, str]:
    """Return an environment in which the plugin is installed."""
    about = directory / "trouble-0.1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trouble\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[dovetail.plugins]\ntrouble = trouble_plugin\n")
    paths = [str(directory), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1", **more}


@dataclass
class Program:
    """Run a process whose output goes to a file."""

    process: subprocess.Popen[bytes]
    file: Path

    @property
    def log(self) -> str:
        """Return everything that it has written so far."""
        return self.file.read_text("utf-8", "replace")

    def wait(self, seconds: float) -> int:
        """Wait for its end and return its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it hangs:\n{self.log[-4000:]}") from None


def run(directory: Path, arguments: list[str], **more: str) -> Program:
    """Start Python."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "output.txt"
    with file.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], env=environment(directory, **more), stdout=output, stderr=subprocess.STDOUT
        )
    return Program(process, file)


def serve(directory: Path, *sets: str, **more: str) -> Program:
    """Start ``dovetail serve``."""
    options = [word for text in (*COMMON, *sets) for word in ("--set", text)]
    return run(directory, ["-c", "from dovetail.cli import main; main()", "serve", *options], **more)


@contextmanager
def client_of(server: Program) -> Iterator[httpx.Client]:
    """Return a client of a server that is starting; the server is killed in the end."""
    try:
        eventually(lambda: "ready in" in server.log or server.process.poll() is not None, START_SECONDS)
        assert "ready in" in server.log, server.log[-4000:]
        url = server.log.split(" on http://")[1].split(",")[0]
        with httpx.Client(base_url=f"http://{url}", timeout=PATIENCE) as client:
            yield client
    finally:
        server.process.kill()
        server.process.wait(PATIENCE)


def eventually(check: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.02)


def stats(client: httpx.Client) -> dict:
    return client.get("/server_info").json()["stats"]


def tell(client: httpx.Client, trouble: str = "", **changes: object) -> httpx.Response:
    """Request the story."""
    return client.post("/generate", json=STORY | {"cache_salt": trouble} | changes)


def check_illegal_requests(client: httpx.Client) -> None:
    """Check that they are refused before the engine makes a step."""
    info = client.get("/server_info").json()
    vocab, context = info["engine"]["resolved"]["model"]["vocab_size"], info["engine"]["context_len"]
    before = stats(client)["steps"]
    for ids in ([5, vocab], [-1], [5, 2**31 + 5], [2**70], [5] * context, []):
        answer = client.post("/generate", json={"input_ids": ids})
        assert answer.status_code == 400, (ids[:3], answer.text)
        assert answer.json()["error"]["message"]
    for changes in ({"stop_token_ids": [vocab]}, {"logit_bias": {"-1": 3}}, {"max_new_tokens": context}):
        answer = tell(client, sampling_params=changes)
        assert answer.status_code == 400, (changes, answer.text)
    assert stats(client)["steps"] == before


def check_memory_errors(client: httpx.Client, text: str) -> None:
    """Check that they end their requests, and that later requests get the same outputs as before."""
    expected = tell(client).json()["output_ids"]
    assert len(expected) == 48
    for trouble in ("memory prompt", "memory decode"):
        answer = tell(client, trouble)
        assert answer.status_code == 500, answer.text
        assert text in answer.text
        assert stats(client)["pages_used"] == stats(client)["running"] == 0
        assert tell(client).json()["output_ids"] == expected
        assert client.get("/health").status_code == 200


def check_lost_device(client: httpx.Client, server: Program, trouble: str) -> None:
    """Check that every waiting request is answered, that every new request is refused, and that the processes end with
    their status."""
    ends: list[str] = []
    begun = threading.Event()

    def listen() -> None:
        body = {"max_new_tokens": 1900, "temperature": 0, "ignore_eos": True}
        with client.stream("POST", "/generate", json=STORY | {"sampling_params": body, "stream": True}) as answer:
            for line in answer.iter_lines():
                begun.set()
                ends[:] = [line] if line else ends

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert begun.wait(PATIENCE)
    pid = client.get("/server_info").json()["engine_pid"]
    answer = tell(client, trouble)
    assert (answer.status_code, "the device was lost" in answer.text) == (503, True), answer.text
    listener.join(PATIENCE)
    assert not listener.is_alive(), "a stream hangs"
    assert "the device was lost" in json.loads(ends[0].removeprefix("data: "))["error"]["message"]
    for path in ("/health", "/health_generate"):
        answer = client.get(path)
        assert (answer.status_code, "the device was lost" in answer.text) == (503, True), answer.text
    assert tell(client).status_code == client.post("/flush_cache").status_code == 503
    assert client.get("/server_info").json()["status"] == "restarting"
    eventually(lambda: is_gone(pid))
    eventually(lambda: "the engine process ended with status 70" in server.log)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 70


def is_gone(pid: int) -> bool:
    """Return whether the process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def check_start_up_failure(server: Program, *texts: str, expected: int = 1) -> None:
    """Check for one message, no traceback, and the exit status: 1, or 2 for settings that do not fit the device."""
    status = server.wait(START_SECONDS)
    log = server.log
    assert status == expected, f"exit status {status}, expected {expected}:\n{log}"
    assert "error: the engine did not start: " in log
    for text in texts:
        assert text in log, log
    assert "Traceback" not in log, log
