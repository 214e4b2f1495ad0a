"""Record each choice: the candidates that were considered, the stage that each reached, and the reasons."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.config import Config, PluginConfig, Selection, config_hash, dump
from dovetail.errors import PluginLoadError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.registry.installed import RegisteredComponent, Registry
from dovetail.registry.kinds import Kinds
from dovetail.registry.machine import Machine
from dovetail.registry.specs import ComponentKind, ComponentSpec, Selects
from dovetail.registry.targets import load_attribute

if TYPE_CHECKING:
    import pluggy


class Stage(enum.StrEnum):
    """Enumerate the stages that a candidate passes, in this order."""

    INSTALLED = "installed"
    POLICY = "policy"
    API = "api"
    REQUIRES = "requires"
    CONSTRAINTS = "constraints"
    FEATURES = "features"
    PROBE = "probe"


class CandidateVerdict(enum.StrEnum):
    """Enumerate the decisions about a candidate. ``passed over``: it would fit, but another candidate is preferred or
    named by config. ``available``: in addition to the chosen one, it serves the requests that name it or need it."""

    CHOSEN = "chosen"
    AVAILABLE = "available"
    PASSED_OVER = "passed over"
    REJECTED = "rejected"


class ChoiceRule(enum.StrEnum):
    """Enumerate the reasons why the chosen candidate was preferred."""

    EXPLICIT = "explicit"
    TUNING = "tuning record"
    ADJUSTED = "adjusted by a plugin"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class Reason:
    """State why a candidate was rejected: a stable ``code``, what was expected, what was found, and what would fix
    it."""

    code: str
    expected: str
    got: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.expected}; {self.got}" + (f". To fix it: {self.fix}" if self.fix else "")


@dataclass(eq=False, slots=True)
class Candidate:
    """Hold a component that may be chosen. The resolver changes it while it works, and hooks may ``veto`` it."""

    component: RegisteredComponent
    config: PluginConfig
    asked: bool  # True if config names it, or leaves the choice to the resolver
    stage: Stage = Stage.INSTALLED
    verdict: CandidateVerdict = CandidateVerdict.PASSED_OVER
    reasons: list[Reason] = field(default_factory=list)

    @property
    def spec(self) -> ComponentSpec:
        """Return the spec of the component."""
        return self.component.spec

    @property
    def usable(self) -> bool:
        """Return True unless something has rejected the candidate."""
        return self.verdict is not CandidateVerdict.REJECTED

    def reject(self, stage: Stage, *reasons: Reason) -> None:
        """Reject the candidate at ``stage``."""
        self.stage = stage
        self.verdict = CandidateVerdict.REJECTED
        self.reasons += reasons

    def veto(self, reason: str) -> None:
        """Reject the candidate. Plugins call this in ``adjust_candidates``; ``dovetail explain`` shows the reason."""
        self.reject(Stage.POLICY, Reason("vetoed", "no plugin objects", reason))

    def to_json(self) -> dict[str, Any]:
        """Return a mapping for ``explain --json`` and /server_info."""
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
    """Describe how one slot was filled. ``slot`` is the kind and, if the kind has phases, the phase
    (``attention.decode``). ``chosen`` is None if config switches an optional slot off, or leaves it open and nothing
    fits; ``note`` has the reason. ``concerned`` is False if the model has no use for the kind. ``unused`` are the user's tuning records of this slot that do not apply, each with
    the reason."""

    slot: str
    kind: ComponentKind
    chosen: str | None
    rule: ChoiceRule
    candidates: tuple[Candidate, ...]
    note: str = ""
    unused: tuple[str, ...] = ()
    concerned: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return a mapping for ``explain --json`` and /server_info."""
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
    """Hold a component that was chosen, with its validated section."""

    component: RegisteredComponent
    config: PluginConfig

    @property
    def spec(self) -> ComponentSpec:
        """Return the spec of the component."""
        return self.component.spec

    @property
    def name(self) -> str:
        """Return the component's name."""
        return self.spec.name

    def load(self) -> type[Any]:
        """Import and return the class. Raises ``PluginLoadError`` (the cause chained), also if the class does not
        implement the interface of its kind."""
        what = self.component.label
        cls = load_attribute(self.spec.target, what)
        interface = load_attribute(self.component.descriptor.interface, f"the interface of kind {self.spec.kind!r}")
        if not (isinstance(cls, type) and issubclass(cls, interface)):
            raise PluginLoadError(
                f"{what}: target {self.spec.target!r} is {cls!r}; expected a subclass of {interface!r}"
            )
        return cls

    def build(self, context: Any) -> Any:
        """Return an instance: ``cls(config, context)``, with the context of the kind's interface. Errors of the
        constructor pass through. (Models are built with ``load()(info)``.)"""
        return self.load()(self.config, context)


