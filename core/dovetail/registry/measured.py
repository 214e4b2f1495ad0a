"""Store the results that ``dovetail ab --write-tuning`` has measured on this machine, in a file of the user. ``auto``
prefers the winners.

A record states which of two components was faster in one slot. It applies only while everything that it depends on is
unchanged: the device, the model and its dtypes, and the exact versions of both components. Every other record is passed
over, with the reason.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dovetail.atomic_files import locked, write_atomically
from dovetail.config import Config
from dovetail.errors import ConfigError
from dovetail.folders import data_folder
from dovetail.interfaces.model import ModelInfo
from dovetail.registry.installed import RegisteredComponent, Registry
from dovetail.registry.machine import Machine

SCHEMA_VERSION = 1
FILE_NAME = "tuning.json"
EXPERT_DIVISION = "parallel.experts"
MEASURED_SETTINGS: Mapping[str, tuple[str, ...]] = {EXPERT_DIVISION: ("tp", "ep")}
"""The settings that have records as slots have them, and the values that these records name in place of components."""


class MeasuredPart(BaseModel):
    """Identify a component that was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


class MeasuredRecord(BaseModel):
    """Record that ``winner`` was ``ratio`` times as fast as ``loser`` by ``metric``, between ``low`` and ``high``, on
    ``workload`` (its name, and its ``shape`` in words), at ``measured`` (ISO). ``device`` and ``model`` are results of
    ``device_key`` and ``model_key``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: str
    winner: MeasuredPart
    loser: MeasuredPart
    device: str
    model: str
    workload: str
    shape: str
    metric: str
    ratio: float
    low: float | None
    high: float | None
    measured: str

    def __str__(self) -> str:
        return f"{self.slot} {self.winner.name} over {self.loser.name} of {self.date}"

    @property
    def date(self) -> str:
        """Return the day of the measurement."""
        return self.measured[:10]

    @property
    def why(self) -> str:
        """Return the reason that ``explain`` shows."""
        bounds = "" if self.low is None or self.high is None else f" ({self.low:.2f} to {self.high:.2f})"
        return (
            f"{self.ratio:.2f}x{bounds} as fast as {self.loser.name} by {self.metric} on {self.workload}, "
            f"measured {self.date}"
        )


class TuningFile(BaseModel):
    """Hold all records of a user, newest last."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    records: tuple[MeasuredRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Unused:
    """Hold a record that was passed over, and why."""

    record: MeasuredRecord
    reason: str

    def __str__(self) -> str:
        return f"{self.record}: {self.reason}"


def tuning_file(config: Config) -> Path:
    """Return where records are kept: ``tuning.path``, or ``dovetail/tuning.json`` in the user's data folder (XDG)."""
    if config.tuning.path is not None:
        return Path(config.tuning.path).expanduser()
    return data_folder() / FILE_NAME


def read_records(file: Path) -> tuple[MeasuredRecord, ...]:
    """Return the records of a file; none if it does not exist. Raises ``ConfigError`` for a file that holds anything
    else."""
    if not file.exists():
        return ()
    try:
        return TuningFile.model_validate_json(file.read_text(encoding="utf-8")).records
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigError(
            f"{file} holds no tuning records of schema version {SCHEMA_VERSION}: {_first(error)}. Delete it (`dovetail ab "
            "--write-tuning` writes a new one), or set tuning.path to another, or tuning.use: false"
        ) from error


