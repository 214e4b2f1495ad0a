"""Find the modules of a checkpoint whose weights can be quantized."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from dovetail.engine.build import build_model
from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertWeights
from dovetail.interfaces.model import WeightTarget
from dovetail.interfaces.quantization import (
    ExpertsMethod,
    ExpertWeightsShape,
    LinearMethod,
    LinearProduct,
    LinearShape,
    ParameterShape,
    Quantization,
)
from dovetail.registry.machine import Machine
from dovetail.registry.model_choice import choose_model
from dovetail.registry.setup import setup
from dovetail.registry.targets import load_attribute


def modules_of(directory: Path) -> list[str]:
    """Return the modules of the checkpoint in ``directory`` that are linear layers or experts of its model, without those
    that should stay precise (the head, routers). Raises ``ConfigError`` for a checkpoint that is quantized already."""
    config, registry = setup([], [f"model.path={directory}"], dict(os.environ))
    choice = choose_model(config, registry, Machine.assume("cpu"), {})
    if choice.info.quantization is not None:
        raise ConfigError(f"{directory} is quantized already; give the checkpoint that it was made of")
    component = choice.candidate.component
    found = _Modules()
    model_class = load_attribute(component.spec.target, component.label)
    build_model(model_class, choice.info, torch.device("cpu"), torch.float32, quantization=found)
    return list(found.names)


class _Modules(Quantization):
    """Collect the names of all modules, and let no layer allocate a weight."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def method(self, shape: LinearShape) -> LinearMethod | None:
        if not shape.precise:
            self.names |= dict.fromkeys(shape.names)
        return _NoWeight()

    def experts_method(self, shape: ExpertWeightsShape) -> ExpertsMethod | None:
        self.names |= dict.fromkeys(shape.names)
        return _NoExperts()


class _NoWeight(LinearMethod):
    def parameters(self) -> Mapping[str, ParameterShape]:
        return {}

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        return iter(())

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        raise NotImplementedError

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        raise NotImplementedError


class _NoExperts(ExpertsMethod):
    def parameters(self) -> Mapping[str, ParameterShape]:
        return {}

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        return iter(())

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        raise NotImplementedError

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        raise NotImplementedError
