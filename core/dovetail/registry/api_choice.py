"""Choose the components that run in the server's process, such as the APIs: those that config names, or all that are
installed. The choice depends neither on a device nor on a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.config import Config, Selection
from dovetail.errors import ResolutionError
from dovetail.registry.candidates import open_slot
from dovetail.registry.installed import Registry
from dovetail.registry.machine import Machine
from dovetail.registry.resolution import Candidate, CandidateVerdict, Chosen, Resolution, ResolveRequest
from dovetail.registry.specs import ComponentKind
from dovetail.registry.stages import probe

if TYPE_CHECKING:
    from dovetail.interfaces.api import Api


def choose_served(kind: ComponentKind, config: Config, registry: Registry) -> tuple[tuple[Chosen, ...], Resolution]:
    """Return every component of ``kind`` that is served, in the order of config or else by name. Raises
    ``ResolutionError`` if one that config names cannot be used."""
    section = registry.kinds[kind].section
    assert section is not None, "a kind whose components are served has a section"
    selection = config.selection(section)
    assert isinstance(selection, Selection)
    request = ResolveRequest(kind, None, config, Machine("cpu", None, "cpu", "cpu"), None, "", "")
    slot = open_slot(request, selection, registry, optional=section.optional, tuning={})
    served = [candidate for candidate in slot.candidates if candidate.asked]
    for candidate in served:
        if candidate.usable and candidate.spec.probe:
            probe(candidate, config)
        if candidate.usable:
            candidate.verdict = CandidateVerdict.CHOSEN
    served = _usable(served, slot.name, explicit=slot.explicit)
    names = ", ".join(candidate.spec.name for candidate in served) or None
    note = "" if names else "switched off by config" if slot.disabled else "none is installed"
    resolution = Resolution(slot.name, request.kind, names, slot.rule(None), tuple(slot.candidates), note)
    return tuple(Chosen(candidate.component, candidate.config) for candidate in served), resolution


def _usable(asked: list[Candidate], slot: str, *, explicit: bool) -> list[Candidate]:
    refused = [candidate for candidate in asked if not candidate.usable]
    if explicit and refused:
        reasons = [f"  - {c.component.label}: {reason}" for c in refused for reason in c.reasons]
        raise ResolutionError("\n".join([f"{slot}: cannot serve what config names", *reasons]))
    return [candidate for candidate in asked if candidate.usable]


def choose_apis(config: Config, registry: Registry) -> tuple[tuple[Chosen, ...], Resolution]:
    """Return the APIs that a server serves. Raises ``ResolutionError``."""
    return choose_served(ComponentKind.API, config, registry)


def load_apis(config: Config, registry: Registry) -> list[Api]:
    """Build the chosen APIs. Raises ``PluginError``."""
    return [chosen.load()(chosen.config) for chosen in choose_apis(config, registry)[0]]
