"""Run tasks in worker processes against a deadline; a crash loses only the current task."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpubench.plan import Job

ROOT = Path(__file__).resolve().parent.parent
LAST_LINES = 12
WORKER = "gpubench.worker"


@dataclass(frozen=True, slots=True)
class Ended:
    """Describe a task that ended with a ``result`` or an ``error``; ``left_out`` if there was no time for it."""

    task: str
    result: Any = None
    error: str | None = None
    left_out: bool = False
    took: float = 0.0


class Deadline:
    """Mark the moment after which nothing is started or waited for."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Return the seconds until the deadline, at least 0; None without a limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return self.left == 0.0


def run_tasks(job: Job, tasks: list[str], deadline: Deadline) -> Iterator[Ended]:
    """Run the tasks in order, in as many processes as necessary. The first ``Ended`` of each process is ``start``."""
    rest = list(tasks)
    while rest:
        failed_start = False
        for ended in _one_process(job, list(rest), deadline):
            if ended.task in rest:
                rest.remove(ended.task)
            failed_start = ended.task == "start" and ended.result is None
            yield ended
        if failed_start or deadline.passed:
            break
    for task in rest:
        yield Ended(task, left_out=True)


def _one_process(job: Job, tasks: list[str], deadline: Deadline) -> Iterator[Ended]:
    """Yield the tasks that one process completes before it ends or the time is up."""
    log = Path(job.work) / "logs" / f"{job.kind}-{job.model}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", WORKER, json.dumps(asdict(job)), json.dumps(tasks)]
    open_task: str | None = "start"
    with started(command, log, stdout=subprocess.PIPE) as process:
        for message in _messages(process, deadline):
            if "begin" in message:
                open_task = message["begin"]
                continue
            open_task = None
            if "failed" in message:
                yield Ended(message["failed"], error=message["error"])
                return
            yield Ended(message["done"], message["result"], took=message.get("took", 0.0))
            if deadline.passed or message["done"] == tasks[-1]:
                return
    if open_task is not None:
        late = deadline.passed
        yield Ended(open_task, error=None if late else f"the process ended:\n{tail(log)}", left_out=late)


def _messages(process: subprocess.Popen[bytes], deadline: Deadline) -> Iterator[dict[str, Any]]:
    """Yield the messages of a worker until it ends or the time is up."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=deadline.left)
        except queue.Empty:
            return
        if line is None:
            return
        yield json.loads(line)


@contextlib.contextmanager
def started(command: list[str], log: Path, stdout: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a separate session, with its errors in ``log``; it and its children are killed at the end."""
    with log.open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, stdout=stdout, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
