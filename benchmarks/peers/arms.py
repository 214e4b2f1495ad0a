"""Run arms as processes that are started once for a model and dtype and perform one run at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers.worker import Setup
from peers.workloads import Workload

START_SECONDS = 600.0
RUN_SECONDS = 600.0
QUIT_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Arm:
    """Describe a competitor: its module in ``peers``, the Python that runs it, and options of its engine."""

    name: str
    module: str
    python: str
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


class ArmError(Exception):
    """Raised when an arm failed; the message contains its last output."""


@dataclass(frozen=True, slots=True)
class Run:
    """Describe one timed run. ``others_cpu`` is the CPU time of the other arms' processes during the run, divided by
    its seconds."""

    seconds: float
    tokens: list[list[int]]
    others_cpu: float = 0.0


class Process:
    """Control an arm's process and its child processes, which form a separate session.

    They are stopped by signal except while the process starts or runs: vLLM's workers, for example, spin for a second
    after their last step.
    """

    def __init__(self, arm: Arm, setup: Setup, work: Path) -> None:
        self.arm = arm
        self.log = work / "logs" / f"{arm.name}-{Path(setup.model).name}-{setup.dtype}.log".replace(" ", "-")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [arm.python, "-m", f"peers.{arm.module}", json.dumps(asdict(setup))],
                cwd=Path(__file__).parent.parent,
                env={**environment(setup.threads, work), **arm.env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            self.versions: dict[str, str] = self._read(START_SECONDS)["ready"]
        except ArmError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, workload: Workload, prompts: list[list[int]]) -> Run:
        """Run all prompts together. Raises ``ArmError``."""
        answer = self._ask("run", workload, prompts)
        return Run(answer["seconds"], answer["tokens"])

    def profile(self, workload: Workload, prompts: list[list[int]]) -> str:
        """Return how the time of a run is spent. Raises ``ArmError``."""
        return self._ask("profile", workload, prompts)["text"]

    def _ask(self, op: str, workload: Workload, prompts: list[list[int]]) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        self._write({"op": op, "prompts": prompts, "output_lens": workload.output_lens})
        answer = self._read(RUN_SECONDS)
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise ArmError(f"{self.arm.name}: {answer['error']}")
        return answer

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the following read reports what happened
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self, timeout: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], timeout)
        line = out.readline() if ready else b""
        if not line:
            what = "ended" if ready else f"said nothing for {timeout:.0f} s"
            raise ArmError(f"{self.arm.name} {what}; its log ends with:\n{tail(self.log)}")
        return json.loads(line)

    def cpu_seconds(self) -> float:
        """Return the CPU time so far of the process and its child processes."""
        return session_cpu_seconds(self._process.pid)

    def close(self) -> None:
        """Request the process to end, wait for it, and end the remaining processes of its session."""
        self._signal(signal.SIGCONT)
        self._write({"op": "quit"})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(QUIT_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def environment(threads: int, work: Path) -> dict[str, str]:
    """Return the environment of every arm. Compile caches stay under ``work``, so that a second run starts faster."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(work / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def session_cpu_seconds(session: int) -> float:
    """Return the user and system time of all running processes of a session; 0 on systems without /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measured(process: Process, others: list[Process], workload: Workload, prompts: list[list[int]]) -> Run:
    """Call ``process.run``, and add the CPU time that the idle arms took from it."""
    before, start = sum(p.cpu_seconds() for p in others), time.perf_counter()
    run = process.run(workload, prompts)
    elapsed = time.perf_counter() - start
    others_cpu = (sum(p.cpu_seconds() for p in others) - before) / elapsed
    return Run(run.seconds, run.tokens, others_cpu)


def tail(log: Path, lines: int = 12) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
