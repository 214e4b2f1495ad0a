"""Joint feature negotiation: parts that are fine alone can be wrong together.

A combination is one option for every variable: a candidate (or None) for each slot, and a value for each scheduler
setting that parts may object to. ``violations`` is the whole rule book; ``search`` finds the first combination, in order
of preference, that breaks no rule; ``repairs`` finds the smallest changes that would mend a broken one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dovetail.config import PluginConfig
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.registry.resolution import Candidate, Reason
from dovetail.registry.specs import ComponentKind

PREFILL, DECODE = "attention.prefill", "attention.decode"
CACHE, POLICY, GRAMMAR, DRAFTER = "cache", "policy", "grammar", "speculative"
OVERLAP, MIXED, GRAPHS = "scheduler.overlap", "scheduler.mixed", "graphs.decode"
BATCH_INVARIANT, MIN_PROBABILITY = "batch_invariant", "scheduler.min_draft_probability"
SETTINGS = (OVERLAP, MIXED, GRAPHS, BATCH_INVARIANT, MIN_PROBABILITY)
VARIABLES: tuple[str, ...] = (DRAFTER, PREFILL, DECODE, CACHE, POLICY, GRAMMAR, *SETTINGS)

INVARIANT_API = (1, 3)
"""Version of the interface from which on attention.batch_invariant concerns the division of a row among steps, too."""

MOST_PAIRS = 6
"""Pairs of changes that are told of."""

Option = Candidate | bool | float | None
Combination = Mapping[str, Option]
Domains = Mapping[str, Sequence[Option]]


@dataclass(frozen=True, slots=True)
class Need:
    """``who`` needs ``feature`` of ``owner`` (a slot, ``runtime``, ``kv`` or ``model``); ``why`` where it is implied."""

    feature: Feature
    who: str
    owner: str
    why: str = ""


def violations(combo: Combination, model: ModelInfo) -> list[Reason]:
    """Every need that its owner does not offer, and what ``batch_invariant`` forbids. Empty: the parts fit together."""
    broken: dict[tuple[Feature, str, str], Need] = {}
    for need in _needs(combo, model):
        if need.feature not in _offers(need.owner, combo, model):
            broken[need.feature, need.who, need.owner] = need
    reasons = [_reason(need, combo, model) for need in broken.values()]
    return [*reasons, *_invariance_conflicts(combo)] if combo[BATCH_INVARIANT] else reasons


def search(domains: Domains, model: ModelInfo) -> Combination | None:
    """The first combination that breaks no rule; earlier variables and earlier options are preferred."""
    return next((combo for combo in _combinations(domains) if not violations(combo, model)), None)


def closest(domains: Domains, model: ModelInfo) -> Combination:
    """The combination that breaks the fewest rules, for the error message."""
    return min(_combinations(domains), key=lambda combo: len(violations(combo, model)))


def _combinations(domains: Domains) -> Iterator[Combination]:
    for options in itertools.product(*(domains[variable] for variable in VARIABLES)):
        yield dict(zip(VARIABLES, options, strict=True))


def repairs(combo: Combination, alternatives: Domains, model: ModelInfo) -> list[str]:
    """The smallest changes that make ``combo`` fit, as ``key: value``: every single setting that does; if none does, pairs of
    them, ``key: value and key: value``."""
    single = list(_changes(combo, alternatives))
    for size in (1, 2):
        found = [
            " and ".join(text for text, _ in changes)
            for changes in itertools.combinations(single, size)
            if _apart(changes) and not violations({**combo, **_together(changes)}, model)
        ]
        if found:
            return found[:MOST_PAIRS] if size > 1 else found
    return []


def _changes(combo: Combination, alternatives: Domains) -> Iterator[tuple[str, Combination]]:
    for variable, options in alternatives.items():
        for option in options:
            settings = dict.fromkeys((PREFILL, DECODE) if variable == "attention" else (variable,), option)
            if {**combo, **settings} != combo:
                yield f"{variable}: {show(option)}", settings


def _apart(changes: Sequence[tuple[str, Combination]]) -> bool:
    return sum(len(settings) for _, settings in changes) == len(_together(changes))


def _together(changes: Sequence[tuple[str, Combination]]) -> Combination:
    return {name: option for _, settings in changes for name, option in settings.items()}


def show(option: Option) -> str:
    """An option as it is written in config."""
    if isinstance(option, Candidate):
        return option.spec.name
    return "none" if option is None else str(option).lower()


def runtime_offers(overlap: bool) -> frozenset[Feature]:
    """What the runtime can do: with overlap, commit lags one step, but for steps with drafts, before which the host knows
    every token."""
    always = frozenset({Feature.RUNTIME_DELAYED_MASK})
    return always | {Feature.RUNTIME_OVERLAP} if overlap else always


def _offers(owner: str, combo: Combination, model: ModelInfo) -> frozenset[Feature]:
    if owner == "runtime":
        return runtime_offers(bool(combo[OVERLAP]))
    if owner == "kv":
        paged = any(group.kind is not CacheGroupKind.STATE for group in model.cache_groups)
        return frozenset({Feature.KV_ROLLBACK} if paged else ())
    if owner == "model":
        return model.offers
    option = combo[owner]
    if not isinstance(option, Candidate):
        return frozenset()
    spec = option.spec
    meant_less = spec.kind is ComponentKind.ATTENTION and spec.api < INVARIANT_API
    return spec.offers - {Feature.ATTN_BATCH_INVARIANT} if meant_less else spec.offers


def _needs(combo: Combination, model: ModelInfo) -> Iterator[Need]:
    yield from _runtime_needs(combo, model)
    for slot in (PREFILL, DECODE, CACHE, POLICY, GRAMMAR, DRAFTER):
        part = combo[slot]
        if isinstance(part, Candidate):
            yield from _declared(part.spec.needs, f"{slot} {part.spec.name!r}", combo)
    yield from _declared(model.needs, f"model {model.architecture!r}", combo)
    yield from _policy_needs(combo)
    yield from _drafter_needs(combo, model)


def _declared(features: frozenset[Feature], who: str, combo: Combination) -> Iterator[Need]:
    return (Need(f, who, owner) for f in sorted(features) for owner in _owners(f, bool(combo[MIXED])))


def _owners(feature: Feature, mixed: bool) -> tuple[str, ...]:
    """Who must offer a feature. A batch with extend rows runs on the prefill backend, also its decode and verify rows."""
    namespace = feature.value.partition(".")[0]
    if namespace == "attention":
        if feature in (Feature.ATTN_EXTEND, Feature.ATTN_MIXED):
            return (PREFILL,)
        if feature in (Feature.ATTN_VERIFY, Feature.ATTN_TREE_MASK):
            return (DECODE, PREFILL) if mixed else (DECODE,)
        return (DECODE,) if feature is Feature.ATTN_DECODE else (PREFILL, DECODE)
    return ({"draft": DRAFTER}.get(namespace, namespace),)


def _runtime_needs(combo: Combination, model: ModelInfo) -> Iterator[Need]:
    yield Need(Feature.ATTN_EXTEND, "the runtime", PREFILL)
    yield Need(Feature.ATTN_DECODE, "the runtime", DECODE)
    if combo[MIXED]:
        yield Need(Feature.ATTN_MIXED, MIXED, PREFILL)
    if combo[GRAPHS]:
        yield Need(Feature.ATTN_GRAPH, GRAPHS, DECODE)
    if combo[BATCH_INVARIANT]:
        wanted = [Feature.ATTN_BATCH_INVARIANT]
        if Feature.ATTN_SLIDING_WINDOW in model.needs:
            wanted.append(Feature.ATTN_INVARIANT_WINDOW)
        yield from (Need(feature, BATCH_INVARIANT, phase) for feature in wanted for phase in (PREFILL, DECODE))
        yield Need(Feature.MODEL_BATCH_INVARIANT, BATCH_INVARIANT, "model")


def _policy_needs(combo: Combination) -> Iterator[Need]:
    policy = combo[POLICY]
    if isinstance(policy, Candidate) and Feature.POLICY_PREFIX_AWARE in policy.spec.offers:
        why = "it orders requests by what the prefix cache holds"
        yield Need(Feature.CACHE_REUSE, f"{POLICY} {policy.spec.name!r}", CACHE, why)


def _drafter_needs(combo: Combination, model: ModelInfo) -> Iterator[Need]:
    """Drafts are verified, and rejected ones taken back, in attention, KV and grammar."""
    drafter = combo[DRAFTER]
    if not isinstance(drafter, Candidate):
        return
    who = f"{DRAFTER} {drafter.spec.name!r}"
    attention = [Feature.ATTN_VERIFY]
    if Feature.DRAFT_TREE in drafter.spec.offers:
        attention.append(Feature.ATTN_TREE_MASK)
    for feature in attention:
        yield from (Need(feature, who, owner) for owner in _owners(feature, bool(combo[MIXED])))
    if combo[MIN_PROBABILITY]:
        yield Need(Feature.DRAFT_PROBS, MIN_PROBABILITY, DRAFTER)
    kinds = {group.kind for group in model.cache_groups}
    if kinds - {CacheGroupKind.STATE}:
        yield Need(Feature.KV_ROLLBACK, who, "kv")
    if CacheGroupKind.STATE in kinds:
        yield Need(Feature.KV_STATE_ROLLBACK, who, "kv", "the model keeps recurrent state")
    if combo[GRAMMAR] is not None:
        yield Need(Feature.GRAMMAR_ROLLBACK, who, GRAMMAR, "rejected drafts are taken back from the grammar")


def _invariance_conflicts(combo: Combination) -> Iterator[Reason]:
    """What would give a token other bits in another step, although each part is invariant by itself."""
    prefill, decode = combo[PREFILL], combo[DECODE]
    if isinstance(prefill, Candidate) and isinstance(decode, Candidate) and _identity(prefill) != _identity(decode):
        yield Reason(
            "batch_invariant.attention",
            f"{BATCH_INVARIANT} needs one attention backend, of the same settings, for both phases (what decode steps have "
            "computed, a prompt may compute again)",
            f"{PREFILL} is {_settings(prefill)}, {DECODE} is {_settings(decode)}",
        )


def _identity(candidate: Candidate) -> tuple[str, PluginConfig]:
    return candidate.spec.name, candidate.config


def _settings(candidate: Candidate) -> str:
    given = candidate.config.model_dump(exclude_defaults=True, exclude={"kind"})
    return repr(show(candidate)) + (f" with {given}" if given else "")


def _reason(need: Need, combo: Combination, model: ModelInfo) -> Reason:
    why = f" ({need.why})" if need.why else ""
    return Reason(f"features.{need.feature}", f"{need.who} needs {need.feature}{why}", _got(need, combo, model))


def _got(need: Need, combo: Combination, model: ModelInfo) -> str:
    if need.feature is Feature.RUNTIME_OVERLAP:
        return f"{OVERLAP} is {show(combo[OVERLAP])}: every step is committed before the next"
    offers = ", ".join(sorted(_offers(need.owner, combo, model))) or "nothing"
    if need.owner in combo:
        return f"{need.owner} is {show(combo[need.owner])!r}, which offers {offers}"
    return f"the {need.owner} offers {offers}"
