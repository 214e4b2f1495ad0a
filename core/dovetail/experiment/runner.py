"""Run an experiment from start to end: arm A records the trace, the gate compares the outputs of both arms, then blocks of runs (ABBA)
measure the speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from dovetail.bench.machine import machine_facts
from dovetail.bench.metrics import SLO
from dovetail.bench.records import Workload, read_record, write_json
from dovetail.config import dump
from dovetail.errors import ConfigError, EngineError
from dovetail.experiment import result
from dovetail.experiment.arms import ConfigDifference, ResolvedArm, differences, intended_sections
from dovetail.experiment.completed_blocks import CompletedBlocks, RunBlock, looks, summary
from dovetail.experiment.gate import ArmOutputs, evaluate_gate, read_outputs, thresholds_of
from dovetail.experiment.jobs import ArmJob, run_job
from dovetail.experiment.samples import PRIMARY
from dovetail.experiment.verdict import Rules, stop_reason

FORWARDS, BACKWARDS = "abba", "baab"
"""The order of the runs in the first, third, fifth, ... block, and the order in the others. A machine that becomes slower steadily
slows both arms equally."""


@dataclass(frozen=True, slots=True)
class ExperimentSettings:
    """Configure an experiment. ``max_blocks`` is the largest number of blocks, or the exact number if ``rules.peeking`` is off. The gate
    compares ``compared`` calls, with the margin ``near_tie`` (nats) if that is set. With ``allow`` different outputs do not stop the
    experiment."""

    rules: Rules = field(default_factory=Rules)
    max_blocks: int = 12
    primary: tuple[str, ...] = PRIMARY
    slo: SLO | None = None
    compared: int = 128
    near_tie: float | None = None
    allow: bool = False
    warm_up: int = 8
    resamples: int = 2000
    seed: int = 0
    title: str = ""
    command: str = ""
    arrivals: str = ""


class ProgressWatcher(Protocol):
    """Receive the progress of an experiment."""

    def stage(self, text: str, total: int) -> None:
        """Report that a stage of ``total`` steps begins."""
        ...

    def step(self, text: str) -> None:
        """Report that a step of the stage is done. ``text`` is the current state."""
        ...


Launch = Callable[[ArmJob], None]


class ExperimentRunner:
    """Run two arms on a workload and write the files to ``folder``. ``launch`` runs a job in a separate process."""

    def __init__(
        self,
        a: ResolvedArm,
        b: ResolvedArm,
        workload: Workload,
        settings: ExperimentSettings,
        folder: Path,
        watcher: ProgressWatcher,
        launch: Launch = run_job,
    ) -> None:
        self._arms = {"a": a, "b": b}
        self._settings = settings
        self._folder = folder
        self._watcher = watcher
        self._launch = launch
        self._workload = workload
        self._workload_file = folder / "workload.json"
        self._trace = folder / "trace.json"
        self._began = time.perf_counter()
        self._started = datetime.now(UTC)
        self._looks: list[result.Look] = []
        self._facts: list[result.DifferenceRecord] = []
        self._failure = ""

    def run(self) -> result.ExperimentRecord:
        """Run the experiment and return its record. Ctrl-C after the gate ends it with the complete blocks, and so does an arm that
        fails then. Raises ``EngineError`` if an arm fails before, and ``ConfigError`` for a folder that is not empty or cannot be
        written."""
        check_folder(self._folder)
        write_json(self._workload, self._workload_file)
        gate = self._gate()
        trace = Workload.model_validate_json(self._trace.read_text(encoding="utf-8"))
        s = self._settings
        completed = CompletedBlocks(trace, s.slo, s.primary, s.rules, s.resamples, s.seed, [])
        stopped = "the outputs differ" if gate.outcome == "failed" else self._measure(completed)
        return self._finished(gate, completed, stopped)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _gate(self) -> result.GateRecord:
        compared = _spread([call.id for call in self._workload.calls], self._settings.compared)
        self._watcher.stage("outputs", 2)
        a = self._outputs("record", "a", compared)
        self._watcher.step(f"arm a has answered {len(self._workload.calls)} calls")
        b = self._outputs("answer", "b", compared)
        self._watcher.step(f"arm b has answered {len(b.answers)} of them")
        self._facts = [
            result.DifferenceRecord(key=f"engine: {key}", a=value, b=b.facts[key], intended=False)
            for key, value in a.facts.items()
            if b.facts.get(key) != value
        ]
        section = self._arms["a"].resolved.config
        limits = thresholds_of(a, (section.model.dtype, section.memory.kv_dtype), self._settings.near_tie)
        schemas = {call.id: call.json_schema for call in self._workload.calls if call.json_schema is not None}
        return evaluate_gate(a, b, limits, schemas, decode=decoder(self._arms["a"]), allow=self._settings.allow)

    def _outputs(self, kind: str, arm: str, compared: Sequence[str]) -> ArmOutputs:
        output = self._folder / f"outputs-{arm}.msgpack"
        given = self._folder / "outputs-a.msgpack"
        update = {"compared": tuple(compared), "trace": self._trace, "given": given}
        job = self._job(kind, arm, self._workload_file, output).model_copy(update=update)
        self._launch(job)
        return read_outputs(output)

    # -- speed -------------------------------------------------------------------------------------------------------

    def _measure(self, completed: CompletedBlocks) -> str:
        """Run blocks and add them to ``completed`` until a reason to stop is found, and return that reason."""
        settings = self._settings
        self._watcher.stage("blocks", settings.max_blocks * len(FORWARDS))
        try:
            for index in range(settings.max_blocks):
                completed.blocks.append(self._block(index))
                comparisons = completed.comparisons()
                self._looks += looks(comparisons, settings.primary)
                reason = stop_reason(comparisons, settings.primary, settings.max_blocks)
                if reason is not None and settings.rules.peeking:
                    return reason
        except EngineError as error:
            self._failure = str(error)
            return f"an arm failed in block {len(completed.blocks) + 1}"
        except KeyboardInterrupt:
            return f"interrupted after {len(completed.blocks)} complete blocks"
        return f"the {settings.max_blocks} requested blocks are done"

    def _block(self, index: int) -> RunBlock:
        order, at = (BACKWARDS if index % 2 else FORWARDS), time.perf_counter() - self._began
        runs = []
        for place, arm in enumerate(order):
            file = self._folder / "runs" / f"{index:03}-{place}{arm}.json"
            job = self._job("measure", arm, self._trace, file)
            self._launch(job.model_copy(update={"block": index, "warm_up": self._settings.warm_up}))
            runs.append(read_record(file))
            self._watcher.step(f"block {index + 1}, {order[: place + 1]}")
        return RunBlock(index, order, at, tuple(runs))

    def _job(self, kind: str, arm: str, workload: Path, output: Path) -> ArmJob:
        chosen = self._arms[arm]
        return ArmJob.model_validate(
            {
                "kind": kind,
                "arm": arm,
                "config": dump(chosen.config),
                "config_hash": chosen.hash,
                "workload": workload,
                "output": output,
            }
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finished(self, gate: result.GateRecord, completed: CompletedBlocks, stopped: str) -> result.ExperimentRecord:
        s, a, b = self._settings, self._arms["a"], self._arms["b"]
        found = (*(difference_of(d) for d in differences(a, b)), *self._facts)
        whole, failures = bool(completed.blocks), completed.failures()
        return result.ExperimentRecord(
            dovetail_version=version("dovetail"),
            title=s.title or " against ".join(_title(arm) for arm in (a, b)),
            started=self._started,
            seconds=time.perf_counter() - self._began,
            command=s.command,
            a=_arm_record(a),
            b=_arm_record(b),
            differences=found,
            machine=_machine(a),
            workload=summary(completed.trace, s.arrivals),
            gate=gate,
            plan=self._plan(stopped),
            comparisons=completed.comparisons() if whole else (),
            side_by_side=completed.side_by_side() if whole else (),
            blocks=completed.rows(),
            distributions=completed.distributions(),
            looks=tuple(self._looks),
            notes=tuple(self._notes(gate, failures, found)),
            failed_calls=(failures["a"], failures["b"]),
            failure=self._failure,
        )

    def _plan(self, stopped: str) -> result.DecisionPlan:
        s = self._settings
        return result.DecisionPlan(
            alpha=s.rules.alpha,
            delta=s.rules.delta,
            primary=s.primary,
            peeking=s.rules.peeking,
            max_blocks=s.max_blocks,
            warmup=f"{s.warm_up} calls before each run, and an empty prefix cache after them",
            resamples=s.resamples,
            seed=s.seed,
            stopped=stopped,
        )

    def _notes(
        self, gate: result.GateRecord, failures: Mapping[str, int], found: Sequence[result.DifferenceRecord]
    ) -> list[result.Note]:
        notes = [result.Note(level="loud", text=self._failure)] if self._failure else []
        if gate.outcome == "allowed":
            notes.append(result.Note(level="loud", text=f"Different outputs were allowed. {gate.reason}."))
        notes += [result.Note(level="warning", text=text) for text in warnings(self._arms["a"], self._arms["b"], found)]
        for arm, failed in failures.items():
            if failed:
                notes.append(
                    result.Note(level="loud", text=f"{failed} calls of arm {arm} failed; they have no latencies.")
                )
        return notes


def difference_of(d: ConfigDifference) -> result.DifferenceRecord:
    """Return the record of a difference."""
    return result.DifferenceRecord(key=d.key, a=d.a, b=d.b, intended=d.intended)


def warnings(a: ResolvedArm, b: ResolvedArm, found: Sequence[result.DifferenceRecord]) -> list[str]:
    """Return the warnings that a reader should see before attributing the result to one of the differences."""
    moved = [d.key for d in found if not d.intended]
    texts = []
    if moved:
        texts.append(f"More settings changed than were set: {', '.join(moved)}. The measurement covers all of them.")
    touched = intended_sections(differences(a, b))
    if len(touched) > 1:
        texts.append(f"The arms differ in {', '.join(touched)}: the result cannot be attributed to one of these.")
    return texts


def decoder(arm: ResolvedArm) -> Callable[[Sequence[int]], str]:
    """Return a function that turns token ids into text: with the model's tokenizer, or as numbers if it has none."""
    from dovetail.tokenizer import load_tokenizer

    config = arm.config
    if not (config.model.tokenizer or (arm.resolved.model_dir / "tokenizer.json").is_file()):
        return str
    tokenizer = load_tokenizer(config)
    return lambda ids: tokenizer.decode(list(ids))


