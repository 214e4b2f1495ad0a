"""Choose components jointly, because components that work separately may not fit together.

A combination has one option for every variable: one candidate, several candidates or None for each slot, and a value
for each setting of the runtime that components may depend on. ``violations`` applies every rule. ``search`` finds the
first combination, in order of preference, that breaks no rule. ``repairs`` finds the smallest changes after which a
combination breaks no rule. The descriptors of the kinds define the slots and their rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.features import Feature, FeatureDescriptor
from dovetail.interfaces.model import ModelInfo
from dovetail.registry.kinds import Kinds
from dovetail.registry.negotiable import OVERLAP, SETTINGS
from dovetail.registry.resolution import Candidate, Reason
from dovetail.registry.specs import KindDescriptor, RuntimeNeed, Selects
from dovetail.registry.targets import load_attribute

NEGOTIATED = (Selects.ONE, Selects.ONE_AND_OTHERS, Selects.LIST)
"""The ways to select components in which a kind takes part in the negotiation."""

MOST_PAIRS = 6
"""The largest number of pairs of changes that an error lists."""

Option = Candidate | tuple[Candidate, ...] | bool | float | str | None
Combination = Mapping[str, Option]
Domains = Mapping[str, Sequence[Option]]


@dataclass(frozen=True, slots=True)
class Need:
    """Describe a feature that ``needed_by`` needs from ``owner``, which is a slot, ``runtime``, ``kv`` or ``model``.
    ``why`` explains a need that no component states itself."""

    feature: Feature
    needed_by: str
    owner: str
    why: str = ""


Rule = Callable[["Situation"], Iterable[Need | Reason]]


@dataclass(frozen=True, slots=True)
class Situation:
    """Provide a combination to the rules of a kind."""

    combo: Combination
    kinds: Kinds
    model: ModelInfo

    def candidates(self, slot: str) -> tuple[Candidate, ...]:
        """Return the candidates that the combination puts into a slot."""
        return candidates_of(self.combo.get(slot))

    def candidate(self, slot: str) -> Candidate | None:
        """Return the one candidate of a slot, or None."""
        return next(iter(self.candidates(slot)), None)

    def needs(self, feature: Feature, needed_by: str, why: str = "") -> Iterator[Need]:
        """Return the needs of ``needed_by`` for a feature: one for each owner that must offer it."""
        return (Need(feature, needed_by, owner, why) for owner in self.owners(feature))

    def owners(self, feature: str, phases: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the owners that must offer a feature: slots, or a namespace such as ``runtime``. ``phases`` replaces
        the phases of the feature's descriptor."""
        described = self.kinds.features.get(feature) or FeatureDescriptor(feature, "")
        kind = self.kinds.owner(described.namespace)
        if kind is None:
            return (described.namespace,)
        if len(kind.slots) == 1:
            return kind.slots
        also = [phase for setting, phase in described.also if self.combo[setting]]
        wanted = phases or described.phases
        return tuple(f"{kind.kind}.{phase}" for phase in dict.fromkeys([*wanted, *also])) if wanted else kind.slots


