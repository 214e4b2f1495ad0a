"""Define a finished experiment as it is written to disk and shown in the terminal and on the page. This is data only: it needs
neither numpy nor torch."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.atomic_files import write_atomically
from dovetail.errors import ConfigError

SCHEMA_VERSION = 1
INCONCLUSIVE, ARM_FAILED = 3, 4
"""Exit statuses of ``dovetail ab``: the result is inconclusive, or an arm failed."""

Verdict = Literal["faster", "slower", "equivalent", "inconclusive"]
"""The verdict on B compared with A. For a rate ``faster`` means higher, for a time lower."""

Better = Literal["lower", "higher"]


class StoredRecord(BaseModel):
    """Serve as the base class of all stored records. Records are immutable, and a field that this version does not define is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ArmRecord(StoredRecord):
    """Describe one arm. ``given`` are its settings as the user wrote them (``attention=triton``, or a file), ``config`` is the resolved
    tree, and ``explain`` is the text of ``dovetail explain`` for it."""

    name: str
    given: tuple[str, ...] = ()
    config: dict[str, Any]
    config_hash: str
    explain: str = ""


class DifferenceRecord(StoredRecord):
    """Describe a key whose resolved values differ, as text. ``intended`` is True if the user set the key, and False if it changed as a
    consequence."""

    key: str
    a: str
    b: str
    intended: bool = True


class WorkloadSummary(StoredRecord):
    """Describe the workload, which is the same in every run of both arms. Token counts are means over the requests."""

    name: str
    description: str = ""
    requests: int
    clusters: int
    prompt_tokens: float
    output_tokens: float
    arrivals: str = ""
    seed: int | None = None
    content_hash: str


class Divergence(StoredRecord):
    """Describe the first position at which the outputs of one request differ. ``margin`` is the difference of the two tokens'
    log-probabilities, in nats; it is a ``near_tie`` if the margin is within the noise of A compared with itself."""

    call: str
    position: int
    a_text: str
    b_text: str
    margin: float | None = None
    near_tie: bool


class GateRecord(StoredRecord):
    """Hold the decision whether both arms generate the same outputs. ``skipped`` must give its reason. If the gate ``failed``, no speed
    was measured. ``allowed`` means that the gate would have failed, but the user allowed different outputs.

    ``identical`` of ``compared`` requests have the same greedy tokens. Of the others, ``near_ties`` diverge where the difference of the
    two best tokens is within noise, and ``real`` diverge elsewhere. ``aa_identical`` is the number of identical outputs of A compared
    with itself. ``kl_*`` (nats per token) and ``top1`` (share) are teacher-forced on A's outputs. ``grammar_valid_*`` are (valid,
    constrained) counts.
    """

    outcome: Literal["passed", "failed", "allowed", "skipped"]
    reason: str
    compared: int = 0
    identical: int = 0
    near_ties: int = 0
    real: int = 0
    aa_identical: int | None = None
    kl_mean: float | None = None
    kl_max: float | None = None
    top1: float | None = None
    grammar_valid_a: tuple[int, int] | None = None
    grammar_valid_b: tuple[int, int] | None = None
    divergences: tuple[Divergence, ...] = ()


class Comparison(StoredRecord):
    """Hold the comparison of one metric: B divided by A. ``experiment.stats.compare`` computes it.

    ``a`` and ``b`` are geometric means over the blocks, in ``unit``. ``low`` and ``high`` bound the ratio with the experiment's
    confidence; they are None if there are too few blocks for a bound. ``p`` is the p-value of "no difference", ``p_adjusted`` is
    corrected over the metrics (Holm); both stay valid under peeking if the experiment peeked. ``blocks_needed`` is set for inconclusive
    metrics: about how many blocks in total would settle the metric; None if no number of blocks would (the requests differ too
    much; more requests would). ``noise_floor`` is the smallest relative difference that this number of blocks can distinguish from
    noise, estimated from runs of the same arm.
    """

    metric: str
    label: str
    unit: str
    better: Better
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None
    p: float
    p_adjusted: float
    verdict: Verdict
    blocks: int
    blocks_needed: int | None = None
    noise_floor: float | None = None
    note: str = ""


class SideBySide(StoredRecord):
    """Hold a number of each arm that is reported and not tested: memory, start-up time, acceptance length, mask time, prefix hit rate."""

    label: str
    unit: str
    a: float | None
    b: float | None
    better: Better | None = None