def check_folder(folder: Path) -> None:
    """Create the folder. Raises ``ConfigError`` if it is not empty or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"the folder {folder} is not empty; choose another for this experiment (--output)")
        (folder / "runs").mkdir()
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be written: {error}; choose another (--output)") from error


def check_vocabularies(a: ResolvedArm, b: ResolvedArm) -> None:
    """Raise ``ConfigError`` if the arms' models have different vocabularies."""
    sizes = [arm.resolved.model_info.vocab_size for arm in (a, b)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the arms' models have vocabularies of {sizes[0]} and {sizes[1]} tokens, so their outputs cannot be compared; allowed: "
            "models with the same tokenizer. To measure each model alone, use `dovetail bench serve`"
        )


def _spread(ids: Sequence[str], count: int) -> list[str]:
    """Return ``count`` of ``ids``, evenly spaced."""
    if len(ids) <= count:
        return list(ids)
    return [ids[i * len(ids) // count] for i in range(count)]


def _title(arm: ResolvedArm) -> str:
    return " ".join(arm.given) or "the base config"


def _arm_record(arm: ResolvedArm) -> result.ArmRecord:
    lines = [
        f"{r.slot}: {r.chosen or 'none'}, {r.rule.value}{r.note and f'; {r.note}'}" for r in arm.resolved.resolutions
    ]
    return result.ArmRecord(
        name=_title(arm),
        given=arm.given,
        config=dump(arm.resolved.config),
        config_hash=arm.hash,
        explain="\n".join(lines),
    )


def _machine(arm: ResolvedArm) -> dict[str, str]:
    facts = machine_facts(arm.resolved.machine.device_name)
    own = {key: str(value) for key, value in facts.model_dump(exclude={"packages"}).items()}
    return {**own, **facts.packages}
