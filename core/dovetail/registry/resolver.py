"""Chooses every part: explicit choice, then a measured tuning record, then priority, then name; then all of them together.

An explicit choice never falls back: it is used, or startup stops with the reason and the smallest change that mends it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from dovetail.config import AttentionSelection, Config, PluginConfig, Selection
from dovetail.errors import ConfigError, ResolutionError
from dovetail.interfaces.features import Feature
from dovetail.registry import fit
from dovetail.registry.api_choice import choose_apis
from dovetail.registry.candidates import Slot, Tuning, call_hook, open_slot, tuned_names
from dovetail.registry.installed import Registry
from dovetail.registry.machine import Machine
from dovetail.registry.model_choice import ModelChoice, choose_model
from dovetail.registry.parser_choice import PARSERS, Parsers, choose_parsers
from dovetail.registry.resolution import (
    Candidate,
    Chosen,
    Resolution,
    Resolved,
    ResolveRequest,
    Rule,
    Stage,
    Verdict,
)
from dovetail.registry.specs import ComponentKind
from dovetail.registry.stages import probe
from dovetail.registry.tuning import Tuned, record_for, tuned_for

Slots = Mapping[str, Slot]
FP8_E4M3 = (8, 9)
"""The compute capability from which on CUDA devices convert to that dtype."""
INVARIANT = ((9, 0),)
"""Compute capabilities of the CUDA devices on which ``batch_invariant`` has been shown to hold."""
INVARIANT_DTYPES = ("bfloat16", "float16")

logger = logging.getLogger("dovetail.registry")


def resolve(config: Config, registry: Registry, machine: Machine, *, tuning: Tuning | None = None) -> Resolved:
    """Choose every part for ``config`` on ``machine``; build nothing. ``tuning`` maps slots (``attention.decode``) to
    the names that were measured best, best first; by default these are the records for this device and model (``plugins.tuning``).

    Logs one INFO line per part. Raises ``ConfigError``, ``UnknownComponentError``, ``PluginLoadError``, or
    ``ResolutionError`` with every reason.
    """
    shipped = record_for(machine)
    model = choose_model(config, registry, machine, tuning if tuning is not None else shipped.slots if shipped else {})
    tuned = _tuned(config, registry, machine, model, tuning)
    _check_kv_dtype(model.kv_dtype, machine)
    _check_batch_invariant(config, machine, model.dtype)
    parsers = choose_parsers(config, registry, machine, model)
    slots = _open_slots(config, registry, machine, model, tuned.slots)
    combo = _search(slots, config, machine, model)
    _judge_the_others(slots, combo, _lags(config, machine), model)
    _check_jump_forward(config, slots, combo)
    _check_invariant_trees(config, combo)
    resolved = _resolved(config, registry, machine, model, slots, combo, tuned, parsers)
    for resolution in resolved.resolutions:
        logger.info("%s: %s, %s%s", *_told(resolution))
    call_hook(registry.hooks, "on_resolved", resolved=resolved)
    return resolved


def _tuned(config: Config, registry: Registry, machine: Machine, model: ModelChoice, given: Tuning | None) -> Tuned:
    if config.batch_invariant:
        return Tuned({})  # what was measured are kernels that it does not take
    if given is not None:
        return Tuned({slot: tuned_names(given, slot) for slot in given})
    return tuned_for(config, registry, machine, model.info, model.dtype, model.kv_dtype)


def _told(resolution: Resolution) -> tuple[str, str, str, str]:
    return resolution.slot, resolution.chosen or "none", resolution.rule, resolution.note and f"; {resolution.note}"


def _open_slots(
    config: Config, registry: Registry, machine: Machine, model: ModelChoice, tuning: Tuning
) -> dict[str, Slot]:
    prefill, decode = config.attention.prefill, config.attention.decode
    if config.batch_invariant:  # both have one backend: what config says of one phase it says of the other
        prefill, decode = decode if prefill.is_auto else prefill, prefill if decode.is_auto else decode
    wanted: list[tuple[ComponentKind, str | None, Selection, bool]] = [
        (ComponentKind.ATTENTION, "prefill", prefill, False),
        (ComponentKind.ATTENTION, "decode", decode, False),
        (ComponentKind.CACHE, None, config.cache, False),
        (ComponentKind.POLICY, None, config.policy, False),
        (ComponentKind.GRAMMAR, None, config.grammar, True),
        (ComponentKind.DRAFTER, None, config.speculative, True),
    ]
    slots = {}
    for kind, phase, selection, optional in wanted:
        request = ResolveRequest(kind, phase, config, machine, model.info, model.dtype, model.kv_dtype)
        slots[request.slot] = open_slot(request, selection, registry, optional=optional, tuning=tuning)
    return slots


def _search(slots: Slots, config: Config, machine: Machine, model: ModelChoice) -> fit.Combination:
    """The best combination that fits and whose own probes agree. Probes run only for what is about to be chosen."""
    while True:
        _refuse_empty(slots)
        domains = _domains(slots, config, machine)
        combo = fit.search(domains, model.info)
        if combo is None:
            raise _misfit(slots, domains, model)
        used = [*combo.values(), *_beside(slots, combo)]
        unprobed = [o for o in used if isinstance(o, Candidate) and o.spec.probe and o.stage is not Stage.PROBE]
        if machine.assumed or not unprobed:
            return combo
        for candidate in unprobed:
            probe(candidate, config)
        if all(candidate.usable for candidate in unprobed):
            return combo


def _beside(slots: Slots, combo: fit.Combination) -> list[Candidate]:
    """The grammar backends that could serve beside the chosen one."""
    chosen = combo[fit.GRAMMAR]
    return [c for c in slots[fit.GRAMMAR].candidates if chosen is not None and c.usable and c is not chosen]


def _domains(slots: Slots, config: Config, machine: Machine) -> dict[str, Sequence[fit.Option]]:
    chosen = {name: slot.options() for name, slot in slots.items()}
    return {
        **chosen,
        fit.OVERLAP: _lags(config, machine),
        fit.MIXED: [config.scheduler.mixed],
        fit.GRAPHS: _graphs(config, machine),
        fit.BATCH_INVARIANT: [config.batch_invariant],
        fit.MIN_PROBABILITY: [config.scheduler.min_draft_probability],
    }


def _lags(config: Config, machine: Machine) -> list[bool]:
    """The values that ``scheduler.overlap`` may take, best first."""
    if config.scheduler.overlap != "auto":
        return [config.scheduler.overlap]
    return [True, False] if machine.device_type == "cuda" else [False, True]


def _check_kv_dtype(kv_dtype: str, machine: Machine) -> None:
    """Whatever attends, the kernels that write the pool must have the conversion."""
    have = machine.compute_capability
    if kv_dtype == "fp8_e4m3" and have is not None and have < FP8_E4M3:
        raise ConfigError(
            f"memory.kv_dtype is fp8_e4m3, which needs compute capability {'.'.join(map(str, FP8_E4M3))}; "
            f"{machine.device_name} has {'.'.join(map(str, have))}. Set memory.kv_dtype to fp8_e5m2 or auto"
        )


def _check_batch_invariant(config: Config, machine: Machine, dtype: str) -> None:
    """Its kernels fix the order of sums on devices on which they were compared bit by bit, and are refused elsewhere."""
    have = machine.compute_capability
    if config.batch_invariant and have not in INVARIANT:
        allowed = ", ".join(".".join(map(str, capability)) for capability in INVARIANT)
        got = f"{machine.device_name} has {'.'.join(map(str, have))}" if have else f"device is {machine.device}"
        raise ConfigError(
            f"batch_invariant is true, which needs CUDA of compute capability {allowed}, where it has been shown to hold; "
            f"{got}. Set batch_invariant: false"
        )
    if config.batch_invariant and dtype not in INVARIANT_DTYPES:
        raise ConfigError(
            f"batch_invariant is true and model.dtype is {dtype}; allowed: {', '.join(INVARIANT_DTYPES)}. Set model.dtype: bfloat16, or "
            "batch_invariant: false"
        )


def _check_invariant_trees(config: Config, combo: fit.Combination) -> None:
    """The keys of a node's ancestors must follow each other as they do in a decode step, whatever lies between them."""
    drafter = combo[fit.DRAFTER]
    trees = isinstance(drafter, Candidate) and Feature.DRAFT_TREE in drafter.spec.offers
    if config.batch_invariant and trees and config.memory.page_size != 1:
        raise ConfigError(
            f"batch_invariant is true with speculative {fit.show(drafter)!r}, whose drafts may be trees, and memory.page_size is "
            f"{config.memory.page_size}; allowed with trees: 1. Set memory.page_size: 1, batch_invariant: false, or a drafter of "
            "chains"
        )


