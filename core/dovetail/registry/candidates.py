"""Who may fill a slot, in order of preference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy
from pydantic import ValidationError

from dovetail.config import PluginConfig, Selection
from dovetail.errors import PluginError, PluginLoadError
from dovetail.registry.installed import RegisteredComponent, Registry
from dovetail.registry.resolution import Candidate, Reason, ResolveRequest, Rule, Stage
from dovetail.registry.stages import examine

Tuning = Mapping[str, str | Sequence[str]]


@dataclass(slots=True)
class Slot:
    """A part to be chosen: every installed component as a candidate, those that config leaves in the running first."""

    request: ResolveRequest
    optional: bool
    disabled: bool
    explicit: bool
    candidates: list[Candidate]
    preferred: frozenset[str] = frozenset()  # names that a tuning record puts first
    adjusted: bool = False

    @property
    def name(self) -> str:
        """The config key."""
        return self.request.slot

    def rule(self, chosen: Candidate | None) -> Rule:
        """Why ``chosen`` was preferred."""
        if self.explicit or self.disabled:
            return Rule.EXPLICIT
        if chosen is not None and chosen.spec.name in self.preferred:
            return Rule.TUNING
        return Rule.ADJUSTED if self.adjusted else Rule.PRIORITY

    def options(self) -> list[Candidate | None]:
        """What may be chosen, best first; None where the slot may stay empty."""
        if self.disabled:
            return [None]
        usable: list[Candidate | None] = [c for c in self.candidates if c.asked and c.usable]
        return [*usable, None] if self.optional and not self.explicit else usable

    def alternatives(self) -> list[Candidate | None]:
        """What config could name instead."""
        usable: list[Candidate | None] = [c for c in self.candidates if c.usable]
        return [*usable, None] if self.optional else usable


def open_slot(
    request: ResolveRequest, selection: Selection, registry: Registry, *, optional: bool, tuning: Tuning
) -> Slot:
    """The slot with its candidates, each taken through the stages before features, then shown to the plugins."""
    preferred = tuned_names(tuning, request.slot)
    candidates = [
        Candidate(registry.get(request.kind, section.kind), section, asked=True) for section in selection.candidates
    ]
    named = {candidate.spec.name for candidate in candidates}
    others = [component for component in registry.components(request.kind) if component.spec.name not in named]
    others.sort(key=lambda component: preference(component, preferred))
    candidates += [default_candidate(component, registry, asked=selection.is_auto) for component in others]
    for candidate in candidates:
        if candidate.usable:
            examine(candidate, request)
    slot = Slot(request, optional, selection.disabled, bool(selection.candidates), candidates, frozenset(preferred))
    _let_plugins_adjust(slot, registry.hooks)
    return slot


def preference(component: RegisteredComponent, preferred: Sequence[str]) -> tuple[int, int, str]:
    """The order among components that nobody named: tuning record, priority, name."""
    name = component.spec.name
    rank = preferred.index(name) if name in preferred else len(preferred)
    return rank, -component.spec.priority, name


def tuned_names(tuning: Tuning, slot: str) -> list[str]:
    """The names that a tuning record prefers for a slot, best first."""
    names = tuning.get(slot, ())
    return [names] if isinstance(names, str) else list(names)


def default_candidate(component: RegisteredComponent, registry: Registry, asked: bool) -> Candidate:
    """A candidate with its defaults. One whose config cannot be made is rejected, not raised: nobody named it."""
    spec = component.spec
    try:
        return Candidate(component, registry.config_class(spec.kind, spec.name)(kind=spec.name), asked)
    except (PluginLoadError, ValidationError) as error:
        candidate = Candidate(component, PluginConfig(kind=spec.name), asked)
        fix = f"report it to {component.distribution}"
        candidate.reject(Stage.INSTALLED, Reason("config", "its config section can be made", str(error), fix))
        return candidate


def _let_plugins_adjust(slot: Slot, hooks: pluggy.HookRelay) -> None:
    before = [candidate for candidate in slot.candidates if candidate.asked and candidate.usable]
    after = list(before)
    call_hook(hooks, "adjust_candidates", kind=slot.request.kind, request=slot.request, candidates=after)
    if sorted(map(id, before)) != sorted(map(id, after)):
        raise PluginError(
            f"a plugin's adjust_candidates added or removed candidates for {slot.name}; it may reorder or veto"
        )
    if after != before and not slot.explicit:
        slot.adjusted = True
        slot.candidates = after + [candidate for candidate in slot.candidates if candidate not in before]


def call_hook(hooks: pluggy.HookRelay, name: str, **arguments: Any) -> None:
    """Call a hook of every plugin. Raises ``PluginError`` where a plugin raises something else."""
    try:
        getattr(hooks, name)(**arguments)
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"a plugin's {name} raised {type(error).__name__}: {error}") from error
