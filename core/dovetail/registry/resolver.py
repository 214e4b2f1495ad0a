"""Choose every component, all of them jointly. A component that config names comes first, then one that a tuning record
prefers, then the component of the highest priority, then the first by name.

A component that config names is never replaced by another: it is used, or startup stops with the reason and the
smallest change that would fix it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from dovetail.config import Config, Selection
from dovetail.config.generation import sampling_defaults
from dovetail.config.kinds import KindSection
from dovetail.errors import ConfigError, ResolutionError
from dovetail.registry import fit, negotiable
from dovetail.registry.api_choice import choose_served
from dovetail.registry.candidates import Slot, Slots, Tuning, call_hook, open_slot, tuned_names
from dovetail.registry.concrete import concrete_config
from dovetail.registry.divisions import divide_experts, note_division
from dovetail.registry.draft_models import check_draft_model
from dovetail.registry.installed import RegisteredComponent, Registry
from dovetail.registry.kinds import Kinds
from dovetail.registry.kv_dtype import LEFT, TAKEN, why_unscaled, with_fp8, with_note
from dovetail.registry.machine import Machine
from dovetail.registry.misfits import misfit, refuse_empty
from dovetail.registry.model_choice import ModelChoice, choose_model
from dovetail.registry.parser_choice import Parsers, choose_parsers
from dovetail.registry.quantizations import for_drafters
from dovetail.registry.resolution import (
    Candidate,
    CandidateVerdict,
    ChoiceRule,
    Chosen,
    Resolution,
    Resolved,
    ResolveRequest,
    Stage,
)
from dovetail.registry.setting_checks import check_settings
from dovetail.registry.specs import ComponentKind, KindDescriptor, Selects
from dovetail.registry.stages import probe
from dovetail.registry.targets import load_attribute
from dovetail.registry.tuning import Tuned, record_for, tuned_for

logger = logging.getLogger("dovetail.registry")


def resolve(config: Config, registry: Registry, machine: Machine, *, tuning: Tuning | None = None) -> Resolved:
    """Choose every component for ``config`` on ``machine``; build nothing. ``tuning`` maps slots (``attention.decode``)
    to the names that were measured best, best first; by default these are the records for this device and model
    (``registry.tuning``).

    Logs one INFO line per slot. Raises ``ConfigError``, ``UnknownComponentError``, ``PluginLoadError``, or
    ``ResolutionError`` with every reason.
    """
    shipped = record_for(machine)
    model = choose_model(config, registry, machine, tuning if tuning is not None else shipped.slots if shipped else {})
    resolved = _with_checkpoint_scales(config, registry, machine, model, tuning)
    for resolution in (one for one in resolved.resolutions if one.concerned):
        logger.info("%s: %s, %s%s", *_logged(resolution))
    if resolved.sampling_defaults:
        logger.info("sampling defaults: %s (model.generation_config)", dict(resolved.sampling_defaults))
    call_hook(registry.hooks, "on_resolved", resolved=resolved)
    return resolved


def _with_checkpoint_scales(
    config: Config, registry: Registry, machine: Machine, model: ModelChoice, tuning: Tuning | None
) -> Resolved:
    """Choose the components. If config leaves the dtype of keys and values open, it is FP8 if the checkpoint has scales for
    them and a combination of components uses these."""
    scaled = with_fp8(config, machine, model)
    why = scaled if isinstance(scaled, str) else ""
    if not isinstance(scaled, str):
        try:
            resolved = _choose(config, registry, machine, scaled, tuning)
            why = why_unscaled(resolved)
            if not why:
                return with_note(resolved, TAKEN)
        except ResolutionError as error:
            why = " ".join(str(error).split())
    resolved = _choose(config, registry, machine, model, tuning)
    return with_note(resolved, f"{LEFT}{why}") if why else resolved


def _choose(
    config: Config, registry: Registry, machine: Machine, model: ModelChoice, tuning: Tuning | None
) -> Resolved:
    """Choose every component for a model whose dtypes are known."""
    tuned = _tuned(config, registry, machine, model, tuning)
    check_settings(config, machine, model)
    parsers = choose_parsers(config, registry, machine, model)
    slots = _open_slots(config, registry, machine, model, tuned.slots)
    negotiation = fit.Negotiation(registry.kinds, model.info)
    try:
        combo = _search(slots, config, machine, negotiation)
    except ResolutionError as error:
        raise registry.with_absent(error) from None
    _mark_candidates(slots, combo, _overlap_values(config, machine), negotiation)
    _check(config, slots, combo, registry.kinds)
    models = _models(registry)
    for drafter in fit.candidates_of(combo[ComponentKind.DRAFTER]):
        check_draft_model(drafter, models, config)
    return _resolved(config, registry, machine, model, slots, combo, tuned, parsers)


def _tuned(config: Config, registry: Registry, machine: Machine, model: ModelChoice, given: Tuning | None) -> Tuned:
    if config.batch_invariant:
        return Tuned({})  # the records were measured with other kernels
    if given is not None:
        return Tuned({slot: tuned_names(given, slot) for slot in given})
    return tuned_for(config, registry, machine, model.info, model.dtype, model.kv_dtype)


def _logged(resolution: Resolution) -> tuple[str, str, str, str]:
    return resolution.slot, resolution.chosen or "none", resolution.rule, resolution.note and f"; {resolution.note}"


def _open_slots(
    config: Config, registry: Registry, machine: Machine, model: ModelChoice, tuning: Tuning
) -> dict[str, Slot]:
    slots = {}
    for descriptor in fit.negotiated(registry.kinds):
        assert descriptor.section is not None, "kinds that are negotiated have a section"
        for phase, selection in _selections(config, descriptor, descriptor.section).items():
            request = ResolveRequest(descriptor.kind, phase, config, machine, model.info, model.dtype, model.kv_dtype)
            optional = descriptor.section.optional
            slots[request.slot] = open_slot(request, selection, registry, optional=optional, tuning=tuning)
    return slots


def _selections(config: Config, descriptor: KindDescriptor, section: KindSection) -> dict[str | None, Selection]:
    """Return the selections of config by phase. If all phases must have the same component, a selection for one phase
    also applies to the phases that config leaves open."""
    given = config.selection(section)
    if isinstance(given, Selection):
        return {None: given}
    selections: dict[str | None, Selection] = {phase: getattr(given, phase) for phase in section.phases}
    if _one_for_all_phases(config, descriptor):
        named = [selection for selection in selections.values() if not selection.is_auto]
        if named:
            selections = {phase: named[0] if own.is_auto else own for phase, own in selections.items()}
    return selections


def _one_for_all_phases(config: Config, descriptor: KindDescriptor) -> bool:
    key = descriptor.one_for_all_phases
    return bool(key) and bool(functools.reduce(getattr, key.split("."), config))


def _search(slots: Slots, config: Config, machine: Machine, negotiation: fit.Negotiation) -> fit.Combination:
    """Return the most preferred combination that fits and whose probes succeed. Only components that are about to be
    chosen are probed."""
    while True:
        refuse_empty(slots)
        domains = _domains(slots, config, machine)
        combo = negotiation.search(domains)
        if combo is None:
            raise misfit(slots, domains, negotiation)
        used = [c for name, slot in slots.items() for c in (*fit.candidates_of(combo[name]), *slot.others(combo[name]))]
        unprobed = [c for c in used if c.spec.probe and c.stage is not Stage.PROBE]
        if machine.assumed or not unprobed:
            return combo
        for candidate in unprobed:
            probe(candidate, config)
        if all(candidate.usable for candidate in unprobed):
            return combo


def _domains(slots: Slots, config: Config, machine: Machine) -> dict[str, Sequence[fit.Option]]:
    return {
        **{name: slot.options() for name, slot in slots.items()},
        negotiable.OVERLAP: _overlap_values(config, machine),
        negotiable.MIXED: [config.scheduler.mixed],
        negotiable.GRAPHS: _graphs(config, machine),
        negotiable.BATCH_INVARIANT: [config.batch_invariant],
        negotiable.MIN_PROBABILITY: [config.scheduler.min_draft_probability],
        negotiable.TENSOR_PARALLEL: [config.parallel.tp],
        negotiable.ATTENTION_DIVISION: [config.parallel.attention],
    }


def _overlap_values(config: Config, machine: Machine) -> list[bool]:
    """Return the values that ``scheduler.overlap`` may take, best first."""
    if config.scheduler.overlap != "auto":
        return [config.scheduler.overlap]
    return [True, False] if machine.device_type == "cuda" else [False, True]


def _check(config: Config, slots: Slots, combo: fit.Combination, kinds: Kinds) -> None:
    """Apply the checks of all kinds to what was chosen. Raises ``ConfigError``."""
    for descriptor in kinds.in_order:
        if descriptor.check is not None:
            load_attribute(descriptor.check, f"the check of kind {descriptor.kind!r}")(config, slots, combo)


def _graphs(config: Config, machine: Machine) -> list[bool]:
    """Return the values that ``graphs.decode`` may take, best first. Raises ``ConfigError`` for graphs on a device that
    cannot capture them."""
    if config.graphs.decode is True and machine.device_type != "cuda":
        raise ConfigError(f"graphs.decode is true and device is {machine.device}; allowed there: auto, false")
    if config.graphs.piecewise_tokens and machine.device_type != "cuda":
        raise ConfigError(
            f"graphs.piecewise_tokens is {config.graphs.piecewise_tokens} and device is {machine.device}, which captures "
            "nothing; allowed there: 0, null"
        )
    if config.graphs.decode != "auto":
        return [config.graphs.decode]
    return [True, False] if machine.device_type == "cuda" else [False]


def _mark_candidates(
    slots: Slots, combo: fit.Combination, overlaps: Sequence[bool], negotiation: fit.Negotiation
) -> None:
    """Mark the chosen candidates. Give each other candidate the reasons why it would not fit in the place of the chosen one."""
    for name, slot in slots.items():
        for candidate in slot.candidates:
            if candidate in fit.candidates_of(combo[name]):
                candidate.verdict = CandidateVerdict.CHOSEN
                candidate.stage = candidate.stage if candidate.stage is Stage.PROBE else Stage.FEATURES
            elif candidate.usable:
                candidate.stage = Stage.FEATURES
                there = {**combo, **dict.fromkeys(_filled(slot), _in_place(slot, combo, candidate))}
                reasons = [negotiation.violations({**there, negotiable.OVERLAP: overlap}) for overlap in overlaps]
                if all(reasons):
                    candidate.reject(Stage.FEATURES, *min(reasons, key=len))
    for name, slot in slots.items():
        for candidate in slot.others(combo[name]):
            candidate.verdict = CandidateVerdict.AVAILABLE


def _in_place(slot: Slot, combo: fit.Combination, candidate: Candidate) -> fit.Option:
    """Return the option with ``candidate``: instead of the chosen one, or, in a list, after those that are chosen."""
    chosen = combo[slot.name]
    return (*chosen, candidate) if isinstance(chosen, tuple) else candidate


def _filled(slot: Slot) -> tuple[str, ...]:
    """Return the slots that a candidate for ``slot`` would fill: all phases, if they must have the same component."""
    return slot.descriptor.slots if _one_for_all_phases(slot.request.config, slot.descriptor) else (slot.name,)


def _resolved(
    config: Config,
    registry: Registry,
    machine: Machine,
    model: ModelChoice,
    slots: Slots,
    combo: fit.Combination,
    tuned: Tuned,
    parsers: Parsers,
) -> Resolved:
    used = {name: [*fit.candidates_of(combo[name]), *slot.others(combo[name])] for name, slot in slots.items()}
    used |= {str(kind): [*fit.candidates_of(choice.chosen)] for kind, choice in parsers.items()}
    used |= {str(model.resolution.kind): [model.candidate]}
    parts = {name: tuple(Chosen(c.component, c.config) for c in found) for name, found in used.items()}
    named = {name: [c.config for c in found if c.asked] for name, found in used.items()}
    resolutions = {model.resolution.slot: model.resolution}
    resolutions |= {name: _resolution(slot, combo[name], tuned) for name, slot in slots.items()}
    resolutions |= {str(kind): choice.resolution for kind, choice in parsers.items()}
    for descriptor in registry.kinds.in_order:
        if descriptor.selects is Selects.SERVED:
            slot = str(descriptor.kind)
            parts[slot], resolutions[slot] = choose_served(descriptor.kind, config, registry)
            named[slot] = [part.config for part in parts[slot]]
    division = divide_experts(config, model.info, tuned)
    experts = str(ComponentKind.EXPERTS)
    resolutions[experts] = note_division(config, division, tuned, resolutions[experts])
    order = [slot for descriptor in registry.kinds.in_order for slot in descriptor.slots]
    overlap, graphs = bool(combo[negotiable.OVERLAP]), bool(combo[negotiable.GRAPHS])
    return Resolved(
        config=concrete_config(config, machine, model, registry.kinds, named, overlap, graphs, division),
        machine=machine,
        model_dir=model.directory,
        model_info=model.info,
        models=_models(registry),
        quantizations=for_drafters(registry, slots[ComponentKind.QUANTIZATION].request)
        if parts[ComponentKind.DRAFTER]
        else (),
        parts={slot: parts[slot] for slot in order},
        runtime=fit.runtime_offers(overlap),
        sampling_defaults=sampling_defaults(config.model.generation_config, model.directory),
        resolutions=tuple(resolutions[slot] for slot in order),
        kinds=registry.kinds,
        hooks=registry.hooks,
    )


def _models(registry: Registry) -> tuple[RegisteredComponent, ...]:
    """Return all model components that can be used."""
    return tuple(c for c in registry.components(ComponentKind.MODEL) if c.incompatible is None)


def _resolution(slot: Slot, option: fit.Option, tuned: Tuned) -> Resolution:
    candidates = fit.candidates_of(option)
    rule = slot.rule(candidates[0] if candidates else None)
    name = ", ".join(candidate.spec.name for candidate in candidates) or None
    unused = tuned.passed_over(slot.name)
    note = _note(slot, candidates, tuned)
    return Resolution(slot.name, slot.request.kind, name, rule, tuple(slot.candidates), note, unused, slot.concerned)


def _note(slot: Slot, chosen: Sequence[Candidate], tuned: Tuned) -> str:
    if not chosen:
        found = {reason.got for candidate in slot.candidates for reason in candidate.reasons}
        one = found.pop() if slot.descriptor.screen and len(found) == 1 else "nothing installed can be used"
        if not slot.concerned:
            return "the model has no use for it"
        section = slot.descriptor.section
        off = "config names none" if section is not None and section.default == "none" else "switched off by config"
        return off if slot.disabled else one
    deprecated = [candidate.spec.deprecated for candidate in chosen if candidate.spec.deprecated]
    if deprecated:
        return f"deprecated: {'; '.join(deprecated)}"
    first = chosen[0]
    return tuned.why(slot.name, first.spec.name) if slot.rule(first) is ChoiceRule.TUNING else ""
