"""Define broken quantizations to integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from mutant import Mutant, Suite

from dovetail.interfaces.expert_shapes import ExpertWeights
from dovetail.interfaces.model import WeightTarget
from dovetail.interfaces.quantization import (
    ExpertsMethod,
    ExpertWeightsShape,
    LinearMethod,
    LinearProduct,
    LinearShape,
    Quantization,
    QuantizationContext,
)
from dovetail.testing.quantization import QuantizationSuite
from dovetail_quantization.config import IntegerConfig
from dovetail_quantization.integer import Integer, IntegerLinear
from dovetail_quantization.integer_experts import IntegerExperts
from integer_checkpoints import FORMATS

CHOSEN = ("awq", "gptq, act-order")


class ForgetsZeroPoints(IntegerLinear):
    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        return super().prepare({**parameters, "zero": torch.full_like(parameters["zero"], 8)})


class ForgetsTheOrder(IntegerLinear):
    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        columns = torch.arange(self.shape.in_features, dtype=torch.int32)
        lists = {"group_of": columns // 32, "order": columns}
        return super().prepare({**parameters, **{n: own.expand_as(parameters[n]).clone() for n, own in lists.items()}})


class ExchangesScalesOfModules(IntegerLinear):
    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        for tensor, target in super().targets(name, weight):
            moved = "up_proj" if "gate_proj" in tensor else "gate_proj"
            other = tensor.replace("gate_proj", moved) if "gate_proj" in tensor else tensor.replace("up_proj", moved)
            yield (other if tensor.endswith("scales") else tensor), target


class ForgetsZeroPointsOfExperts(IntegerExperts):
    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        return super().prepare({name: tensor for name, tensor in parameters.items() if not name.endswith("zero")})


class ReadsNoZeroPoints(IntegerLinear):
    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        for tensor, target in super().targets(name, weight):
            yield tensor, target._replace(default=8.0) if target.parameter == "zero" else target


def suite(method: type[IntegerLinear] = IntegerLinear, experts: type[IntegerExperts] = IntegerExperts) -> Suite:
    class Made(Integer):
        def method(self, shape: LinearShape) -> LinearMethod | None:
            found = super().method(shape)
            return method(shape, found.scheme, found.context) if isinstance(found, IntegerLinear) else None

        def experts_method(self, shape: ExpertWeightsShape) -> ExpertsMethod | None:
            found = super().experts_method(shape)
            assert isinstance(found, IntegerExperts)
            return experts(shape, found.scheme, QuantizationContext(None, torch.float32, torch.device("cpu")))

    class Suite(QuantizationSuite):
        name = "integer"
        optional = (".g_idx",)
        checkpoints: ClassVar = {name: FORMATS[name].config for name in CHOSEN}

        def store(
            self, checkpoint: Mapping[str, Any], module: str, weight: torch.Tensor
        ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
            (write,) = [FORMATS[name].store for name in CHOSEN if FORMATS[name].config is checkpoint]
            return write(module, weight)

        def make(self, checkpoint: Mapping[str, Any] | None, dtype: torch.dtype = torch.float32) -> Quantization:
            return Made(IntegerConfig(), QuantizationContext(checkpoint, dtype, torch.device("cpu")))

    return Suite


SOUND = suite()
PRODUCTS = "test_products_are_those_of_the_weights"

MUTANTS = [
    Mutant("forgets zero points", PRODUCTS, suite(ForgetsZeroPoints), SOUND, [("awq", 1), ("awq", 2)]),
    Mutant("forgets the order of columns", PRODUCTS, suite(ForgetsTheOrder), SOUND, [("gptq, act-order", 1)]),
    Mutant("exchanges the scales of two modules", PRODUCTS, suite(ExchangesScalesOfModules), SOUND, [("awq", 1)]),
    Mutant("lets zero points be missing", "test_a_missing_tensor_is_named", suite(ReadsNoZeroPoints), SOUND, [("awq",)]),
    Mutant("forgets the zero points of experts", "test_experts_are_those_of_the_weights", suite(experts=ForgetsZeroPointsOfExperts), SOUND, [("awq", "one", False)]),
]  # fmt: skip
