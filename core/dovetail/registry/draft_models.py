"""Describe the model that a drafter opens, and refuse one that the ranks cannot run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dovetail.config.checkpoint import read_json
from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail.registry.model_choice import read_quantization
from dovetail.registry.negotiable import ATTENTION_DIVISION
from dovetail.registry.targets import load_attribute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.config import Config
    from dovetail.interfaces.model import ModelInfo
    from dovetail.registry.installed import RegisteredComponent
    from dovetail.registry.resolution import Candidate


class DraftModel(NamedTuple):
    """Hold the component that implements a draft model, and what it has read from the model's config.json."""

    component: RegisteredComponent
    info: ModelInfo


def draft_model(directory: Path, models: Sequence[RegisteredComponent], config: Config) -> DraftModel:
    """Return the model of the checkpoint in ``directory``, which one of ``models`` implements. Raises ``ConfigError`` if there is no
    config.json, if none of them implements it, or if it cannot run as ``config.parallel`` says."""
    file = directory / "config.json"
    checkpoint = read_json(directory, file.name)
    architectures = checkpoint.get("architectures") or []
    found = next((model for model in models if set(architectures) & set(model.spec.aliases)), None)
    if found is None:
        known = sorted({alias for model in models for alias in model.spec.aliases})
        raise ConfigError(f"{file} has architectures {architectures}; installed models implement {', '.join(known)}")
    assert found.spec.describe is not None, "every model spec has a description"
    info = load_attribute(found.spec.describe, found.label)(checkpoint)
    if config.parallel.attention == "data" and Feature.MODEL_DATA_ATTENTION not in info.offers:
        raise ConfigError(
            f"{file}: {ATTENTION_DIVISION} data needs a draft model that offers {Feature.MODEL_DATA_ATTENTION}; "
            f"{info.architecture} does not. Select another draft model, or {ATTENTION_DIVISION} heads"
        )
    return DraftModel(found, replace(info, quantization=read_quantization(checkpoint)))


def check_draft_model(drafter: Candidate, models: Sequence[RegisteredComponent], config: Config) -> None:
    """Refuse what ``draft_model`` refuses before anything is built, if the drafter's ``opens`` names a checkpoint. Raises ``ConfigError``."""
    if drafter.spec.opens is None or config.parallel.attention != "data":
        return
    directory = load_attribute(drafter.spec.opens, drafter.component.label)(drafter.config, config)
    if directory is not None:
        draft_model(directory, models, config)
