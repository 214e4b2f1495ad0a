"""Run one job of an arm in this process and exit: ``python -m dovetail.experiment.worker JOB``.

The process drives the engine itself, without a server: no HTTP, no event loop and no second process compete for the CPU, which
gives the least noise. Calls still arrive at their scheduled times.
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
"""The entries of an engine's info that its config does not determine."""
LOW_PAGES = 4096
"""The number of pages that are used last where outputs are compared, so that these have page ids above it. Kernels that
truncate page ids or offsets are wrong only there."""


def main(file: Path) -> None:
    """Do the job in ``file``. If it fails, write the reason to ``ArmJob.failure``."""
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    job = read_job(file)
    try:
        do_job(job)
    except DovetailError as error:
        job.failure.write_text(str(error), encoding="utf-8")
        raise


def do_job(job: ArmJob) -> None:
    """Do a job in this process. Raises ``DovetailError``."""
    llm = LLM(_config(job))
    startup = time.time() - job.launched
    try:
        _check(llm, job)
        if job.kind == "measure":
            _measure(llm, job, startup)
        else:
            use_low_pages_last(llm)
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
            f"the config resolves to {found} here and to {job.config_hash} in the process that started the experiment: an installed "
            "package or a tuning record has changed meanwhile; start the experiment again"
        )


def _measure(llm: LLM, job: ArmJob, startup: float) -> None:
    trace = _workload(job)
    llm.loop.finish_idle_work()  # a server does this while it is idle
    first = warm_up(trace, job.warm_up) if job.warm_up else None
    write_json(measure_offline(llm, trace, first, startup_seconds=startup, arm=job.arm, block=job.block), job.output)


def _record(llm: LLM, job: ArmJob) -> ArmOutputs:
    """Write the trace and return A's outputs, generated twice."""
    assert job.trace is not None, "a record job names the trace"
    workload = _workload(job)
    every = record(llm, workload, frozenset(job.compared))
    write_json(frozen_trace(workload, every), job.trace)
    calls = [call for call in workload.calls if call.id in job.compared]
    mine = [given for given in every if given.id in job.compared]
    again = answer(llm, calls, [given.prompt_ids for given in mine], backwards=True)
    return ArmOutputs(mine, force(llm, mine), again, force(llm, mine, backwards=True), facts=_facts(llm))


def _answer(llm: LLM, job: ArmJob) -> ArmOutputs:
    """Return B's answers to A's prompts, and B's log-probabilities of A's texts. Raises ``EngineError`` if a step fails."""
    assert job.given is not None, "an answer job names A's outputs"
    theirs = read_outputs(job.given).answers
    calls = {call.id: call for call in _workload(job).calls}
    try:
        mine = answer(llm, [calls[given.id] for given in theirs], [given.prompt_ids for given in theirs])
        return ArmOutputs(mine, force(llm, theirs), facts=_facts(llm))
    except RequestError as error:
        return ArmOutputs(refused=str(error), facts=_facts(llm))


def use_low_pages_last(llm: LLM) -> None:
    """Hand out the first ``LOW_PAGES`` pages of each pool last, if it has more."""
    for ledger in llm.loop.scheduler.ledger.members:
        if ledger.allocator.num_free > LOW_PAGES:
            ledger.allocator.postpone(LOW_PAGES)


def _facts(llm: LLM) -> dict[str, str]:
    info: dict[str, Any] = llm.loop.info
    return {key: str(info[key]) for key in FACTS}


def _workload(job: ArmJob) -> Workload:
    return Workload.model_validate_json(job.workload.read_text(encoding="utf-8"))


def _end_with_parent() -> None:
    """Exit when standard input is closed, which happens when the parent process ends, because the parent holds the other end."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the engine is closed; unloading torch module by module would take most of a second in every run
