"""The process in which an arm runs: one engine, one job, then it ends. ``python -m dovetail.experiment.worker JOB``.

The engine is driven in this process, without a server: no HTTP, no event loop and no second process that competes for the
CPU, which leaves the least noise. Calls arrive at their times all the same.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from dovetail.bench.offline import measure_offline
from dovetail.bench.records import Workload, write_json
from dovetail.config import Config, config_hash, plugins_section, validate
from dovetail.config.sources import Raw, SettingsSource
from dovetail.errors import DovetailError, EngineError, RequestError
from dovetail.experiment.gate import ArmOutputs, read_outputs
from dovetail.experiment.jobs import ArmJob, read_job
from dovetail.experiment.trace import answer, force, frozen_trace, record, warm_up
from dovetail.llm import LLM
from dovetail.registry.loader import load_plugins

FACTS = ("architecture", "device", "cpu_kernels", "products", "page_size", "num_pages", "overlap", "graphs")
"""Of what an engine says of itself, that which config does not say."""


def main(file: Path) -> None:
    """Do the job in ``file``; why it failed is written beside its output."""
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    job = read_job(file)
    try:
        do_job(job)
    except DovetailError as error:
        job.failure.write_text(str(error), encoding="utf-8")
        raise


def do_job(job: ArmJob) -> None:
    """All of it, in this process. Raises ``DovetailError``."""
    llm = LLM(_config(job))
    startup = time.time() - job.launched
    try:
        _check(llm, job)
        if job.kind == "measure":
            _measure(llm, job, startup)
        else:
            outputs = _record(llm, job) if job.kind == "record" else _answer(llm, job)
            job.output.write_bytes(msgspec.msgpack.encode(outputs))
    finally:
        llm.close()


def _config(job: ArmJob) -> Config:
    raw = Raw((SettingsSource("the job", job.config),))
    return validate(raw, load_plugins(plugins_section(raw)))


def _check(llm: LLM, job: ArmJob) -> None:
    found = config_hash(llm.resolved.config)
    if found != job.config_hash:
        raise EngineError(
            f"the config resolves to {found} here and to {job.config_hash} in the process that began the experiment: something "
            "that is installed, or a tuning record, has changed meanwhile; start again"
        )


def _measure(llm: LLM, job: ArmJob, startup: float) -> None:
    trace = _workload(job)
    while llm.loop.idle():  # graphs that a server captures while nobody asks it anything
        pass
    first = warm_up(trace, job.warm_up) if job.warm_up else None
    write_json(measure_offline(llm, trace, first, startup_seconds=startup, arm=job.arm, block=job.block), job.output)


def _record(llm: LLM, job: ArmJob) -> ArmOutputs:
    """A's answers, twice; and the trace."""
    assert job.trace is not None, "record says where"
    workload = _workload(job)
    every = record(llm, workload, frozenset(job.compared))
    write_json(frozen_trace(workload, every), job.trace)
    calls = [call for call in workload.calls if call.id in job.compared]
    mine = [given for given in every if given.id in job.compared]
    again = answer(llm, calls, [given.prompt_ids for given in mine], backwards=True)
    return ArmOutputs(mine, force(llm, mine), again, force(llm, mine, backwards=True), facts=_facts(llm))


def _answer(llm: LLM, job: ArmJob) -> ArmOutputs:
    """B's answers to the prompts of A's, and what it thinks of A's texts."""
    assert job.given is not None, "answer says to what"
    theirs = read_outputs(job.given).answers
    calls = {call.id: call for call in _workload(job).calls}
    try:
        mine = answer(llm, [calls[given.id] for given in theirs], [given.prompt_ids for given in theirs])
        return ArmOutputs(mine, force(llm, theirs), facts=_facts(llm))
    except (RequestError, EngineError) as error:
        return ArmOutputs(refused=str(error), facts=_facts(llm))


def _facts(llm: LLM) -> dict[str, str]:
    info: dict[str, Any] = llm.loop.info
    return {key: str(info[key]) for key in FACTS}


def _workload(job: ArmJob) -> Workload:
    return Workload.model_validate_json(job.workload.read_text(encoding="utf-8"))


def _end_with_parent() -> None:
    """Whoever started this process holds the other end of its standard input."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the engine is closed; to take torch apart module by module costs most of a second of every run
