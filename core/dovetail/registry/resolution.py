"""The record of a choice: what was considered for each part, how far it came, and why."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.config import Config, PluginConfig, config_hash, dump
from dovetail.errors import PluginLoadError
from dovetail.interfaces.api import Api
from dovetail.interfaces.attention import AttentionBackend
from dovetail.interfaces.cache import PrefixCache
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import GrammarBackend
from dovetail.interfaces.model import ModelArchitecture, ModelInfo
from dovetail.interfaces.parsers import ReasoningParser, ToolParser
from dovetail.interfaces.policy import SchedulePolicy
from dovetail.interfaces.speculative import Drafter
from dovetail.registry.installed import RegisteredComponent
from dovetail.registry.machine import Machine
from dovetail.registry.specs import ComponentKind, ComponentSpec
from dovetail.registry.targets import load_attribute

if TYPE_CHECKING:
    import pluggy

INTERFACES: dict[ComponentKind, type] = {
    ComponentKind.ATTENTION: AttentionBackend,
    ComponentKind.CACHE: PrefixCache,
    ComponentKind.GRAMMAR: GrammarBackend,
    ComponentKind.DRAFTER: Drafter,
    ComponentKind.POLICY: SchedulePolicy,
    ComponentKind.MODEL: ModelArchitecture,
    ComponentKind.TOOL_PARSER: ToolParser,
    ComponentKind.REASONING_PARSER: ReasoningParser,
    ComponentKind.API: Api,
}


class Stage(enum.StrEnum):
    """How far a candidate came, in this order."""

    INSTALLED = "installed"
    POLICY = "policy"
    API = "api"
    REQUIRES = "requires"
    CONSTRAINTS = "constraints"
    FEATURES = "features"
    PROBE = "probe"


class Verdict(enum.StrEnum):
    """What became of a candidate. ``passed over`` would do, but another is preferred or was asked for; ``available`` is used
    beside the chosen one where a request names it or needs it."""

    CHOSEN = "chosen"
    AVAILABLE = "available"
    PASSED_OVER = "passed over"
    REJECTED = "rejected"


class Rule(enum.StrEnum):
    """Why the chosen one was preferred."""

    EXPLICIT = "explicit"
    TUNING = "tuning record"
    ADJUSTED = "adjusted by a plugin"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a candidate was rejected: a stable ``code``, what was expected, what was found, and what would mend it."""

    code: str
    expected: str
    got: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.expected}; {self.got}" + (f". To mend it: {self.fix}" if self.fix else "")


@dataclass(eq=False, slots=True)
class Candidate:
    """A component that may be chosen. Mutable while the resolver works; hooks may ``veto`` it."""

    component: RegisteredComponent
    config: PluginConfig
    asked: bool  # config names it, or leaves the choice to the resolver
    stage: Stage = Stage.INSTALLED
    verdict: Verdict = Verdict.PASSED_OVER
    reasons: list[Reason] = field(default_factory=list)

    @property
    def spec(self) -> ComponentSpec:
        """What the component says of itself."""
        return self.component.spec

    @property
    def usable(self) -> bool:
        """True unless something rejected it."""
        return self.verdict is not Verdict.REJECTED

    def reject(self, stage: Stage, *reasons: Reason) -> None:
        """Rule it out at ``stage``."""
        self.stage = stage
        self.verdict = Verdict.REJECTED
        self.reasons += reasons

    def veto(self, reason: str) -> None:
        """For ``adjust_candidates``: rule it out, with the reason that ``dovetail explain`` shows."""
        self.reject(Stage.POLICY, Reason("vetoed", "no plugin objects", reason))

    def to_json(self) -> dict[str, Any]:
        """For ``explain --json`` and /server_info."""
        return {
            "name": self.spec.name,
            "distribution": self.component.distribution,
            "version": self.component.version,
            "asked": self.asked,
            "stage": self.stage.value,
            "verdict": self.verdict.value,
            "reasons": [{"code": r.code, "expected": r.expected, "got": r.got, "fix": r.fix} for r in self.reasons],
        }


