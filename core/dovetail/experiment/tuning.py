"""Write tuning records for ``auto``: which component was faster for each slot in which the arms differ, and which value for
each setting of ``MEASURED_SETTINGS``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from dovetail.config.tree import component_keys
from dovetail.experiment.arms import ResolvedArm, differences
from dovetail.experiment.result import Comparison, ExperimentRecord
from dovetail.registry.measured import (
    MEASURED_SETTINGS,
    MeasuredPart,
    MeasuredRecord,
    device_key,
    measured_part,
    model_key,
    setting_part,
)
from dovetail.registry.resolution import Chosen

METRIC_OF: Mapping[str, str] = {"attention.prefill": "ttft_p50", "attention.decode": "tpot_mean"}
"""The metric that decides a slot, if one metric alone measures it. Other slots are decided by all primary metrics, which must agree."""
SLOTS = ("attention.prefill", "attention.decode", "cache", "policy", "grammar", "speculative")


def tuning_records(a: ResolvedArm, b: ResolvedArm, found: ExperimentRecord) -> tuple[list[MeasuredRecord], list[str]]:
    """Return the records, and the reason for each slot that gets none."""
    objection = _objection(a, b, found)
    if objection:
        return [], [objection]
    made = {slot: _of_components(slot, *pair, a, found) for slot, pair in _differing(a, b).items()}
    for key, (mine, theirs) in _settings(a, b).items():
        made[key] = _record(key, setting_part(mine), setting_part(theirs), a, found)
    records = [one for one in made.values() if isinstance(one, MeasuredRecord)]
    reasons = [f"{slot}: {one}" for slot, one in made.items() if isinstance(one, str)]
    return records, reasons


def _objection(a: ResolvedArm, b: ResolvedArm, found: ExperimentRecord) -> str:
    """Return why the experiment as a whole gives no records; empty if it may give some."""
    if found.gate.outcome != "passed":
        return "no record is written: the outputs differ"
    if a.resolved.config.batch_invariant or b.resolved.config.batch_invariant:
        return (
            "no record is written: with batch_invariant components use other kernels, and `auto` reads no records then"
        )
    if not _differing(a, b) and not _settings(a, b):
        return "no record is written: `auto` chooses components, and the arms have the same ones"
    keys = component_keys(a.resolved.config)
    intended = [d.key for d in differences(a, b) if d.intended]
    others = [key for key in intended if key.partition(".")[0] not in keys and key not in MEASURED_SETTINGS]
    if others:
        return f"no record is written: the arms also differ in {', '.join(others)}, which `auto` does not choose"
    return ""


def _differing(a: ResolvedArm, b: ResolvedArm) -> dict[str, tuple[Chosen | None, Chosen | None]]:
    pairs = {slot: (a.resolved.chosen[slot], b.resolved.chosen[slot]) for slot in SLOTS}
    return {slot: pair for slot, pair in pairs.items() if _name(pair[0]) != _name(pair[1])}


def _settings(a: ResolvedArm, b: ResolvedArm) -> dict[str, tuple[str, str]]:
    pairs = {key: (_value(a, key), _value(b, key)) for key in MEASURED_SETTINGS}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _value(arm: ResolvedArm, key: str) -> str:
    return str(functools.reduce(getattr, key.split("."), arm.resolved.config))


def _name(chosen: Chosen | None) -> str | None:
    return chosen.name if chosen else None


def _of_components(
    slot: str, a: Chosen | None, b: Chosen | None, arm: ResolvedArm, found: ExperimentRecord
) -> MeasuredRecord | str:
    """Return the record of a slot, or why there is none."""
    if a is None or b is None:
        return "one arm has no component there, which `auto` cannot choose"
    made = _record(slot, measured_part(a.component), measured_part(b.component), arm, found)
    if isinstance(made, MeasuredRecord):
        winner = a if made.winner.name == a.name else b
        if winner.config != type(winner.config)(kind=winner.name):
            return (
                f"{winner.name} was faster with its own settings, but `auto` uses the defaults; name it in the config"
            )
    return made


def _record(
    slot: str, a: MeasuredPart, b: MeasuredPart, arm: ResolvedArm, found: ExperimentRecord
) -> MeasuredRecord | str:
    """Return the record that one of two parts is faster, or why there is none."""
    decided = _deciding(slot, found.primary)
    if isinstance(decided, str):
        return decided
    winner, loser = (b, a) if decided.verdict == "faster" else (a, b)
    ratio, low, high = speed_up(decided)
    resolved, workload = arm.resolved, found.workload
    section = resolved.config
    assert section.model.dtype != "auto", "a resolved config names the dtype"
    return MeasuredRecord(
        slot=slot,
        winner=winner,
        loser=loser,
        device=device_key(resolved.machine),
        model=model_key(resolved.model_info, section.model.dtype, section.memory.kv_dtype, section.parallel.tp),
        workload=workload.name,
        shape=(
            f"{workload.requests} calls, on average {workload.prompt_tokens:.0f} prompt and {workload.output_tokens:.0f} output tokens, "
            f"arrivals {workload.arrivals}"
        ),
        metric=decided.label,
        ratio=ratio,
        low=low,
        high=high,
        measured=found.started.isoformat(timespec="seconds"),
    )


def _deciding(slot: str, primary: Sequence[Comparison]) -> Comparison | str:
    """Return the comparison that determines the winner, or why there is no winner."""
    metric = METRIC_OF.get(slot)
    deciding = [c for c in primary if c.metric == metric] if metric else list(primary)
    if not deciding:
        return f"{metric} is not a primary metric of the experiment"
    settled = [c for c in deciding if c.verdict in ("faster", "slower")]
    if not settled:
        return f"no winner: {', '.join(f'{c.label} is {c.verdict}' for c in deciding)}"
    if len({c.verdict for c in settled}) > 1:
        return f"no winner: B is {' and '.join(f'{c.verdict} in {c.label}' for c in settled)}"
    return max(settled, key=lambda c: speed_up(c)[0])


def speed_up(c: Comparison) -> tuple[float, float | None, float | None]:
    """Return how many times as fast the winner is, with the bounds of this factor. The factor is above 1 whichever arm wins, and whether
    lower or higher values of the metric are better."""
    assert c.ratio is not None, "a settled comparison has a ratio"
    if c.ratio >= 1:
        return c.ratio, c.low, c.high
    return 1 / c.ratio, 1 / c.high if c.high else None, 1 / c.low if c.low else None
