"""Choose the component that implements the checkpoint, and let it describe the model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.config import Config
from dovetail.config.checkpoint import locate, read_json
from dovetail.errors import ConfigError, ResolutionError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.registry.candidates import Tuning, default_candidate, preference, tuned_names
from dovetail.registry.installed import RegisteredComponent, Registry
from dovetail.registry.machine import Machine
from dovetail.registry.resolution import (
    Candidate,
    CandidateVerdict,
    ChoiceRule,
    Reason,
    Resolution,
    ResolveRequest,
    Stage,
)
from dovetail.registry.specs import ComponentKind
from dovetail.registry.stages import constraint_reasons, examine
from dovetail.registry.targets import load_attribute

NEAREST = 3
"""An error lists at most this many names that are like an unknown one."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Hold the model component, the facts that it has read from the checkpoint, and the dtypes that follow from
    them."""

    directory: Path
    info: ModelInfo
    candidate: Candidate
    dtype: str
    kv_dtype: str
    resolution: Resolution


def choose_model(config: Config, registry: Registry, machine: Machine, tuning: Tuning) -> ModelChoice:
    """Read config.json (with ``model.overrides``) and find the component for it. Raises ``ConfigError`` for a
    checkpoint that cannot be found or read, ``ResolutionError`` if no component fits."""
    directory = locate(config.model.path)
    checkpoint = {**read_json(directory, "config.json"), **config.model.overrides}
    explicit = config.model.arch != "auto"
    candidates = [
        default_candidate(component, registry, asked=True)
        for component in _components(config, checkpoint, registry, directory, tuning)
    ]
    for candidate in candidates:
        info = _describe(candidate, checkpoint, config, machine)
        if info is not None:
            candidate.verdict = CandidateVerdict.CHOSEN
            rule = ChoiceRule.EXPLICIT if explicit else ChoiceRule.PRIORITY
            note = ". ".join(info.notes)
            resolution = Resolution("model", ComponentKind.MODEL, candidate.spec.name, rule, tuple(candidates), note)
            info = replace(
                _with_state_dtype(info, config.memory.state_dtype), quantization=read_quantization(checkpoint)
            )
            dtype, kv_dtype = _dtypes(config, machine, info)
            return ModelChoice(directory, info, candidate, dtype, kv_dtype, resolution)
    raise ResolutionError("\n".join(_refusal(config, checkpoint, registry, directory, candidates)))


def _refusal(
    config: Config, checkpoint: dict[str, Any], registry: Registry, directory: Path, candidates: Sequence[Candidate]
) -> list[str]:
    """Return the lines of the error for a checkpoint that every candidate refuses."""
    refused = [f"no model component can serve {directory}:", *map(_refused, candidates)]
    if config.model.arch != "auto" or config.model.implementation != "auto":
        return refused
    if all(candidate.spec.fallback for candidate in candidates):
        unknown = _unknown(checkpoint.get("architectures") or [], registry, directory)
        return [f"{unknown}. Components that read any architecture:", *refused[1:]]
    if any(component.spec.fallback for component in registry.components(ComponentKind.MODEL)):
        refused.append("To let transformers' modules compute it, set model.implementation: transformers")
    return refused


def _components(
    config: Config, checkpoint: dict[str, Any], registry: Registry, directory: Path, tuning: Tuning
) -> list[RegisteredComponent]:
    """Return the components that may implement the checkpoint, in order: those that list one of its architectures, or, if there
    are none or config names them, those that read any architecture. Raises ``ResolutionError`` if there are none."""
    implementation = config.model.implementation
    if config.model.arch != "auto":
        named = registry.get(ComponentKind.MODEL, config.model.arch)
        if implementation not in ("auto", implementation_of(named)):
            raise ResolutionError(
                f"model.arch is {config.model.arch!r}, and model.implementation {implementation!r}; allowed with this component: "
                f"auto, {implementation_of(named)}"
            )
        return [named]
    architectures = checkpoint.get("architectures") or []
    found = {c.spec.name: c for arch in architectures for c in registry.aliased(ComponentKind.MODEL, arch)}
    preferred = tuned_names(tuning, "model")
    written = sorted(found.values(), key=lambda component: preference(component, preferred))
    fallbacks = [component for component in registry.components(ComponentKind.MODEL) if component.spec.fallback]
    chosen = fallbacks if implementation == "transformers" or not (written or implementation == "dovetail") else written
    if not chosen:
        raise ResolutionError(_unknown(architectures, registry, directory))
    return chosen


def implementation_of(component: RegisteredComponent) -> str:
    """Return the value of ``model.implementation`` that allows ``component``."""
    return "transformers" if component.spec.fallback else "dovetail"


def chosen_model(component: RegisteredComponent) -> dict[str, str]:
    """Return the keys of the section ``model`` that name ``component``."""
    return {"arch": component.spec.name, "implementation": implementation_of(component)}


def _unknown(architectures: Sequence[str], registry: Registry, directory: Path) -> str:
    """Return the error for a checkpoint whose architectures no component implements: the nearest that are, the plugins
    that are installed and did not load, and what to do."""
    known = sorted({alias for c in registry.components(ComponentKind.MODEL) for alias in c.spec.aliases})
    near = [name for arch in architectures for name in difflib.get_close_matches(str(arch), known, n=NEAREST)]
    listed = f"nearest of {len(known)}: {', '.join(dict.fromkeys(near))}" if near else ", ".join(known) or "none"
    twice = [found.text for (kind, _), found in registry.duplicates.items() if kind == ComponentKind.MODEL]
    absent = [f"Plugins that did not load: {'; '.join(registry.absent)}"] if registry.absent else []
    text = (
        f"{directory / 'config.json'} has architectures {architectures}, which no installed model component "
        f"implements; implemented: {listed}. Install a plugin for it, or name a component that "
        "can read it: model.arch (`dovetail plugins list` shows them)"
    )
    return ". ".join([text, *twice, *absent])


def _describe(candidate: Candidate, checkpoint: dict[str, Any], config: Config, machine: Machine) -> ModelInfo | None:
    """Check the candidate at all its stages. Return the model's facts if it passed them, else None."""
    request = ResolveRequest(ComponentKind.MODEL, None, config, machine, None, "auto", "auto")
    if candidate.usable:
        examine(candidate, request)
    if not candidate.usable:
        return None
    assert candidate.spec.describe is not None
    try:
        info = load_attribute(candidate.spec.describe, candidate.component.label)(checkpoint)
    except Exception as error:
        got = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        candidate.reject(Stage.CONSTRAINTS, Reason("describe", "can read this config.json", got))
        return None
    dtype, kv_dtype = _dtypes(config, machine, info)
    known = replace(request, model_info=info, dtype=dtype, kv_dtype=kv_dtype)
    reasons = list(constraint_reasons(candidate.spec.constraints, known))
    if reasons:
        candidate.reject(Stage.CONSTRAINTS, *reasons)
        return None
    limit = config.model.context_len
    return info if limit is None or limit > info.context_len else replace(info, context_len=limit)