@dataclass(frozen=True, slots=True)
class Resolution:
    """How one part was chosen. ``slot`` is the kind, for attention with its phase; ``chosen`` is None where config
    switches an optional part off, or leaves it open and nothing fits (``note`` says which). ``unused`` are the user's tuning
    records of this slot that do not count, each with the reason."""

    slot: str
    kind: ComponentKind
    chosen: str | None
    rule: Rule
    candidates: tuple[Candidate, ...]
    note: str = ""
    unused: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For ``explain --json`` and /server_info."""
        return {
            "slot": self.slot,
            "chosen": self.chosen,
            "rule": self.rule.value,
            "note": self.note,
            "unused_tuning_records": list(self.unused),
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }


@dataclass(frozen=True, slots=True)
class Chosen:
    """A component that was chosen, with its validated section."""

    component: RegisteredComponent
    config: PluginConfig

    @property
    def spec(self) -> ComponentSpec:
        """What the component says of itself."""
        return self.component.spec

    @property
    def name(self) -> str:
        """The component's name."""
        return self.spec.name

    def load(self) -> type[Any]:
        """Import the class. Raises ``PluginLoadError`` (the cause chained), also if it does not implement the interface
        of its kind."""
        what = self.component.label
        cls = load_attribute(self.spec.target, what)
        interface = INTERFACES[self.spec.kind]
        if not (isinstance(cls, type) and issubclass(cls, interface)):
            raise PluginLoadError(
                f"{what}: target {self.spec.target!r} is {cls!r}; expected a subclass of {interface!r}"
            )
        return cls

    def build(self, context: Any) -> Any:
        """An instance: ``cls(config, context)``, with the context of the kind's interface. Errors of the constructor
        pass through. (Models are built with ``load()(info)``.)"""
        return self.load()(self.config, context)


@dataclass(frozen=True, slots=True)
class ResolveRequest:
    """What candidates are judged against; hooks see it. ``phase`` is set for attention."""

    kind: ComponentKind
    phase: str | None
    config: Config
    machine: Machine
    model_info: ModelInfo | None
    dtype: str
    kv_dtype: str

    @property
    def slot(self) -> str:
        """The config key of the part: the kind, for attention with its phase."""
        return f"{self.kind}.{self.phase}" if self.phase else self.kind.value


@dataclass(frozen=True, slots=True)
class Resolved:
    """Every part chosen, nothing built. ``config`` is new and concrete: no ``auto`` is left where a value is needed.

    ``models`` are all model components that can be used, for drafters that open a model of their own. ``grammars`` are all grammar backends that requests may use, the default first; those that config holds serve requests
    that name none. ``apis`` are the protocols that a server speaks. ``runtime`` are the features of the runtime under this config. Does not cross process boundaries: another process
    resolves the same config again, and comes to the same result on the same machine.
    """

    config: Config
    machine: Machine
    model_dir: Path
    model_info: ModelInfo
    model: Chosen
    models: tuple[RegisteredComponent, ...]
    attention_prefill: Chosen
    attention_decode: Chosen
    cache: Chosen
    policy: Chosen
    grammars: tuple[Chosen, ...]
    drafter: Chosen | None
    tool_parser: Chosen | None
    reasoning_parser: Chosen | None
    apis: tuple[Chosen, ...]
    runtime: frozenset[Feature]
    resolutions: tuple[Resolution, ...]
    hooks: pluggy.HookRelay = field(repr=False)

    @property
    def grammar(self) -> Chosen | None:
        """The default grammar backend."""
        return self.grammars[0] if self.grammars else None

    @property
    def chosen(self) -> Mapping[str, Chosen | None]:
        """The chosen parts by slot."""
        return {
            "model": self.model,
            "attention.prefill": self.attention_prefill,
            "attention.decode": self.attention_decode,
            "cache": self.cache,
            "policy": self.policy,
            "grammar": self.grammar,
            "speculative": self.drafter,
            "tool_parser": self.tool_parser,
            "reasoning_parser": self.reasoning_parser,
        }

    def resolution(self, slot: str) -> Resolution:
        """How the part of this slot was chosen."""
        return next(resolution for resolution in self.resolutions if resolution.slot == slot)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping: device, model facts, chosen parts, config, and the whole record."""
        info, machine = self.model_info, self.machine
        return {
            "config_hash": config_hash(self.config),
            "config": dump(self.config),
            "machine": {
                "device": machine.device,
                "device_name": machine.device_name,
                "compute_capability": machine.compute_capability and list(machine.compute_capability),
            },
            "model": {
                "path": str(self.model_dir),
                "architecture": info.architecture,
                "vocab_size": info.vocab_size,
                "context_len": self.config.model.context_len,
                "num_layers": info.num_layers,
                "head_dim": info.head_dim,
                "checkpoint_dtype": info.dtype,
                "needs": sorted(info.needs),
            },
            "runtime": sorted(self.runtime),
            "chosen": {slot: _chosen_json(chosen) for slot, chosen in self.chosen.items()},
            "grammars": [chosen.name for chosen in self.grammars],
            "apis": [chosen.name for chosen in self.apis],
            "resolutions": [resolution.to_json() for resolution in self.resolutions],
        }


def _chosen_json(chosen: Chosen | None) -> dict[str, Any] | None:
    if chosen is None:
        return None
    return {"name": chosen.name, "distribution": chosen.component.distribution, "version": chosen.component.version}