@dataclass(frozen=True, slots=True)
class ResolveRequest:
    """Describe what candidates are checked against. Hooks receive it too. ``phase`` is set for kinds with phases."""

    kind: ComponentKind
    phase: str | None
    config: Config
    machine: Machine
    model_info: ModelInfo | None
    dtype: str
    kv_dtype: str

    @property
    def slot(self) -> str:
        """Return the config key of the slot: the kind and, if the kind has phases, the phase."""
        return f"{self.kind}.{self.phase}" if self.phase else str(self.kind)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Hold every choice; nothing is built yet. ``config`` is new and concrete: no ``auto`` is left where a value is needed.

    ``parts`` are the chosen components by slot, including those of third-party kinds. ``models`` are all model
    components that can be used, for drafters that open a separate model, and ``quantizations`` what may load its weights (empty
    without a drafter). ``runtime`` are the features of the runtime
    under this config. ``sampling_defaults`` are the model's values for sampling parameters that a request does not set. The object does not cross process boundaries: another process resolves the same config again,
    with the same result on the same machine.
    """

    config: Config
    machine: Machine
    model_dir: Path
    model_info: ModelInfo
    models: tuple[RegisteredComponent, ...]
    quantizations: tuple[Candidate, ...]
    parts: Mapping[str, tuple[Chosen, ...]]
    runtime: frozenset[Feature]
    sampling_defaults: Mapping[str, Any]
    resolutions: tuple[Resolution, ...]
    kinds: Kinds = field(repr=False)
    hooks: pluggy.HookRelay = field(repr=False)

    @property
    def model(self) -> Chosen:
        """Return the model architecture."""
        return self._required(ComponentKind.MODEL)

    @property
    def attention_prefill(self) -> Chosen:
        """Return the attention backend of batches with extend rows."""
        return self._required("attention.prefill")

    @property
    def attention_decode(self) -> Chosen:
        """Return the attention backend of every other batch."""
        return self._required("attention.decode")

    @property
    def cache(self) -> Chosen:
        """Return the prefix cache."""
        return self._required(ComponentKind.CACHE)

    @property
    def policy(self) -> Chosen:
        """Return the schedule policy."""
        return self._required(ComponentKind.POLICY)

    @property
    def executor(self) -> Chosen:
        """Return the executor."""
        return self._required(ComponentKind.EXECUTOR)

    @property
    def logits_processors(self) -> tuple[Chosen, ...]:
        """Return the logits processors that requests may name."""
        return self.parts[ComponentKind.LOGITS_PROCESSOR]

    @property
    def grammars(self) -> tuple[Chosen, ...]:
        """Return all grammar backends that requests may use, the default first. The backends that ``config`` lists
        serve the requests that name none."""
        return self.parts[ComponentKind.GRAMMAR]

    @property
    def grammar(self) -> Chosen | None:
        """Return the default grammar backend."""
        return self.part(ComponentKind.GRAMMAR)

    @property
    def drafter(self) -> Chosen | None:
        """Return the drafter, if there is one."""
        return self.part(ComponentKind.DRAFTER)

    @property
    def quantization(self) -> Chosen | None:
        """Return how weights are stored, or None for the model's dtype."""
        return self.part(ComponentKind.QUANTIZATION)

    @property
    def experts(self) -> Chosen | None:
        """Return the backend of experts, or None for a model without experts."""
        return self.part(ComponentKind.EXPERTS)

    @property
    def mixer(self) -> Chosen | None:
        """Return the backend of layers with a state, or None for a model without such layers."""
        return self.part(ComponentKind.MIXER)

    @property
    def store(self) -> Chosen:
        """Return how keys and values are kept in memory."""
        return self._required(ComponentKind.STORE)

    @property
    def tool_parser(self) -> Chosen | None:
        """Return the parser of tool calls, if there is one."""
        return self.part(ComponentKind.TOOL_PARSER)

    @property
    def reasoning_parser(self) -> Chosen | None:
        """Return the parser of reasoning, if there is one."""
        return self.part(ComponentKind.REASONING_PARSER)

    @property
    def apis(self) -> tuple[Chosen, ...]:
        """Return the APIs that a server serves."""
        return self.parts[ComponentKind.API]

    @property
    def chosen(self) -> Mapping[str, Chosen | None]:
        """Return the chosen component of each slot that has at most one. For a kind whose other components stay
        available, it is the default."""
        single = [kind for kind in self.kinds.in_order if kind.selects not in (Selects.LIST, Selects.SERVED)]
        return {slot: self.part(slot) for kind in single for slot in kind.slots}

    @property
    def lists(self) -> Mapping[str, tuple[Chosen, ...]]:
        """Return the components of each kind of which several are used together."""
        lists = [kind for kind in self.kinds.in_order if kind.selects is Selects.LIST]
        return {str(kind.kind): self.parts[kind.kind] for kind in lists}

    def part(self, slot: str) -> Chosen | None:
        """Return the first component of a slot, or None. Raises ``KeyError`` for a slot that does not exist."""
        return next(iter(self.parts[slot]), None)

    def _required(self, slot: str) -> Chosen:
        chosen = self.part(slot)
        assert chosen is not None, f"resolve() fills {slot}"
        return chosen

    def resolution(self, slot: str) -> Resolution:
        """Return how this slot was filled."""
        return next(resolution for resolution in self.resolutions if resolution.slot == slot)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready mapping: device, model facts, chosen components, config, and every resolution."""
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
                "needs": sorted(map(str, info.needs)),
                "notes": list(info.notes),
            },
            "runtime": sorted(map(str, self.runtime)),
            "sampling_defaults": dict(self.sampling_defaults),
            "chosen": {slot: _chosen_json(chosen) for slot, chosen in self.chosen.items()},
            "grammars": [chosen.name for chosen in self.grammars],
            "apis": [chosen.name for chosen in self.apis],
            "lists": {slot: [_chosen_json(part) for part in parts] for slot, parts in self.lists.items()},
            "resolutions": [resolution.to_json() for resolution in self.resolutions],
        }


def _chosen_json(chosen: Chosen | None) -> dict[str, Any] | None:
    if chosen is None:
        return None
    return {"name": chosen.name, "distribution": chosen.component.distribution, "version": chosen.component.version}


def reported(resolved: Mapping[str, Any], kind: str, config: Config, registry: Registry) -> tuple[Chosen, ...]:
    """Return the components of a kind that another process has chosen, with their settings in ``config``. ``resolved``
    is the other process's ``Resolved.to_json``. Raises ``PluginError``."""
    one, several = resolved["chosen"].get(kind), resolved["lists"].get(kind, ())
    names = [part["name"] for part in ([one] if one is not None else several)]
    section = registry.kinds[kind].section
    selection = config.selection(section) if section is not None else None
    given = selection.candidates if isinstance(selection, Selection) else ()
    found = []
    for name in names:
        default = registry.config_class(kind, name)(kind=name)
        settings = next((candidate for candidate in given if candidate.kind == name), default)
        found.append(Chosen(registry.get(kind, name), settings))
    return tuple(found)