def _check_jump_forward(config: Config, slots: Slots, combo: fit.Combination) -> None:
    """Somebody must name the forced text, and drafts must not stand where it goes."""
    if not config.grammar.jump_forward:
        return
    if combo[fit.DRAFTER] is not None:
        raise ConfigError(
            f"grammar.jump_forward is true with speculative {fit.show(combo[fit.DRAFTER])!r}; allowed: one of the two. "
            "Set grammar.jump_forward: false or speculative: none"
        )
    usable = [c for c in [combo[fit.GRAMMAR], *_beside(slots, combo)] if isinstance(c, Candidate) and c.asked]
    if not any(Feature.GRAMMAR_JUMP_FORWARD in c.spec.offers for c in usable):
        able = [c for c in slots[fit.GRAMMAR].candidates if c.usable and Feature.GRAMMAR_JUMP_FORWARD in c.spec.offers]
        names = ", ".join(f"grammar {c.spec.name!r}" for c in usable) or "none"
        changes = [*(f"grammar.backend: {c.spec.name}" for c in able), "grammar.jump_forward: false"]
        raise ConfigError(
            f"grammar.jump_forward is true and no grammar backend in use offers {Feature.GRAMMAR_JUMP_FORWARD} (in use: "
            f"{names}); set {' or '.join(changes)}"
        )