class BlockRow(StoredRecord):
    """Hold one block: the order of its runs (``ABBA``), when it started (seconds into the experiment), and the value of each metric for
    each arm, by the metric's name."""

    index: int
    order: str
    at: float
    a: dict[str, float]
    b: dict[str, float]


class DistributionRecord(StoredRecord):
    """Hold the values of single requests or tokens of each arm, in ``unit`` and ascending, reduced to evenly spaced quantiles."""

    metric: str
    label: str
    unit: str
    a: tuple[float, ...]
    b: tuple[float, ...]


class Look(StoredRecord):
    """Hold the estimate of a metric after a number of ``blocks``."""

    metric: str
    blocks: int
    ratio: float
    low: float | None
    high: float | None


class DecisionPlan(StoredRecord):
    """Describe how the experiment decides. With ``peeking`` it looked after each block, and its intervals allow for that. ``stopped`` is
    the reason why it ended; ``primary`` are the metrics that determine its verdict."""

    alpha: float = 0.05
    delta: float = 0.02
    primary: tuple[str, ...]
    peeking: bool = True
    max_blocks: int
    warmup: str = ""
    resamples: int = 2000
    seed: int = 0
    stopped: str = ""


class Note(StoredRecord):
    """Hold a remark for the reader. The level ``loud`` is shown in bold."""

    level: Literal["info", "warning", "loud"] = "info"
    text: str


class ExperimentRecord(StoredRecord):
    """Hold a complete experiment. ``comparisons`` and ``blocks`` are empty if the gate failed. ``failed_calls`` counts the failed calls
    of A and B in complete blocks; ``failure`` is why a run of an arm failed, which ended the experiment."""

    schema_version: Literal[1] = SCHEMA_VERSION
    dovetail_version: str
    title: str
    started: datetime
    seconds: float
    command: str
    a: ArmRecord
    b: ArmRecord
    differences: tuple[DifferenceRecord, ...] = ()
    machine: dict[str, str] = Field(default_factory=dict)
    workload: WorkloadSummary
    gate: GateRecord
    plan: DecisionPlan
    comparisons: tuple[Comparison, ...] = ()
    side_by_side: tuple[SideBySide, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    distributions: tuple[DistributionRecord, ...] = ()
    looks: tuple[Look, ...] = ()
    notes: tuple[Note, ...] = ()
    failed_calls: tuple[int, int] = (0, 0)
    failure: str = ""

    @property
    def primary(self) -> tuple[Comparison, ...]:
        """Return the comparisons that determine the verdict."""
        return tuple(c for c in self.comparisons if c.metric in self.plan.primary)

    @property
    def verdict(self) -> Verdict:
        """Return slower if any primary metric is slower; else faster if any is faster; equivalent if all are; else inconclusive."""
        return overall(self.primary)

    @property
    def fails_more(self) -> bool:
        """Return True if more calls failed in arm B than in arm A. The latencies of the other calls are then not comparable."""
        return self.failed_calls[1] > self.failed_calls[0]

    @property
    def exit_code(self) -> int:
        """Return the exit status for CI: 0 no regression, 1 a regression (B is slower, or fails calls that A answers), 2 the
        outputs differ, 3 inconclusive, 4 an arm failed."""
        if self.gate.outcome == "failed":
            return 2
        if self.failure:
            return ARM_FAILED
        if self.fails_more:
            return 1
        return {"faster": 0, "equivalent": 0, "slower": 1, "inconclusive": INCONCLUSIVE}[self.verdict]

    def write(self, file: Path) -> None:
        """Write the experiment as JSON."""
        write_atomically(file, self.model_dump_json(indent=2) + "\n")


def overall(comparisons: tuple[Comparison, ...]) -> Verdict:
    """Return one verdict for several metrics. Without any metric it is inconclusive."""
    verdicts = {comparison.verdict for comparison in comparisons}
    if "slower" in verdicts:
        return "slower"
    if "faster" in verdicts:
        return "faster"
    return "equivalent" if verdicts == {"equivalent"} else "inconclusive"


def read_experiment(file: Path) -> ExperimentRecord:
    """Read an experiment that ``write`` wrote. Raises ``ConfigError`` for another file and for another schema version."""
    try:
        return ExperimentRecord.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{file} is not an experiment of schema version {SCHEMA_VERSION}: {error}; `dovetail ab` writes one with --json"
        ) from error
