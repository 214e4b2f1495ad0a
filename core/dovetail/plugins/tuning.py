"""Tuning records: which parts were measured to be fastest on a device. ``auto`` prefers them, and says so.

A record is a JSON file in ``assets/tuning``: ``device`` (the name CUDA gives it), ``compute_capability``, ``measured`` (date
and command), and for each slot the names, best first, with what was seen.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.plugins.machine import Machine

FOLDER = Path(__file__).parent.parent / "assets" / "tuning"


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """``slots`` maps a slot (``attention.decode``) to names, best first; ``seen`` to what was measured, in words."""

    device: str
    compute_capability: tuple[int, int]
    measured: str
    slots: Mapping[str, Sequence[str]]
    seen: Mapping[str, str] = field(default_factory=dict)

    def why(self, slot: str) -> str:
        """The reason that ``explain`` shows."""
        return f"measured on {self.device}, {self.measured}: {self.seen.get(slot, 'fastest')}"


@functools.cache
def records() -> tuple[TuningRecord, ...]:
    """The records that ship with dovetail."""
    return tuple(_read(file) for file in sorted(FOLDER.glob("*.json")))


def record_for(machine: Machine) -> TuningRecord | None:
    """The record of this very device; else one of a device of the same compute capability; else None."""
    same = [record for record in records() if record.compute_capability == machine.compute_capability]
    return next((record for record in same if record.device == machine.device_name), same[0] if same else None)


def _read(file: Path) -> TuningRecord:
    data = json.loads(file.read_text(encoding="utf-8"))
    major, minor = data["compute_capability"]
    slots = {slot: entry["best_first"] for slot, entry in data["slots"].items()}
    seen = {slot: entry["seen"] for slot, entry in data["slots"].items()}
    return TuningRecord(data["device"], (major, minor), data["measured"], slots, seen)
