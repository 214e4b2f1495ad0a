"""Test engines that die, hang, and are started again, and how a server ends that has none.

.venv/bin/python -m pytest -q tests/e2e/test_engine_restarts.py
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import run_fake_engine, run_fragile_engine
from served import is_gone, killed_at_end

from dovetail.config import Config
from dovetail.errors import EngineError
from dovetail.server.client import EngineClient
from dovetail.server.engine_process import EngineTarget
from dovetail.server.heartbeat import Heartbeat
from dovetail.server.launch import running_server
from dovetail.server.process_tree import descendants, end_leftovers
from dovetail.server.socket_folder import make_socket_folder

PATIENCE = 30.0  # of which a machine with other work to do may take most
SLOW = {"prompt": "one two", "max_tokens": 2000, "cache_salt": "slow"}  # 20 ms a token: 40 s
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({"prompt": "a b", "max_tokens": 2000}, "error"),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2000}, "error"),
    "/v1/messages": ({"model": "tiny", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 2000}, "error"),
    "/v1/responses": ({"input": "a b", "max_output_tokens": 2000}, "error"),
    "/api/generate": ({"model": "tiny", "prompt": "a b", "options": {"num_predict": 2000}}, "error"),
    "/generate": ({"text": "a b", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}, "error"),
}


@contextmanager
def serving(
    target: EngineTarget = run_fake_engine, tuning: str | None = None, **supervision: Any
) -> Iterator[httpx.Client]:
    server = {"port": 0, "log_level": "error"}
    tree = {"tuning": {"path": tuning}, "server": server, "supervision": supervision}
    config = Config.model_validate(tree)
    with running_server(config, target=target) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        yield client


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.01)


def info(client: httpx.Client) -> dict[str, Any]:
    return client.get("/server_info").json()


def healthy(client: httpx.Client) -> bool:
    return client.get("/health").status_code == 200


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def post_in_thread(
    client: httpx.Client, body: dict[str, Any], answers: list[httpx.Response], path: str = "/v1/completions"
) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(client.post(path, json=body)))
    thread.start()
    return thread


def complete(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "x y", "max_tokens": 2, **body})


def test_a_dead_engine_is_started_again():
    with serving(backoff_seconds=0.5) as client:
        answers: list[httpx.Response] = []
        threads = [post_in_thread(client, body, answers) for body in (SLOW, SLOW | {"stream": True})]
        eventually(lambda: info(client)["stats"]["running"] == 2)
        first = info(client)["engine_pid"]
        os.kill(first, signal.SIGKILL)
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(answer.status_code for answer in answers) == [200, 503]  # the stream had begun
        assert all("the engine process has ended: it ended with status -9" in answer.text for answer in answers)
        health = client.get("/health")
        assert (health.status_code, "it is being started again" in health.text) == (503, True)
        assert (info(client)["status"], metric(client, "dovetail_requests_running")) == ("restarting", 0)
        eventually(lambda: healthy(client))
        assert complete(client).json()["usage"]["completion_tokens"] == 2
        assert info(client)["engine_pid"] != first
        assert metric(client, "dovetail_engine_restarts_total") == 1
        assert info(client)["open_requests"] == 0


def test_a_start_that_fails_is_tried_again(tmp_path: Path):
    starts = tmp_path / "starts"
    with serving(run_fragile_engine, str(starts), backoff_seconds=0.01) as client:
        assert complete(client, cache_salt="raise").status_code == 503
        eventually(lambda: healthy(client))
        assert starts.read_text() == "xxx"


def test_an_engine_that_stands_still_is_killed_and_started_again():
    with serving(stall_seconds=0.4, kill_seconds=1.6, backoff_seconds=0.2) as client:
        answers: list[httpx.Response] = []
        thread = post_in_thread(client, SLOW, answers)
        eventually(lambda: info(client)["stats"]["running"] == 1)
        first = info(client)["engine_pid"]
        os.kill(first, signal.SIGSTOP)
        eventually(lambda: "no sign of life" in client.get("/health").text)
        assert complete(client).status_code == 503
        thread.join(PATIENCE)
        assert (answers[0].status_code, "no sign of life" in answers[0].text) == (503, True)
        eventually(lambda: healthy(client))
        assert complete(client).status_code == 200
        assert not Path(f"/proc/{first}").exists()


def test_a_long_step_is_a_stall_and_no_death():
    with serving(stall_seconds=0.3, kill_seconds=60) as client:
        answers: list[httpx.Response] = []
        first = info(client)["engine_pid"]
        thread = post_in_thread(client, {"prompt": "x", "cache_salt": "hang:1.5"}, answers)
        eventually(lambda: not healthy(client))
        assert info(client)["status"] == "stalled"
        thread.join(PATIENCE)
        assert answers[0].status_code == 200
        eventually(lambda: healthy(client))
        assert info(client)["engine_pid"] == first


def test_an_idle_engine_is_no_stall():
    with serving(stall_seconds=0.2, kill_seconds=0.4) as client:
        first = info(client)["engine_pid"]
        time.sleep(1.0)
        assert (healthy(client), info(client)["engine_pid"]) == (True, first)


def test_a_heartbeat_does_not_count_time_in_which_the_server_was_stopped():
    heartbeat = Heartbeat(60)
    assert heartbeat.tick(5.0)
    assert not heartbeat.tick(3600.0)
    assert heartbeat.silent == 10
    heartbeat.heard()
    assert heartbeat.silent == 0
    assert heartbeat.tick(5.0)
    for _ in range(12):
        assert not heartbeat.tick(5.0)
    assert heartbeat.silent == 60


SERVE = """
import sys; sys.path.insert(0, {here!r})
from functools import partial
import fake_engine
from dovetail.cli import main
from dovetail.server import launch
if __name__ == "__main__":
    launch.serve = partial(launch.serve, target=fake_engine.{target})
    main(["serve", "--set", "server.port=0", "--set", "server.drain_seconds=0.3", *{settings!r}])
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a folder whose path is short enough for the sockets of an engine, which that of ``tmp_path`` may not be."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