def _first(error: OSError | UnicodeDecodeError | ValidationError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors(include_url=False)[0]
    return ": ".join(filter(None, [".".join(map(str, problem["loc"])), problem["msg"]]))


def add_records(file: Path, added: Iterable[MeasuredRecord]) -> None:
    """Write records. They replace older records of the same slot, pair, device, model and workload. Several processes may
    call this at the same time."""
    new = list(added)
    replaced = {_comparison(record) for record in new}
    with locked(file):
        kept = [record for record in read_records(file) if _comparison(record) not in replaced]
        write_atomically(file, TuningFile(records=(*kept, *new)).model_dump_json(indent=2) + "\n")


def _comparison(record: MeasuredRecord) -> tuple[object, ...]:
    pair = frozenset({record.winner.name, record.loser.name})
    return record.slot, pair, record.device, record.model, record.workload, record.shape


def sort_records(
    records: Iterable[MeasuredRecord], config: Config, registry: Registry, device: str, model: str
) -> tuple[list[MeasuredRecord], list[Unused]]:
    """Return the records that apply, those of ``tuning.workload`` first and then the newest, and the records that do
    not apply."""
    used: list[MeasuredRecord] = []
    unused: list[Unused] = []
    for record in records:
        reason = _objection(record, registry, device, model)
        if reason is None:
            used.append(record)
        else:
            unused.append(Unused(record, reason))
    used.sort(key=lambda record: record.measured, reverse=True)
    used.sort(key=lambda record: record.workload != config.tuning.workload)
    return used, unused


def best_first(records: Iterable[MeasuredRecord], slot: str) -> list[str]:
    """Return the winners of a slot, given ``records`` in order. Those that have lost no comparison come first."""
    mine = [record for record in records if record.slot == slot]
    lost = {record.loser.name for record in mine}
    return sorted(dict.fromkeys(record.winner.name for record in mine), key=lambda name: name in lost)


def _objection(record: MeasuredRecord, registry: Registry, device: str, model: str) -> str | None:
    if record.device != device:
        return f"foreign: measured on {record.device}, this is {device}"
    if record.model != model:
        return f"foreign: measured with {record.model}, this is {model}"
    found = _installed_parts(record.slot, registry)
    for part in (record.winner, record.loser):
        if part.name not in found:
            return f"stale: {part} is not installed"
        if found[part.name] != part:
            return f"stale: measured with {part}, installed is {found[part.name]}; measure again"
    return None


def _installed_parts(slot: str, registry: Registry) -> dict[str, MeasuredPart]:
    """Return what may be chosen in a slot, by name."""
    if slot in MEASURED_SETTINGS:
        return {value: setting_part(value) for value in MEASURED_SETTINGS[slot]}
    kind = slot.partition(".")[0]
    components = registry.components(kind) if kind in registry.kinds else ()
    return {component.spec.name: measured_part(component) for component in components}


def measured_part(component: RegisteredComponent) -> MeasuredPart:
    """Return a component in the form in which records name it."""
    return MeasuredPart(name=component.spec.name, distribution=component.distribution, version=component.version)


def setting_part(value: str) -> MeasuredPart:
    """Return a value of a setting in the form in which records name it: what it selects is code of Dovetail itself."""
    return MeasuredPart(name=value, distribution="dovetail", version=importlib.metadata.version("dovetail"))


def device_key(machine: Machine) -> str:
    """Return the name of a device in records: its name in CUDA, or the model of the CPU and the number of CPUs that may
    be used."""
    if machine.device_type != "cpu":
        return machine.device_name
    return "cpu" if machine.assumed else _processor()


def model_key(info: ModelInfo, dtype: str, kv_dtype: str, ranks: int = 1) -> str:
    """Return a model's architecture, shapes and dtypes, and how many ranks divide it: models of the same key cost the
    same."""
    heads = f"{info.num_heads}/{info.num_kv_heads} heads of {info.head_dim}"
    sizes = f"{info.num_layers} layers, hidden {info.hidden_size}, {heads}, vocabulary {info.vocab_size}"
    divided = f", {ranks} ranks" if ranks > 1 else ""
    return f"{info.architecture}, {sizes}, {dtype}, KV {kv_dtype}{divided}"


@functools.cache
def _processor() -> str:
    return f"{_cpu_name()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPUs"


def _cpu_name() -> str:
    try:
        lines: Sequence[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    if name := next(named, ""):
        return name
    import platform

    return platform.processor() or platform.machine()
