"""Collect the candidates for a slot, in order of preference."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy
from pydantic import ValidationError

from dovetail.config import PluginConfig, Selection
from dovetail.errors import ConfigError, PluginError, PluginLoadError
from dovetail.registry.installed import RegisteredComponent, Registry
from dovetail.registry.resolution import Candidate, ChoiceRule, Reason, ResolveRequest, Stage
from dovetail.registry.specs import KindDescriptor, Selects
from dovetail.registry.stages import examine
from dovetail.registry.targets import load_attribute

MOST_REORDERED = 4
"""The length of the longest list for which an error tries every other order of its components."""

Tuning = Mapping[str, str | Sequence[str]]
Option = Candidate | tuple[Candidate, ...] | None


@dataclass(slots=True)
class Slot:
    """Hold the candidates for one choice: every installed component of the kind, those that config permits first."""

    request: ResolveRequest
    descriptor: KindDescriptor
    optional: bool
    disabled: bool
    explicit: bool
    candidates: list[Candidate]
    preferred: frozenset[str] = frozenset()  # names that a tuning record puts first
    adjusted: bool = False
    concerned: bool = True  # False if the model has no use for the kind

    @property
    def name(self) -> str:
        """Return the slot's name: the kind and, if the kind has phases, the phase."""
        return self.request.slot

    def rule(self, chosen: Candidate | None) -> ChoiceRule:
        """Return why ``chosen`` was preferred."""
        if self.explicit or self.disabled:
            return ChoiceRule.EXPLICIT
        if chosen is not None and chosen.spec.name in self.preferred:
            return ChoiceRule.TUNING
        return ChoiceRule.ADJUSTED if self.adjusted else ChoiceRule.PRIORITY

    def options(self) -> list[Option]:
        """Return the options, best first: candidates, and None if the slot may stay empty. The options of a list are
        tuples."""
        if self.descriptor.selects is Selects.LIST:
            return self._lists()
        if self.disabled:
            return [None]
        usable: list[Option] = [c for c in self.candidates if c.asked and c.usable]
        return [*usable, None] if self.optional and not self.explicit else usable

    def alternatives(self) -> list[Option]:
        """Return what config could select instead."""
        if self.descriptor.selects is Selects.LIST:
            return [*self._other_lists(), *([()] if self.optional else [])]
        usable: list[Option] = [c for c in self.candidates if c.usable]
        return [*usable, None] if self.optional else usable

    def others(self, chosen: object) -> list[Candidate]:
        """Return the candidates that can be used in addition to ``chosen``, if the kind keeps them available."""
        if self.descriptor.selects is not Selects.ONE_AND_OTHERS or chosen is None:
            return []
        return [candidate for candidate in self.candidates if candidate.usable and candidate is not chosen]

    def _other_lists(self) -> list[tuple[Candidate, ...]]:
        """Return the lists that config could name instead: another order, or one more component, before or after the others."""
        asked = tuple(candidate for candidate in self.candidates if candidate.asked and candidate.usable)
        others = [candidate for candidate in self.candidates if candidate.usable and candidate not in asked]
        longer = [more for other in others for more in ((other, *asked), (*asked, other)) if asked]
        return [*(itertools.permutations(asked) if 1 < len(asked) <= MOST_REORDERED else ()), *longer]

    def _lists(self) -> list[Option]:
        """Return the list of all candidates. If config does not name them, also return the lists with one candidate
        fewer, and the empty list."""
        if self.disabled:
            return [()]
        asked = [candidate for candidate in self.candidates if candidate.asked]
        usable = tuple(candidate for candidate in asked if candidate.usable)
        if self.explicit:
            return [usable] if len(usable) == len(asked) else []
        fewer = [tuple(c for c in usable if c is not left_out) for left_out in usable]
        return list(dict.fromkeys([usable, *fewer, ()]))


Slots = Mapping[str, Slot]
"""The slots of a config by their names."""


def open_slot(
    request: ResolveRequest, selection: Selection, registry: Registry, *, optional: bool, tuning: Tuning
) -> Slot:
    """Return the slot with its candidates. Each candidate has passed the stages before features or was rejected by one
    of them. Plugins may then adjust the candidates. Raises ``PluginError``, and ``ConfigError`` if config names a
    component of a kind for which the model has no use."""
    concerned = _concerned(request, selection, registry.kinds[request.kind])
    if not concerned:
        selection = selection.model_copy(update={"disabled": True})
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
        if candidate.usable:
            _screen(candidate, request, registry.kinds[request.kind], named=bool(selection.candidates))
    slot = Slot(
        request,
        registry.kinds[request.kind],
        optional and registry.kinds[request.kind].concerns is None,
        selection.disabled,
        bool(selection.candidates),
        candidates,
        frozenset(preferred),
        concerned=concerned,
    )
    _let_plugins_adjust(slot, registry.hooks)
    return slot


def _concerned(request: ResolveRequest, selection: Selection, descriptor: KindDescriptor) -> bool:
    """Return True if the model has a use for the kind. Raises ``ConfigError`` if it has none and config names a
    component."""
    if descriptor.concerns is None or request.model_info is None:
        return True
    concerns = load_attribute(descriptor.concerns, f"the function concerns of kind {descriptor.kind!r}")
    if concerns(request.model_info):
        return True
    if selection.candidates:
        named = ", ".join(section.kind for section in selection.candidates)
        raise ConfigError(
            f"{descriptor.where} is {named}, and {request.model_info.architecture} has no use for {descriptor.summary}; "
            "allowed for it: auto, none"
        )
    return False


def _screen(candidate: Candidate, request: ResolveRequest, descriptor: KindDescriptor, named: bool) -> None:
    """Reject the candidate if its kind's ``screen`` yields reasons."""
    if descriptor.screen is not None:
        screen = load_attribute(descriptor.screen, f"the screen of kind {descriptor.kind!r}")
        if reasons := list(screen(candidate, request, named)):
            candidate.reject(Stage.CONSTRAINTS, *reasons)


def preference(component: RegisteredComponent, preferred: Sequence[str]) -> tuple[int, int, str]:
    """Return the sort key of a component that config does not name: tuning record, priority, name."""
    name = component.spec.name
    rank = preferred.index(name) if name in preferred else len(preferred)
    return rank, -component.spec.priority, name


def tuned_names(tuning: Tuning, slot: str) -> list[str]:
    """Return the names that a tuning record prefers for a slot, best first."""
    names = tuning.get(slot, ())
    return [names] if isinstance(names, str) else list(names)


def default_candidate(component: RegisteredComponent, registry: Registry, asked: bool) -> Candidate:
    """Return a candidate with its default settings. If they cannot be made, the candidate is rejected and no error is raised,
    because config does not name it."""
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
        names = ", ".join(one.plugin_name for one in hooks.adjust_candidates.get_hookimpls())
        raise PluginError(
            f"the hook adjust_candidates added or removed candidates for {slot.name}; it may reorder or veto. Plugins "
            f"that implement it: {names}"
        )
    if after != before and not slot.explicit:
        slot.adjusted = True
        slot.candidates = after + [candidate for candidate in slot.candidates if candidate not in before]


def call_hook(hooks: pluggy.HookRelay, name: str, **arguments: Any) -> None:
    """Call a hook of every plugin. Raises ``PluginError``, also for any other exception that a plugin raises."""
    try:
        getattr(hooks, name)(**arguments)
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"a plugin's {name} raised {type(error).__name__}: {error}") from error
