"""Start a server for a measurement in a separate process, so that client and server share no interpreter."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from dovetail.bench.machine import peak_memory
from dovetail.config import Config, dump
from dovetail.errors import EngineError

_COMMAND = (sys.executable, "-c", "from dovetail.cli import main; main()", "serve")
_POLL_SECONDS = 0.05
_STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class OwnServer:
    """Describe a server that is ready. ``startup_seconds`` is the time from the start of the process to the first
    healthy answer."""

    url: str
    pid: int
    startup_seconds: float

    def peak_memory(self) -> int | None:
        """Return the peak host memory of server and engine in bytes; None if the system does not report it."""
        return peak_memory(self.pid)


@contextlib.contextmanager
def own_server(config: Config, timeout: float = 600.0) -> Iterator[OwnServer]:
    """Run ``dovetail serve`` with this config on a free port of this machine, and stop it at the end.

    Raises ``EngineError`` with the end of the server's output if it is not ready within ``timeout`` seconds.
    """
    port = _free_port()
    tree = dump(config)
    tree["server"] |= {"host": "127.0.0.1", "port": port}
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        file, log = Path(folder) / "config.json", Path(folder) / "log"
        file.write_text(json.dumps(tree), encoding="utf-8")
        with log.open("wb") as sink:
            started = time.perf_counter()
            process = subprocess.Popen([*_COMMAND, str(file)], stdout=sink, stderr=sink)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, log, started + timeout)
            yield OwnServer(url, process.pid, time.perf_counter() - started)
        finally:
            _stop(process)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as client:
        while True:
            if process.poll() is not None:
                raise EngineError(f"the server ended with status {process.returncode}:\n{_tail(log)}")
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/health").status_code == 200:
                    return
            if time.perf_counter() > deadline:
                raise EngineError(f"the server was not ready in time:\n{_tail(log)}")
            time.sleep(_POLL_SECONDS)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