def _graphs(config: Config, machine: Machine) -> list[bool]:
    """The values that ``graphs.decode`` may take, best first. Raises ``ConfigError`` for graphs that the device has none of."""
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


def _refuse_empty(slots: Slots) -> None:
    """An explicit or indispensable part of which nothing is left stops here, all of them at once."""
    empty: dict[tuple[str, ...], list[str]] = {}
    for slot in slots.values():
        if not slot.options():
            empty.setdefault(_rejections(slot), []).append(slot.name)
    if empty:
        texts = [line for lines, names in empty.items() for line in (f"{', '.join(names)}: {lines[0]}", *lines[1:])]
        raise ResolutionError("\n".join(texts))


def _rejections(slot: Slot) -> tuple[str, ...]:
    lines = [
        f"  - {candidate.component.label}, at stage {candidate.stage}: {reason}"
        for candidate in slot.candidates
        if candidate.asked
        for reason in candidate.reasons
    ]
    given = "what config names" if slot.explicit else "any installed component"
    others = [fit.show(option) for option in slot.alternatives() if option is not None]
    if lines and others:
        lines.append(f"  - or name another that can be used here: {slot.request.kind}: {', '.join(others)}")
    return (f"cannot use {given}", *(lines or ["  - none is installed; `dovetail plugins doctor` shows why"]))


def _misfit(slots: Slots, domains: fit.Domains, model: ModelChoice) -> ResolutionError:
    combo = fit.closest(domains, model.info)
    alternatives: dict[str, Sequence[fit.Option]] = {
        fit.OVERLAP: [False, True],
        fit.MIXED: [False, True],
        fit.GRAPHS: [False, True],
        fit.BATCH_INVARIANT: [False],
        fit.MIN_PROBABILITY: [0],
        fit.DRAFTER: slots[fit.DRAFTER].alternatives(),
        "attention": slots[fit.DECODE].alternatives(),
        **{name: slot.alternatives() for name, slot in slots.items() if name != fit.DRAFTER},
    }
    lines = ["the chosen parts do not fit together:"]
    lines += [f"  - {reason}" for reason in fit.violations(combo, model.info)]
    changes = fit.repairs(combo, alternatives, model.info)
    lines.append(
        "to mend it, set one of:"
        if changes
        else "no change of one or two settings mends this; `dovetail plugins` lists what else there is"
    )
    lines += [f"  - {change}" for change in changes]
    return ResolutionError("\n".join(lines))


def _judge_the_others(slots: Slots, combo: fit.Combination, lags: Sequence[bool], model: ModelChoice) -> None:
    """Mark the chosen, and say of each other candidate what would not fit if it stood in the chosen one's place."""
    for name, slot in slots.items():
        for candidate in slot.candidates:
            if candidate is combo[name]:
                candidate.verdict = Verdict.CHOSEN
                candidate.stage = candidate.stage if candidate.stage is Stage.PROBE else Stage.FEATURES
            elif candidate.usable:
                candidate.stage = Stage.FEATURES
                there = {**combo, **dict.fromkeys(_places(name, combo), candidate)}
                reasons = [fit.violations({**there, fit.OVERLAP: lag}, model.info) for lag in lags]
                if all(reasons):
                    candidate.reject(Stage.FEATURES, *min(reasons, key=len))
    for candidate in _beside(slots, combo):
        candidate.verdict = Verdict.AVAILABLE