@contextmanager
def started(
    tmp_path: Path, temporary: Path, target: str = "run_fake_engine", **supervision: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a server in a separate process, whose temporary files are in ``temporary``."""
    file = tmp_path / "serve.py"
    settings = [word for key, value in supervision.items() for word in ("--set", f"supervision.{key}={value}")]
    file.write_text(SERVE.format(here=str(Path(__file__).parent), settings=settings, target=target))
    process = subprocess.Popen(
        [sys.executable, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        preexec_fn=partial(
            signal.signal, signal.SIGINT, signal.SIG_DFL
        ),  # a shell's background job inherits it ignored
    )
    with killed_at_end(process):
        yield process


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = next(line for line in process.stdout if "ready in" in line)
    return line.split(" on ")[1].split(",")[0]


@pytest.mark.parametrize("most", [0, 1])
def test_after_the_last_restart_the_server_ends(tmp_path: Path, temporary: Path, most: int):
    with (
        started(tmp_path, temporary, max_restarts=most, backoff_seconds=0.01) as process,
        httpx.Client(base_url=url_of(process), timeout=PATIENCE) as client,
    ):
        assert [*temporary.iterdir()] == []  # nothing is left, even if the server is killed now
        for death in range(most + 1):
            eventually(lambda n=death: healthy(client) and metric(client, "dovetail_engine_restarts_total") == n)
            assert complete(client, cache_salt="exit").status_code == 503
        assert process.wait(PATIENCE) == 70


def test_sigterm_with_an_engine_that_hangs(tmp_path: Path, temporary: Path):
    """No request has begun its answer: the engine hangs before it reads them."""
    with (
        started(tmp_path, temporary, stall_seconds=1.5, kill_seconds=600) as process,
        httpx.Client(base_url=url_of(process), timeout=PATIENCE) as client,
    ):
        stuck = post_in_thread(client, {"prompt": "x", "cache_salt": "hang:600"}, [])
        eventually(lambda: info(client)["open_requests"] == 1)
        answers: dict[str, list[httpx.Response]] = {path: [] for path in FORMATS}
        threads = [post_in_thread(client, FORMATS[path][0], found, path) for path, found in answers.items()]
        eventually(lambda: info(client)["open_requests"] == len(FORMATS) + 1 or info(client)["status"] == "stalled")
        pid = info(client)["engine_pid"]
        process.send_signal(signal.SIGTERM)
        for thread in (*threads, stuck):
            thread.join(PATIENCE)
        assert process.wait(PATIENCE) == 70
        assert is_gone(pid)
        assert process.stdout
        log = process.stdout.read()
    assert "did not respond any more" in log
    assert "started again" not in log
    for path, (_, field) in FORMATS.items():
        (answer,) = answers[path]
        assert answer.status_code == 503, path
        assert answer.json()[field], path


def test_sigterm_with_an_idle_engine_that_hangs(tmp_path: Path, temporary: Path):
    with (
        started(tmp_path, temporary) as process,
        httpx.Client(base_url=url_of(process), timeout=PATIENCE) as client,
    ):
        pid = info(client)["engine_pid"]
        os.kill(pid, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 70
        assert is_gone(pid)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_engine_starts(tmp_path: Path, temporary: Path, number: signal.Signals, status: int):
    """An orchestrator that stops the server sees no failure."""
    with started(tmp_path, temporary, "run_endless_start") as process:
        eventually(lambda: any(temporary.glob("dovetail-*")) and len(descendants(process.pid)) > 1)
        children = descendants(process.pid)
        process.send_signal(number)
        assert process.wait(PATIENCE) == status
        assert process.stdout
        assert "Traceback" not in process.stdout.read()
    assert [*temporary.iterdir()] == []
    eventually(lambda: all(is_gone(child.pid) for child in children))


@pytest.mark.parametrize("module", ["click", "uvicorn"])
def test_sigterm_while_python_imports(module: str):
    command = [sys.executable, "-X", "importtime", "-m", "dovetail", "serve", "tiny", "--device", "cpu", "--port", "0"]
    with killed_at_end(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as process:
        assert process.stderr
        assert any(line.rpartition("|")[2].strip() == module for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(PATIENCE) == 0
    assert "Traceback" not in rest


def test_processes_that_outlive_the_engine_are_ended():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        (found,) = [process for process in descendants(os.getpid()) if process.pid == child.pid]
        end_leftovers([found._replace(started="0")], 0.0)
        assert child.poll() is None, "a later process with the same id is another process"
        end_leftovers([found], 0.05)
        assert child.wait(PATIENCE) == -signal.SIGKILL


def test_a_long_folder_for_temporary_files_is_avoided_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = make_socket_folder()
    assert folder.parent == Path("/tmp")
    folder.rmdir()

    async def serve_once() -> None:
        client = EngineClient(Config(), run_fake_engine)
        await client.start()
        await client.stop()

    asyncio.run(serve_once())
    monkeypatch.setattr("dovetail.server.socket_folder.MOST_BYTES", 10)
    with pytest.raises(EngineError, match="set TMPDIR to a directory with a short path"):
        make_socket_folder()
    assert [*long.iterdir()] == []
