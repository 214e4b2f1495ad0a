"""Choose the parsers of the model's outputs: those that config names, or those that match the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.config import Config, Selection
from dovetail.config.checkpoint import locate
from dovetail.errors import ResolutionError
from dovetail.registry.candidates import Slot, open_slot
from dovetail.registry.installed import Registry
from dovetail.registry.machine import Machine
from dovetail.registry.model_choice import ModelChoice
from dovetail.registry.resolution import (
    Candidate,
    CandidateVerdict,
    ChoiceRule,
    Reason,
    Resolution,
    ResolveRequest,
    Stage,
)
from dovetail.registry.specs import ComponentKind, Selects
from dovetail.registry.stages import probe


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """Hold one parser, or none, and how it was chosen."""

    chosen: Candidate | None
    resolution: Resolution


Parsers = Mapping[ComponentKind, ParserChoice]


def choose_parsers(config: Config, registry: Registry, machine: Machine, model: ModelChoice) -> Parsers:
    """Return the parsers for the model. Raises ``ResolutionError`` if config names parsers and none of them can be
    used."""
    template = _template(config, model)
    choices: dict[ComponentKind, ParserChoice] = {}
    for descriptor in registry.kinds.in_order:
        if descriptor.selects is not Selects.BY_TEMPLATE or descriptor.section is None:
            continue
        kind = descriptor.kind
        selection = config.selection(descriptor.section)
        assert isinstance(selection, Selection)
        request = ResolveRequest(kind, None, config, machine, model.info, model.dtype, model.kv_dtype)
        slot = open_slot(request, selection, registry, optional=descriptor.section.optional, tuning={})
        if selection.is_auto:
            _read_template(slot, template)
        choices[kind] = _choice(slot, _first(slot, config), template)
    return choices


def _template(config: Config, model: ModelChoice) -> str | None:
    """Return the source of the chat template that is used with tools."""
    from dovetail.tokenizer.template_files import read_template, read_tool_template

    if config.model.chat_template:
        return read_template(config.model.chat_template)
    own = config.model.tokenizer
    return read_tool_template(locate(own, "model.tokenizer") if own else model.directory)


def _read_template(slot: Slot, template: str | None) -> None:
    """Reject the parsers whose marks the template does not have."""
    got = "it has none" if template is not None else "the model has no chat template"
    for candidate in slot.candidates:
        pattern = candidate.spec.template
        if not candidate.usable or (pattern and template is not None and re.search(pattern, template)):
            continue
        expected = f"auto takes it if the chat template matches {pattern!r}" if pattern else "taken by name only"
        fix = f"{slot.name}: {candidate.spec.name}, if the model writes this format"
        candidate.reject(Stage.CONSTRAINTS, Reason("constraints.template", expected, got, fix))


def _first(slot: Slot, config: Config) -> Candidate | None:
    """Return the first candidate that can be used and whose probe succeeds."""
    for candidate in slot.options():
        assert not isinstance(candidate, tuple)
        if candidate is not None and candidate.spec.probe and not slot.request.machine.assumed:
            probe(candidate, config)
        if candidate is None or candidate.usable:
            return candidate
    reasons = [f"  - {c.component.label}: {reason}" for c in slot.candidates if c.asked for reason in c.reasons]
    raise ResolutionError("\n".join([f"{slot.name}: cannot use what config names", *reasons]))


def _choice(slot: Slot, chosen: Candidate | None, template: str | None) -> ParserChoice:
    note = "the chat template uses its format" if chosen is not None and not slot.explicit else ""
    if chosen is None:
        given = "the chat template matches none" if template is not None else "the model has no chat template"
        note = "switched off by config" if slot.disabled else given
    for candidate in slot.candidates:
        if candidate is chosen:
            candidate.verdict = CandidateVerdict.CHOSEN
            candidate.stage = candidate.stage if candidate.stage is Stage.PROBE else Stage.FEATURES
        elif candidate.usable:
            candidate.stage = Stage.FEATURES
    rule = slot.rule(chosen) if chosen is not None or slot.disabled else ChoiceRule.PRIORITY
    name = chosen.spec.name if chosen else None
    return ParserChoice(chosen, Resolution(slot.name, slot.request.kind, name, rule, tuple(slot.candidates), note))
