"""Find the components that were measured to be fastest. The user's own records (``registry.measured``) come first, then
the records that ship with Dovetail for some devices. ``auto`` prefers them, and ``explain`` shows it.

A shipped record is a JSON file in ``assets/tuning``. It holds ``device`` (its name in CUDA), ``compute_capability``,
``measured`` (date and command), and for each slot the names, best first, with a description of the results.
``expert_divisions`` says for numbers of ranks and sizes of experts which division of experts was faster, ``tp`` or ``ep``
(``parallel.experts``).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dovetail.config import Config
from dovetail.interfaces.model import ModelInfo
from dovetail.registry.installed import Registry
from dovetail.registry.machine import Machine
from dovetail.registry.measured import (
    EXPERT_DIVISION,
    MeasuredRecord,
    Unused,
    best_first,
    device_key,
    model_key,
    read_records,
    sort_records,
    tuning_file,
)

FOLDER = Path(__file__).parent.parent / "assets" / "tuning"


MOST_APART = 1.0
"""The largest ``MeasuredDivision.distance`` at which a measurement is used for a model: 1 stands for twice as many experts, or for
experts of twice the size."""


@dataclass(frozen=True, slots=True)
class MeasuredDivision:
    """Hold which division of layers of experts was faster (``best_first``) for ``ranks`` ranks and ``experts`` experts of ``size``
    intermediate values, with a description of the results (``seen``) and when and how they were ``measured``."""

    ranks: int
    experts: int
    size: int
    best_first: tuple[str, ...]
    seen: str
    measured: str

    @property
    def result(self) -> str:
        """Return when, how and for which experts the division was measured, and the results."""
        return f"{self.measured}, {self.experts} experts of {self.size}, {self.ranks} ranks: {self.seen}"

    def distance(self, experts: int, size: int) -> float:
        """Return how many doublings or halvings of the number and the size of experts are between the measured ones and these."""
        return abs(math.log2(self.experts / experts)) + abs(math.log2(self.size / size))


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """Hold a shipped record. ``slots`` maps a slot (``attention.decode``) or a setting of ``MEASURED_SETTINGS`` to names, best
    first; ``results`` says for each when and how it was measured, and with which results. ``divisions`` are the measured
    divisions of experts, of which ``for_experts`` takes the one that counts for a model."""

    device: str
    compute_capability: tuple[int, int]
    slots: Mapping[str, Sequence[str]]
    results: Mapping[str, str]
    divisions: tuple[MeasuredDivision, ...] = ()

    def why(self, slot: str) -> str:
        """Return the reason that ``explain`` shows."""
        return f"measured on {self.device}, {self.results[slot]}"

    def for_experts(self, info: ModelInfo, ranks: int) -> TuningRecord:
        """Return the record with a slot for the division of the experts of the model ``info`` among ``ranks`` ranks, if one
        was measured for this number of ranks and similar experts: the most similar ones."""
        if info.expert_sizes is None:
            return self
        (_, experts), (_, size) = info.expert_sizes
        measured = [one for one in self.divisions if one.ranks == ranks and one.distance(experts, size) <= MOST_APART]
        if not measured:
            return self
        nearest = min(measured, key=lambda one: one.distance(experts, size))
        return replace(
            self,
            slots={**self.slots, EXPERT_DIVISION: nearest.best_first},
            results={**self.results, EXPERT_DIVISION: nearest.result},
        )


@dataclass(frozen=True, slots=True)
class Tuned:
    """Hold all tuning records for one resolution. ``slots`` maps a slot to names, best first; ``own`` are the user's
    records that apply, ``unused`` the user's records that do not."""

    slots: Mapping[str, Sequence[str]] = field(default_factory=dict)
    shipped: TuningRecord | None = None
    own: tuple[MeasuredRecord, ...] = ()
    unused: tuple[Unused, ...] = ()

    def why(self, slot: str, name: str) -> str:
        """Return why ``name`` is preferred for a slot; empty if only the preference is known."""
        for record in self.own:
            if record.slot == slot and record.winner.name == name:
                return record.why
        shipped = self.shipped
        return shipped.why(slot) if shipped is not None and name in shipped.slots.get(slot, ()) else ""

    def passed_over(self, slot: str) -> tuple[str, ...]:
        """Return the user's records of a slot that do not count, each with the reason."""
        return tuple(map(str, (unused for unused in self.unused if unused.record.slot == slot)))


@functools.cache
def records() -> tuple[TuningRecord, ...]:
    """Return the records that ship with dovetail."""
    return tuple(_read(file) for file in sorted(FOLDER.glob("*.json")))


def record_for(machine: Machine) -> TuningRecord | None:
    """Return the record of exactly this device, else one of a device of the same compute capability, else None."""
    same = [record for record in records() if record.compute_capability == machine.compute_capability]
    return next((record for record in same if record.device == machine.device_name), same[0] if same else None)


def tuned_for(
    config: Config, registry: Registry, machine: Machine, info: ModelInfo, dtype: str, kv_dtype: str
) -> Tuned:
    """Return the tuning records for this device and model. Raises ``ConfigError`` for a file of records that cannot be
    read."""
    shipped = record_for(machine)
    if shipped is not None:
        shipped = shipped.for_experts(info, config.parallel.tp)
    slots = dict(shipped.slots) if shipped else {}
    if not config.tuning.use:
        return Tuned(slots, shipped)
    device, model = device_key(machine), model_key(info, dtype, kv_dtype, config.parallel.tp)
    own, unused = sort_records(read_records(tuning_file(config)), config, registry, device, model)
    for slot in {record.slot for record in own}:
        slots[slot] = list(dict.fromkeys([*best_first(own, slot), *slots.get(slot, ())]))
    return Tuned(slots, shipped, tuple(own), tuple(unused))


def _read(file: Path) -> TuningRecord:
    data = json.loads(file.read_text(encoding="utf-8"))
    major, minor = data["compute_capability"]
    slots = {slot: entry["best_first"] for slot, entry in data["slots"].items()}
    results = {slot: f"{data['measured']}: {entry['seen']}" for slot, entry in data["slots"].items()}
    divisions = tuple(
        MeasuredDivision(**{**entry, "best_first": tuple(entry["best_first"])})
        for entry in data.get("expert_divisions", ())
    )
    return TuningRecord(data["device"], (major, minor), slots, results, divisions)
