"""Describe the jobs of an experiment, and run each in a fresh process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from dovetail.bench.records import Data, write_json
from dovetail.config.sources import PREFIX
from dovetail.errors import EngineError

WORKER = "dovetail.experiment.worker"
TAIL_LINES = 20


class ArmJob(Data):
    """Describe one job. ``record``: answer the ``workload`` and write the frozen trace and arm A's ``gate.ArmOutputs``. ``answer``:
    write arm B's outputs for the calls in A's outputs (``given``). ``measure``: run the trace in ``workload`` and write its
    ``RunRecord``.

    ``config`` is the tree of the arm's config, which must resolve to ``config_hash``. Paths are files: ``output`` is the file that
    the job writes, ``trace`` the frozen trace. ``compared`` are the calls whose outputs are compared; ``warm_up`` is the number of
    calls that run before. ``launched`` is the time (Unix) at which the process was started.
    """

    kind: Literal["record", "answer", "measure"]
    arm: str
    block: int = 0
    config: dict[str, Any]
    config_hash: str
    workload: Path
    output: Path
    trace: Path | None = None
    given: Path | None = None
    compared: tuple[str, ...] = ()
    warm_up: int = 0
    launched: float = 0.0

    @property
    def failure(self) -> Path:
        """Return the file in which the process writes why it failed."""
        return self.output.with_suffix(".failure")


def run_job(job: ArmJob) -> None:
    """Run a job in a separate process that ends with this one. The process gets no settings from the environment, because ``config``
    holds all of them. Raises ``EngineError`` with the process's output if it fails."""
    file, log = job.output.with_suffix(".job.json"), job.output.with_suffix(".log")
    write_json(job.model_copy(update={"launched": time.time()}), file)
    env = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(file)],
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=sink,
            env=env,
            start_new_session=True,  # this process handles Ctrl-C
        )
    with _ended(process):
        status = process.wait()
    if status != 0:
        raise EngineError(f"arm {job.arm}, {job.kind}: {_why(job, log, status)}")


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the process when the block ends. The process also ends by itself when its standard input is closed."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _why(job: ArmJob, log: Path, status: int) -> str:
    if job.failure.exists():
        return job.failure.read_text(encoding="utf-8")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f"its process ended with status {status}", *lines])


def read_job(file: Path) -> ArmJob:
    """Read a job from a file. Raises ``EngineError``."""
    try:
        return ArmJob.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise EngineError(f"{file} does not hold a job of an experiment: {error}") from error