def _dtypes(config: Config, machine: Machine, info: ModelInfo) -> tuple[str, str]:
    """Return the dtype of weights and activations, and the dtype of the KV pool. By default the first is the
    checkpoint's on CUDA and float32 on a CPU, and the second equals the first."""
    default = info.dtype if machine.device_type == "cuda" else "float32"
    dtype = default if config.model.dtype == "auto" else config.model.dtype
    return dtype, dtype if config.memory.kv_dtype == "auto" else config.memory.kv_dtype


def _with_state_dtype(info: ModelInfo, dtype: str) -> ModelInfo:
    """Return ``info`` with the states of recurrences in ``memory.state_dtype``. Raises ``ConfigError`` if the model has none and
    config does not leave this at its default."""
    if dtype == "float32":
        return info
    groups = tuple(group.with_state_dtype(dtype) for group in info.cache_groups)
    if groups == info.cache_groups:
        raise ConfigError(
            f"memory.state_dtype is {dtype}, and {info.architecture} keeps no states of recurrences; leave it out"
        )
    return replace(info, cache_groups=groups, needs=info.needs | {Feature.MIXER_BFLOAT16_STATES})


def read_quantization(checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a config.json, if it has one. Raises ``ConfigError``."""
    given = checkpoint.get("quantization_config")
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"config.json: quantization_config is {given!r:.80}; allowed: an object, null")
    return given


def _refused(candidate: Candidate) -> str:
    return f"  - {candidate.component.label}: {'; '.join(map(str, candidate.reasons))}"
