"""A finished experiment as it is written to disk, shown in the terminal and on the page. Data only: no numpy, no torch."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.errors import ConfigError

SCHEMA_VERSION = 1
INCONCLUSIVE, ARM_FAILED = 3, 4
"""Exit statuses of ``dovetail ab``."""

Verdict = Literal["faster", "slower", "equivalent", "inconclusive"]
"""What is said of B, compared with A. For a rate ``faster`` means higher, for a time lower."""

Better = Literal["lower", "higher"]


class StoredRecord(BaseModel):
    """What is stored never changes, and has no field that this version does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ArmRecord(StoredRecord):
    """One of the two configs. ``given`` are the settings it was asked for (``attention=triton``, or its file); ``config`` the
    resolved tree; ``explain`` the text of ``dovetail explain`` for it."""

    name: str
    given: tuple[str, ...] = ()
    config: dict[str, Any]
    config_hash: str
    explain: str = ""


class DifferenceRecord(StoredRecord):
    """A key whose resolved values differ, as text. ``intended`` if the user asked for it, else it moved along."""

    key: str
    a: str
    b: str
    intended: bool = True


class WorkloadSummary(StoredRecord):
    """What both arms were asked, in every run the same. Token counts are means over the requests."""

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
    """Where the outputs of one request part. ``margin`` is the difference of the two tokens' log-probabilities in A, in nats;
    ``near_tie`` if that is within what A/A shows."""

    call: str
    position: int
    a_text: str
    b_text: str
    margin: float | None = None
    near_tie: bool


class GateRecord(StoredRecord):
    """Do both arms say the same? ``skipped`` must give its reason; a failed gate means that no speed was measured; ``allowed`` is
    one that would have failed, had the user not let different outputs through.

    ``identical`` of ``compared`` requests have the same greedy tokens; of the others ``near_ties`` part where the two best
    tokens are as close as noise, ``real`` elsewhere. ``aa_identical`` is the same for A against itself. ``kl_*`` (nats per token)
    and ``top1`` (share) are teacher-forced on A's outputs. ``grammar_valid_*`` are (valid, constrained) counts.
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
    """One metric: B divided by A. ``experiment.stats.compare`` makes it.

    ``a`` and ``b`` are geometric means over the blocks, in ``unit``. ``low`` and ``high`` bound the ratio with the experiment's
    confidence; None where so few blocks give no bound. ``p`` is for "no difference", ``p_adjusted`` corrected over the metrics
    (Holm); both stay valid under peeking where the experiment peeked. ``blocks_needed`` is for inconclusive metrics: about how
    many blocks in all would settle it; None if no number of blocks would (the requests differ too much: more requests would).
    ``noise_floor`` is the smallest relative difference that so many blocks tell from noise, by runs of the same arm.
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
    """A number of each arm that is reported, not tested: memory, start-up time, acceptance length, mask time, prefix hit rate."""

    label: str
    unit: str
    a: float | None
    b: float | None
    better: Better | None = None


class BlockRow(StoredRecord):
    """One block: the order of its runs (``ABBA``), when it began (seconds into the experiment), and each metric's value per
    arm, by the metric's name."""

    index: int
    order: str
    at: float
    a: dict[str, float]
    b: dict[str, float]


class DistributionRecord(StoredRecord):
    """Values of single requests or tokens per arm, in ``unit``, ascending; thinned to evenly spaced quantiles."""

    metric: str
    label: str
    unit: str
    a: tuple[float, ...]
    b: tuple[float, ...]


class Look(StoredRecord):
    """What was known of a metric after so many blocks."""

    metric: str
    blocks: int
    ratio: float
    low: float | None
    high: float | None


class DecisionPlan(StoredRecord):
    """How the experiment decides. ``peeking``: it looked after each block, and its intervals allow for that; ``stopped`` is why
    it ended. ``primary`` are the metrics that its verdict rests on."""

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
    """Something that a reader must know; ``loud`` is written in bold."""

    level: Literal["info", "warning", "loud"] = "info"
    text: str


class ExperimentRecord(StoredRecord):
    """A whole experiment. ``comparisons`` and ``blocks`` are empty if the gate failed. ``failed_calls`` are those of A and B in
    whole blocks; ``failure`` says why a run of an arm failed, which ended it."""

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
        """The comparisons that the verdict rests on."""
        return tuple(c for c in self.comparisons if c.metric in self.plan.primary)

    @property
    def verdict(self) -> Verdict:
        """Slower if any primary metric is; else faster if any is; equivalent if all are; else inconclusive."""
        return overall(self.primary)

    @property
    def fails_more(self) -> bool:
        """Calls failed in arm B, and fewer in arm A: latencies of the others are no comparison."""
        return self.failed_calls[1] > self.failed_calls[0]

    @property
    def exit_code(self) -> int:
        """For CI: 0 no regression, 1 a regression (slower, or fails calls that A answers), 2 the outputs differ, 3 inconclusive,
        4 an arm failed."""
        if self.gate.outcome == "failed":
            return 2
        if self.failure:
            return ARM_FAILED
        if self.fails_more:
            return 1
        return {"faster": 0, "equivalent": 0, "slower": 1, "inconclusive": INCONCLUSIVE}[self.verdict]

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def overall(comparisons: tuple[Comparison, ...]) -> Verdict:
    """One verdict of several metrics; none at all is inconclusive."""
    verdicts = {comparison.verdict for comparison in comparisons}
    if "slower" in verdicts:
        return "slower"
    if "faster" in verdicts:
        return "faster"
    return "equivalent" if verdicts == {"equivalent"} else "inconclusive"


def read_experiment(file: Path) -> ExperimentRecord:
    """What ``write`` wrote. Raises ``ConfigError`` for a file that is none, or of another schema version."""
    try:
        return ExperimentRecord.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{file} is no experiment of schema version {SCHEMA_VERSION}: {error}; `dovetail ab` writes one with --json"
        ) from error