@dataclass(frozen=True)
class Negotiation:
    """Apply the rules of all kinds to combinations for one model."""

    kinds: Kinds
    model: ModelInfo
    _offered: dict[int, frozenset[Feature]] = field(default_factory=dict, repr=False)

    def violations(self, combo: Combination) -> list[Reason]:
        """Return a reason for every need that its owner does not meet and for every conflict. If there is none, the
        components fit together."""
        situation = Situation(combo, self.kinds, self.model)
        broken: dict[tuple[Feature, str, str], Need] = {}
        conflicts: list[Reason] = []
        for found in self._requirements(situation):
            if isinstance(found, Reason):
                conflicts.append(found)
            elif found.feature not in self._offers(found.owner, combo):
                broken[found.feature, found.needed_by, found.owner] = found
        return [*(self._reason(need, combo) for need in broken.values()), *conflicts]

    def search(self, domains: Domains) -> Combination | None:
        """Return the first combination that breaks no rule, or None. Earlier variables and earlier options are
        preferred."""
        return next((combo for combo in self._combinations(domains) if not self.violations(combo)), None)

    def closest(self, domains: Domains) -> Combination:
        """Return the combination that breaks the fewest rules, for the error message."""
        return min(self._combinations(domains), key=lambda combo: len(self.violations(combo)))

    def repairs(self, combo: Combination, alternatives: Domains) -> list[str]:
        """Return the smallest changes after which ``combo`` breaks no rule: every single setting (``key: value``), or,
        if none suffices, pairs of them (``key: value and key: value``)."""
        single = list(self._changes(combo, alternatives))
        for size in (1, 2):
            found = [
                " and ".join(text for text, _ in changes)
                for changes in itertools.combinations(single, size)
                if _apart(changes) and not self.violations({**combo, **_together(changes)})
            ]
            if found:
                return found[:MOST_PAIRS] if size > 1 else found
        return []

    def _combinations(self, domains: Domains) -> Iterator[Combination]:
        variables = [*searched(self.kinds), *SETTINGS]
        for options in itertools.product(*(domains[variable] for variable in variables)):
            yield dict(zip(variables, options, strict=True))

    def _changes(self, combo: Combination, alternatives: Domains) -> Iterator[tuple[str, Combination]]:
        for variable, options in alternatives.items():
            changed = self.kinds[variable].slots if variable in self.kinds else (variable,)
            for option in options:
                settings = dict.fromkeys(changed, option)
                if {**combo, **settings} != combo:
                    yield f"{variable}: {show(option)}", settings

    def _requirements(self, situation: Situation) -> Iterator[Need | Reason]:
        kinds = self._negotiated
        for kind in kinds:
            if any(situation.candidates(slot) for slot in kind.slots):
                yield from (need for given in kind.runtime_needs for need in _runtime_needs(given, situation))
        for slot in (slot for kind in kinds for slot in kind.slots):
            for part in situation.candidates(slot):
                needed_by = f"{slot} {part.spec.name!r}"
                yield from (need for feature in sorted(part.spec.needs) for need in situation.needs(feature, needed_by))
        needed_by = f"model {self.model.architecture!r}"
        yield from (need for feature in sorted(self.model.needs) for need in situation.needs(feature, needed_by))
        for rule in self._rules:
            yield from rule(situation)

    @cached_property
    def _negotiated(self) -> list[KindDescriptor]:
        return negotiated(self.kinds)

    @cached_property
    def _rules(self) -> list[Rule]:
        named = [(kind.rules, kind.kind) for kind in self.kinds.in_order if kind.rules is not None]
        return [load_attribute(rules, f"the rules of kind {kind!r}") for rules, kind in named]

    def _offers(self, owner: str, combo: Combination) -> frozenset[Feature]:
        if owner == "runtime":
            return runtime_offers(bool(combo[OVERLAP]))
        if owner == "kv":
            return kv_offers(self.model)
        if owner == "model":
            return self.model.offers
        return frozenset().union(*map(self._offers_of, candidates_of(combo.get(owner))))

    def _offers_of(self, candidate: Candidate) -> frozenset[Feature]:
        """Return what a candidate offers, except for features that had another meaning in the interface version that
        it was built for."""
        if id(candidate) not in self._offered:
            spec, features = candidate.spec, self.kinds.features
            self._offered[id(candidate)] = frozenset(f for f in spec.offers if spec.api >= features[f].since)
        return self._offered[id(candidate)]

    def _reason(self, need: Need, combo: Combination) -> Reason:
        why = f" ({need.why})" if need.why else ""
        return Reason(f"features.{need.feature}", f"{need.needed_by} needs {need.feature}{why}", self._got(need, combo))

    def _got(self, need: Need, combo: Combination) -> str:
        described = self.kinds.features.get(need.feature)
        if described is not None and described.setting:
            return f"{described.setting} is {show(combo[described.setting])}: {described.without}"
        offers = ", ".join(sorted(self._offers(need.owner, combo))) or "nothing"
        if need.owner in combo:
            return f"{need.owner} is {show(combo[need.owner])!r}, which offers {offers}"
        return f"the {need.owner} offers {offers}"


def negotiated(kinds: Kinds) -> list[KindDescriptor]:
    """Return the kinds whose components are chosen jointly, in the order of resolutions."""
    return [descriptor for descriptor in kinds.in_order if descriptor.selects in NEGOTIATED]


def searched(kinds: Kinds) -> list[str]:
    """Return the slots of these kinds. The search changes the components of later slots first."""
    in_order = sorted(negotiated(kinds), key=lambda descriptor: descriptor.search_order)
    return [slot for descriptor in in_order for slot in descriptor.slots]


def candidates_of(option: Option) -> tuple[Candidate, ...]:
    """Return the candidates of an option. There are none in the value of a setting and in None."""
    if isinstance(option, tuple):
        return option
    return (option,) if isinstance(option, Candidate) else ()


def show(option: Option) -> str:
    """Return an option as it is written in config."""
    if isinstance(option, tuple):
        names = [candidate.spec.name for candidate in option]
        return f"[{', '.join(names)}]" if len(names) > 1 else "".join(names) or "none"
    if isinstance(option, Candidate):
        return option.spec.name
    return "none" if option is None else str(option).lower()


def kv_offers(model: ModelInfo) -> frozenset[Feature]:
    """Return the features that the engine's memory offers for a model. Without pages, a drafter's own keys and values have
    no places."""
    kinds = {group.kind for group in model.cache_groups}
    offers = {Feature.KV_ROLLBACK}
    if CacheGroupKind.STATE in kinds:
        offers.add(Feature.KV_STATE_ROLLBACK)
    if kinds != {CacheGroupKind.STATE}:
        offers.add(Feature.KV_DRAFT_CACHE)
    return frozenset(offers)


def runtime_offers(overlap: bool) -> frozenset[Feature]:
    """Return the features that the runtime offers. With overlap, a step is committed after the next step was launched,
    except before steps with drafts, for which the host must know every token."""
    always = frozenset({Feature.RUNTIME_DELAYED_MASK})
    return always | {Feature.RUNTIME_OVERLAP} if overlap else always


def _runtime_needs(need: RuntimeNeed, situation: Situation) -> Iterator[Need]:
    if need.when and not situation.combo[need.when]:
        return
    if need.if_model_needs is None or need.if_model_needs in situation.model.needs:
        for owner in situation.owners(need.feature, need.phases):
            yield Need(need.feature, need.when or "the runtime", owner)


def _apart(changes: Sequence[tuple[str, Combination]]) -> bool:
    return sum(len(settings) for _, settings in changes) == len(_together(changes))


def _together(changes: Sequence[tuple[str, Combination]]) -> Combination:
    return {name: option for _, settings in changes for name, option in settings.items()}
