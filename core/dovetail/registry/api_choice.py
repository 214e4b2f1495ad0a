"""Which APIs a server speaks: those that config names, else all that are installed. They run in the server's process, where
there is no device and no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.config import Config
from dovetail.errors import ResolutionError
from dovetail.registry.candidates import open_slot
from dovetail.registry.installed import Registry
from dovetail.registry.machine import Machine
from dovetail.registry.resolution import Candidate, Chosen, Resolution, ResolveRequest, Verdict
from dovetail.registry.specs import ComponentKind
from dovetail.registry.stages import probe

if TYPE_CHECKING:
    from dovetail.interfaces.api import Api


def choose_apis(config: Config, registry: Registry) -> tuple[tuple[Chosen, ...], Resolution]:
    """Every API that is served, in the order of config, else of their names. Raises ``ResolutionError`` where one that config
    names cannot be."""
    request = ResolveRequest(ComponentKind.API, None, config, Machine("cpu", None, "cpu", "cpu"), None, "", "")
    slot = open_slot(request, config.api, registry, optional=True, tuning={})
    served = [candidate for candidate in slot.candidates if candidate.asked]
    for candidate in served:
        if candidate.usable and candidate.spec.probe:
            probe(candidate, config)
        if candidate.usable:
            candidate.verdict = Verdict.CHOSEN
    served = _usable(served, explicit=slot.explicit)
    names = ", ".join(candidate.spec.name for candidate in served) or None
    note = "" if names else "switched off by config" if slot.disabled else "none is installed"
    resolution = Resolution(slot.name, request.kind, names, slot.rule(None), tuple(slot.candidates), note)
    return tuple(Chosen(candidate.component, candidate.config) for candidate in served), resolution


def _usable(asked: list[Candidate], *, explicit: bool) -> list[Candidate]:
    refused = [candidate for candidate in asked if not candidate.usable]
    if explicit and refused:
        reasons = [f"  - {c.component.label}: {reason}" for c in refused for reason in c.reasons]
        raise ResolutionError("\n".join(["api: cannot serve what config names", *reasons]))
    return [candidate for candidate in asked if candidate.usable]


def load_apis(config: Config, registry: Registry) -> list[Api]:
    """The chosen APIs, built. Raises ``PluginError``."""
    return [chosen.load()(chosen.config) for chosen in choose_apis(config, registry)[0]]
