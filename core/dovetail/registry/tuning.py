"""Find the components that were measured to be fastest. The user's own records (``registry.measured``) come first, then
the records that ship with Dovetail for some devices. ``auto`` prefers them, and ``explain`` shows it.

A shipped record is a JSON file in ``assets/tuning``. It holds ``device`` (its name in CUDA), ``compute_capability``,
``measured`` (date and command), and for each slot the names, best first, with a description of the results.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.config import Config
from dovetail.interfaces.model import ModelInfo
from dovetail.registry.installed import Registry
from dovetail.registry.machine import Machine
from dovetail.registry.measured import (
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


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """Hold a shipped record. ``slots`` maps a slot (``attention.decode``) to names, best first; ``seen`` maps it to a
    description of the results."""

    device: str
    compute_capability: tuple[int, int]
    measured: str
    slots: Mapping[str, Sequence[str]]
    seen: Mapping[str, str] = field(default_factory=dict)

    def why(self, slot: str) -> str:
        """Return the reason that ``explain`` shows."""
        return f"measured on {self.device}, {self.measured}: {self.seen.get(slot, 'fastest')}"


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
    slots = dict(shipped.slots) if shipped else {}
    if not config.tuning.use:
        return Tuned(slots, shipped)
    device, model = device_key(machine), model_key(info, dtype, kv_dtype)
    own, unused = sort_records(read_records(tuning_file(config)), config, registry, device, model)
    for slot in {record.slot for record in own}:
        slots[slot] = list(dict.fromkeys([*best_first(own, slot), *slots.get(slot, ())]))
    return Tuned(slots, shipped, tuple(own), tuple(unused))


def _read(file: Path) -> TuningRecord:
    data = json.loads(file.read_text(encoding="utf-8"))
    major, minor = data["compute_capability"]
    slots = {slot: entry["best_first"] for slot, entry in data["slots"].items()}
    seen = {slot: entry["seen"] for slot, entry in data["slots"].items()}
    return TuningRecord(data["device"], (major, minor), data["measured"], slots, seen)
