"""Find the quantizations that can load a checkpoint. The checkpoint of a drafter is read when the engine is built, after the
components of the target were chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail.registry.candidates import default_candidate, preference
from dovetail.registry.resolution import Candidate, Chosen, Stage
from dovetail.registry.specs import ComponentKind
from dovetail.registry.stages import examine, probe
from dovetail.registry.targets import load_attribute

if TYPE_CHECKING:
    from dovetail.config import PluginConfig
    from dovetail.interfaces.model import ModelInfo
    from dovetail.registry.installed import RegisteredComponent, Registry
    from dovetail.registry.resolution import Resolved, ResolveRequest


def for_drafters(registry: Registry, request: ResolveRequest) -> tuple[Candidate, ...]:
    """Return all quantizations with default settings, best first. Those that this machine cannot use are rejected."""
    found = sorted(registry.components(ComponentKind.QUANTIZATION), key=lambda one: preference(one, ()))
    candidates = tuple(default_candidate(component, registry, asked=False) for component in found)
    for candidate in candidates:
        if candidate.usable:
            examine(candidate, request)
    return candidates


def choose(resolved: Resolved, stored: Mapping[str, Any], info: ModelInfo, what: str) -> Chosen:
    """Return the first component that can load a checkpoint of the model ``info`` whose ``quantization_config`` is
    ``stored``. Errors call the checkpoint ``what``. Raises ``ConfigError`` with the reason of each component."""
    lines = []
    for candidate in resolved.quantizations:
        reason = _objection(candidate, resolved, stored, info)
        if reason is None:
            return Chosen(candidate.component, candidate.config)
        lines.append(f"  - {candidate.component.label}: {reason}")
    text = "\n".join(lines) or "  - none is installed"
    raise ConfigError(
        f"{what} has a quantization_config that no installed component of kind quantization can load:\n{text}\n"
        "Give the drafter another checkpoint"
    )


def _objection(candidate: Candidate, resolved: Resolved, stored: Mapping[str, Any], info: ModelInfo) -> str | None:
    """Return why a component cannot load the checkpoint, or None."""
    if (
        candidate.usable
        and candidate.spec.probe
        and candidate.stage is not Stage.PROBE
        and not resolved.machine.assumed
    ):
        probe(candidate, resolved.config)
    if not candidate.usable:
        return "; ".join(map(str, candidate.reasons))
    reason = cannot_load(candidate.component, candidate.config, stored)
    if reason is not None:
        return reason
    if info.expert_sizes is not None and Feature.QUANTIZATION_EXPERTS not in candidate.spec.offers:
        return f"it does not offer {Feature.QUANTIZATION_EXPERTS}, and {info.architecture} has experts"
    return None


def cannot_load(component: RegisteredComponent, config: PluginConfig, stored: Mapping[str, Any] | None) -> str | None:
    """Return why a component cannot load a checkpoint with this ``quantization_config``, as its ``describe`` says, or
    None. An error in ``describe`` is a reason too: it must not hide the components that can load the checkpoint."""
    assert component.spec.describe is not None
    describe = load_attribute(component.spec.describe, component.label)
    try:
        return describe(stored, config)
    except Exception as error:
        return f"{component.spec.describe} raised {type(error).__name__}: {error}"


def expert_feature(chosen: Candidate | Chosen | None, stored: Mapping[str, Any] | None) -> Feature:
    """Return the feature of backends that multiply experts as ``chosen`` stores them; None stores plain weights."""
    if chosen is None or chosen.spec.expert_format is None:
        return Feature.EXPERTS_PLAIN
    read = load_attribute(chosen.spec.expert_format, chosen.component.label)
    return Feature(f"experts.{read(stored, chosen.config)}")
