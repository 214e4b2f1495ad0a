"""Make the errors of configs for which no combination of components fits."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.errors import ResolutionError
from dovetail.registry import fit, negotiable
from dovetail.registry.candidates import Slot, Slots
from dovetail.registry.ranks import divisions


def refuse_empty(slots: Slots) -> None:
    """Raise one ``ResolutionError`` for all slots that must be filled, because config names a component or the engine
    needs one, and for which no candidate is left."""
    empty: dict[tuple[str, ...], list[str]] = {}
    for slot in slots.values():
        if not slot.options():
            empty.setdefault(_rejections(slot), []).append(slot.name)
    if empty:
        texts = [line for lines, names in empty.items() for line in (f"{', '.join(names)}: {lines[0]}", *lines[1:])]
        raise ResolutionError("\n".join(texts))


def _rejections(slot: Slot) -> tuple[str, ...]:
    lines = _refused(slot)
    given = "what config names" if slot.explicit else "any installed component"
    others = [fit.show(option) for option in slot.alternatives() if option is not None]
    if lines and others:
        lines.append(f"  - or name another that can be used here: {slot.request.kind}: {', '.join(others)}")
    return (f"cannot use {given}", *(lines or ["  - none is installed; `dovetail plugins doctor` shows why"]))


def _refused(slot: Slot) -> list[str]:
    """Return a line for each reason why a component that was asked for cannot be used."""
    return [
        f"  - {candidate.component.label}, at stage {candidate.stage}: {reason}"
        for candidate in slot.candidates
        if candidate.asked
        for reason in candidate.reasons
    ]


def misfit(slots: Slots, domains: fit.Domains, negotiation: fit.Negotiation) -> ResolutionError:
    combo = negotiation.closest(domains)
    alternatives: dict[str, Sequence[fit.Option]] = {
        negotiable.OVERLAP: [False, True],
        negotiable.MIXED: [False, True],
        negotiable.GRAPHS: [False, True],
        negotiable.BATCH_INVARIANT: [False],
        negotiable.MIN_PROBABILITY: [0],
        negotiable.TENSOR_PARALLEL: divisions(negotiation.model),
        negotiable.ATTENTION_DIVISION: ["heads"],
    }
    by_preference = sorted(slots.values(), key=lambda slot: slot.descriptor.search_order)
    for slot in by_preference[:1]:  # the component that the search gives up last is the first that could change
        alternatives[slot.name] = slot.alternatives()
    for name, slot in slots.items():
        if slot.request.phase is not None and name == slot.descriptor.slots[-1]:
            alternatives[str(slot.descriptor.kind)] = slot.alternatives()
    alternatives |= {name: slot.alternatives() for name, slot in slots.items() if name not in alternatives}
    lines = ["the chosen parts do not fit together:"]
    broken = negotiation.violations(combo)
    lines += [f"  - {reason}" for reason in broken]
    for name, slot in slots.items():
        if any(reason.code == f"{name}.none" for reason in broken) and (refused := _refused(slot)):
            lines += [f"{name} is none because no component can be used:", *refused]
    changes = negotiation.repairs(combo, alternatives)
    lines.append(
        "to fix it, set one of:"
        if changes
        else "no change of one or two settings fixes this; `dovetail plugins list` shows the other components"
    )
    lines += [f"  - {change}" for change in changes]
    return ResolutionError("\n".join(lines))