def _places(name: str, combo: fit.Combination) -> tuple[str, ...]:
    """The slots that a candidate for ``name`` would fill: with ``batch_invariant`` both phases of attention have one."""
    phases = (fit.PREFILL, fit.DECODE)
    return phases if combo[fit.BATCH_INVARIANT] and name in phases else (name,)


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
    parts = {name: _chosen(combo[name]) for name in slots} | {kind: _chosen(p.chosen) for kind, p in parsers.items()}
    apis, api_resolution = choose_apis(config, registry)
    overlap, graphs = bool(combo[fit.OVERLAP]), bool(combo[fit.GRAPHS])
    grammars = [c for c in [combo[fit.GRAMMAR], *_beside(slots, combo)] if isinstance(c, Candidate)]
    return Resolved(
        config=_concrete(config, machine, model, parts, [c.config for c in grammars if c.asked], apis, overlap, graphs),
        machine=machine,
        model_dir=model.directory,
        model_info=model.info,
        model=_required(model.candidate),
        models=tuple(c for c in registry.components(ComponentKind.MODEL) if c.incompatible is None),
        attention_prefill=_required(combo[fit.PREFILL]),
        attention_decode=_required(combo[fit.DECODE]),
        cache=_required(combo[fit.CACHE]),
        policy=_required(combo[fit.POLICY]),
        grammars=tuple(Chosen(c.component, c.config) for c in grammars),
        drafter=parts[fit.DRAFTER],
        tool_parser=parts[ComponentKind.TOOL_PARSER],
        reasoning_parser=parts[ComponentKind.REASONING_PARSER],
        apis=apis,
        runtime=fit.runtime_offers(overlap),
        resolutions=(
            model.resolution,
            *(_resolution(slot, combo[name], tuned) for name, slot in slots.items()),
            *(p.resolution for p in parsers.values()),
            api_resolution,
        ),
        hooks=registry.hooks,
    )


def _chosen(option: fit.Option) -> Chosen | None:
    if not isinstance(option, Candidate):
        return None
    return Chosen(option.component, option.config)


def _required(option: fit.Option) -> Chosen:
    chosen = _chosen(option)
    assert chosen is not None
    return chosen


def _resolution(slot: Slot, option: fit.Option, tuned: Tuned) -> Resolution:
    chosen = option if isinstance(option, Candidate) else None
    note = ""
    if chosen is None:
        note = "switched off by config" if slot.disabled else "nothing installed can be used"
    elif chosen.spec.deprecated:
        note = f"deprecated: {chosen.spec.deprecated}"
    elif slot.rule(chosen) is Rule.TUNING:
        note = tuned.why(slot.name, chosen.spec.name)
    name, unused = chosen.spec.name if chosen else None, tuned.passed_over(slot.name)
    return Resolution(slot.name, slot.request.kind, name, slot.rule(chosen), tuple(slot.candidates), note, unused)


def _concrete(
    config: Config,
    machine: Machine,
    model: ModelChoice,
    parts: Mapping[str, Chosen | None],
    grammars: Sequence[PluginConfig],
    apis: Sequence[Chosen],
    overlap: bool,
    graphs: bool,
) -> Config:
    """A new config in which nothing is left open that the engine would have to guess."""
    section = config.model.model_copy(
        update={
            "arch": model.candidate.spec.name,
            "dtype": model.dtype,
            "context_len": _context_len(config, model),
            "served_name": config.model.name,
        }
    )
    on_cuda = machine.device_type == "cuda"
    scheduler = {
        "overlap": overlap,
        "max_running": config.scheduler.max_running or (512 if on_cuda else 256),
        "chunk_size": config.scheduler.chunk_size or (8192 if on_cuda else 2048),
    }
    attention = AttentionSelection(prefill=_selection(parts[fit.PREFILL]), decode=_selection(parts[fit.DECODE]))
    return config.model_copy(
        update={
            "model": section,
            "device": machine.device,
            "attention": attention,
            **{name: _selection(parts[name]) for name in (fit.CACHE, fit.POLICY, fit.DRAFTER, *PARSERS)},
            "grammar": config.grammar.model_copy(update={"candidates": tuple(grammars), "disabled": not grammars}),
            "api": Selection(candidates=tuple(api.config for api in apis), disabled=not apis),
            "scheduler": config.scheduler.model_copy(update=scheduler),
            "graphs": config.graphs.model_copy(update={"decode": graphs}),
            "memory": config.memory.model_copy(update={"kv_dtype": model.kv_dtype}),
        }
    )


def _selection(chosen: Chosen | None) -> Selection:
    return Selection(candidates=(chosen.config,)) if chosen else Selection(disabled=True)


def _context_len(config: Config, model: ModelChoice) -> int:
    given, own = config.model.context_len, model.info.context_len
    if given is not None and given > own:
        raise ConfigError(
            f"model.context_len is {given}; allowed: at most {own}, what config.json says. A model that is known to reach "
            "further takes model.overrides: {max_position_embeddings: ...}"
        )
    return given or own
