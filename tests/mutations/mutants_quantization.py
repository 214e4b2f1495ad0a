"""Define broken quantizations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from mutant import Mutant, Suite

from dovetail.interfaces.expert_shapes import ExpertWeights
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import WeightTarget
from dovetail.interfaces.quantization import (
    Activation,
    ActivationQuantizer,
    ExpertsMethod,
    ExpertWeightsShape,
    LinearMethod,
    LinearProduct,
    LinearShape,
    ParameterShape,
    Quantization,
    QuantizationContext,
    QuantizedActivations,
)
from dovetail.ops import activation as activations
from dovetail.ops import norm
from dovetail.ops.expert_formats import dequantized
from dovetail.ops.parts import Parts
from dovetail.registry.specs import ComponentSpec
from dovetail.testing.quantization import QuantizationSuite
from dovetail_quantization.config import Fp8Config
from dovetail_quantization.dequantized import DequantizedLinear
from dovetail_quantization.fp8 import Fp8, Fp8Linear
from dovetail_quantization.fp8_experts import Fp8Experts
from dovetail_quantization.fp8_products import dequantize

BY_ROW = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head", "body.router"]}


def accept(checkpoint: Mapping[str, Any] | None, config: Fp8Config) -> str | None:
    """Accept every checkpoint."""
    return None


class ForgetsScales(Fp8Linear):
    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        ones = torch.ones_like(parameters["weight_scale"])
        return super().prepare({**parameters, "weight_scale": ones})


class ConvertsCodes(Fp8Linear):
    def dequantized(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return parameters["weight"].to(self.context.dtype)


class ReadsNoScales(Fp8Linear):
    def parameters(self) -> Mapping[str, ParameterShape]:
        return {"weight": super().parameters()["weight"]}

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        return ((n, target) for n, target in super().targets(name, weight) if target.parameter == "weight")

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        return super().prepare({**parameters, "weight_scale": torch.ones(self.shape.out_features)})


class IgnoresTransforms(Fp8Linear):
    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        return super().targets(name, weight._replace(transform=None))


class FillsLess(Fp8Linear):
    def parameters(self) -> Mapping[str, ParameterShape]:
        return {**super().parameters(), "zero_point": ParameterShape((4,), torch.float32)}


class KeepsTheFirst(Fp8Linear):
    first: LinearProduct | None = None

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        if self.first is None:
            self.first = super().prepare(parameters)
        return self.first


class DummyOfOneNumber(Fp8Linear):
    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        parameters["weight"].copy_(torch.ones(parameters["weight"].shape))
        parameters["weight_scale"].fill_(limit)


class LargeDummy(Fp8Linear):
    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        super().fill_dummy(parameters, limit * 10, generator)


class AlwaysFloat32(DequantizedLinear):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().forward(x.float(), None if bias is None else bias.float())


class NoBias(DequantizedLinear):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().forward(x, None)


class ChangesItsInput(DequantizedLinear):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result = super().forward(x, bias)
        x.mul_(2)
        return result


class GatesWithUp(DequantizedLinear):
    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        gate, up = self.forward(x, bias).chunk(2, dim=1)
        return torch.nn.functional.silu(up) * gate


class LosesAPart(DequantizedLinear):
    in_parts = True

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x, None)[None] * torch.tensor([0.5, 0.25])[:, None, None]


class SaysNoParts(DequantizedLinear):
    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x, None)[None]


class RowAfterRow(DequantizedLinear):
    """Multiply rows one after the other, so that they do not depend on each other."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.cat([torch.nn.functional.linear(row, self._weight, bias) for row in x.split(1)])

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        return activations.GATES[activation](self.forward(x, bias))


class FewRowsInFloat64(RowAfterRow):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(x) > 8:
            return super().forward(x, bias)
        whole = x.double() @ self._weight.double().T
        return (whole if bias is None else whole + bias.double()).to(x.dtype)


class FewRowsInParts(RowAfterRow):
    in_parts = True

    def parts(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.forward(x, None).float()[None] if len(x) < 16 else None


class ByRow(ActivationQuantizer):
    """Quantize in torch, with a scale for each row."""

    def quantize(self, x: torch.Tensor) -> QuantizedActivations:
        scales = x.abs().amax(1, keepdim=True) / 448
        return QuantizedActivations((x / scales).to(torch.float8_e4m3fn), scales, x.dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedActivations:
        return self.quantize(norm.rms_norm(x, weight, eps))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> QuantizedActivations:
        return self.quantize(norm.add_rms_norm(x, residual, weight, eps))

    def add_parts_rms_norm(
        self, parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        normed, total = norm.add_parts_rms_norm(Parts(parts), residual, weight, eps)
        return self.quantize(normed), total

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> QuantizedActivations:
        return self.quantize(activations.GATES[activation](gate_up))


class LeavesItsInput(ByRow):
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> QuantizedActivations:
        return super().add_rms_norm(x.clone(), residual, weight, eps)


class ForgetsTheResidual(ByRow):
    def add_parts_rms_norm(
        self, parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[QuantizedActivations, torch.Tensor]:
        _, total = super().add_parts_rms_norm(parts, residual, weight, eps)
        return self.rms_norm(parts.sum(0), weight, eps), total


class OneActivation(ByRow):
    def gate(self, gate_up: torch.Tensor, activation: Activation) -> QuantizedActivations:
        return super().gate(gate_up, "silu")


class OfQuantizedInputs(DequantizedLinear):
    """Multiply with inputs that ``quantizer`` quantizes."""

    quantizer: ActivationQuantizer = ByRow()

    def forward(self, x: torch.Tensor | QuantizedActivations, bias: torch.Tensor | None) -> torch.Tensor:
        codes, scales, dtype = x if isinstance(x, QuantizedActivations) else self.quantizer.quantize(x)
        return super().forward((codes.float() * scales).to(dtype), bias)


class OfCodes(OfQuantizedInputs):
    """Multiply with the codes of inputs that were quantized before."""

    def forward(self, x: torch.Tensor | QuantizedActivations, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(x, QuantizedActivations):
            x = x._replace(scales=torch.ones_like(x.scales))
        return super().forward(x, bias)


def of_inputs(quantizer: ActivationQuantizer) -> type[DequantizedLinear]:
    return type("Made", (OfQuantizedInputs,), {"quantizer": quantizer})


class ExchangesScales(Fp8Experts):
    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        weights = super().prepare(parameters)
        assert weights.gate_up_scale is not None
        return dataclasses.replace(weights, gate_up_scale=weights.gate_up_scale.roll(self.shape.size, 1))


class ExpertsInFloat32(Fp8Experts):
    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        return dequantized(super().prepare(parameters), torch.float32)


class ExpertsFillLess(Fp8Experts):
    def parameters(self) -> Mapping[str, ParameterShape]:
        return {**super().parameters(), "zero_point": ParameterShape((4,), torch.float32)}


class KeepsTheFirstExperts(Fp8Experts):
    first: ExpertWeights | None = None

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        if self.first is None:
            self.first = dequantized(super().prepare(parameters), torch.float32)
        return self.first


class ReadsNoScalesOfExperts(Fp8Experts):
    def parameters(self) -> Mapping[str, ParameterShape]:
        return {name: shape for name, shape in super().parameters().items() if not name.endswith("scale")}

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        found = super().targets(name, weight)
        return ((n, target) for n, target in found if target.parameter == weight.parameter)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        scales = {f"{name}_scale": torch.ones(len(parameters[name]), 1) for name in ("gate_up", "down")}
        return super().prepare({**parameters, **scales})


class LargeDummyExperts(Fp8Experts):
    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        super().fill_dummy(parameters, limit * 10, generator)


def multiplying_by(product: type[DequantizedLinear]) -> type[Fp8Linear]:
    class Method(Fp8Linear):
        def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
            made = product(
                dequantize(parameters["weight"], parameters["weight_scale"].view(-1), None, torch.float32), "fp8"
            )
            made.in_parts = product.in_parts
            return made

    return Method


def suite(
    method: type[Fp8Linear] = Fp8Linear,
    experts_method: type[Fp8Experts] = Fp8Experts,
    *,
    precise_too: bool = False,
    invariant: bool = False,
    describe: str = "dovetail_quantization.fp8_formats:describe",
) -> Suite:
    class Made(Fp8):
        def method(self, shape: LinearShape) -> LinearMethod | None:
            shape = dataclasses.replace(shape, precise=False) if precise_too else shape
            return None if super().method(shape) is None else method(shape, self._format, self._context)

        def experts_method(self, shape: ExpertWeightsShape) -> ExpertsMethod | None:
            return experts_method(shape, self._format, self._context)

    class Suite(QuantizationSuite):
        name = "fp8"
        checkpoints: ClassVar = {"while loading": None, "by row": BY_ROW}

        @property
        def spec(self) -> ComponentSpec:
            offers = {*super().spec.offers, *([Feature.QUANTIZATION_BATCH_INVARIANT] if invariant else [])}
            return dataclasses.replace(super().spec, describe=describe, offers=frozenset(offers))

        def store(
            self, checkpoint: Mapping[str, Any], module: str, weight: torch.Tensor
        ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
            scale = weight.abs().amax(1, keepdim=True) / 448
            stored = (weight / scale).to(torch.float8_e4m3fn)
            return {f"{module}.weight": stored, f"{module}.weight_scale": scale}, stored.float() * scale

        def make(self, checkpoint: Mapping[str, Any] | None, dtype: torch.dtype = torch.float32) -> Quantization:
            return Made(Fp8Config(), QuantizationContext(checkpoint, dtype, torch.device("cpu")))

        def make_invariant(
            self, checkpoint: Mapping[str, Any] | None, dtype: torch.dtype, device: torch.device
        ) -> Quantization:
            return self.make(checkpoint, dtype)

    return Suite


SOUND, QUANTIZING = suite(), suite(multiplying_by(OfQuantizedInputs))
INVARIANT = suite(multiplying_by(RowAfterRow), invariant=True)
INVARIANCE, IN_FLOAT32 = "test_batch_invariance", [("by row", torch.float32)]
PRODUCTS, GATES = "test_products_are_those_of_the_weights", "test_gates_and_parts_are_those_of_the_product"
INPUTS = "test_inputs_may_be_quantized_before"
EXPERTS = "test_experts_are_those_of_the_weights"
ONE_RANK, LOADING, STORED = [("by row", 1)], [("while loading",)], [("by row",)]

MUTANTS = [
    Mutant("accepts checkpoints of other methods", "test_it_states_what_it_can_load", suite(describe="mutants_quantization:accept"), SOUND, STORED, "not refused"),
    Mutant("forgets the scales", PRODUCTS, suite(ForgetsScales), SOUND, ONE_RANK),
    Mutant("leaves out biases", PRODUCTS, suite(multiplying_by(NoBias)), SOUND, ONE_RANK),
    Mutant("changes its input", PRODUCTS, suite(multiplying_by(ChangesItsInput)), SOUND, ONE_RANK, "input was changed"),
    Mutant("converts codes without their scales", "test_weights_can_be_converted_back", suite(ConvertsCodes), SOUND, ONE_RANK),
    Mutant("ignores the order in which the model reads a weight", "test_transformed_weights_are_those_of_the_model", suite(IgnoresTransforms), SOUND, [("while loading", 1), ("by row", 2)]),
    Mutant("answers in float32", "test_activations_may_have_16_bits", suite(multiplying_by(AlwaysFloat32)), SOUND, STORED),
    Mutant("exchanges gate and up", GATES, suite(multiplying_by(GatesWithUp)), SOUND, STORED),
    Mutant("loses a part", GATES, suite(multiplying_by(LosesAPart)), SOUND, STORED),
    Mutant("returns parts that it does not announce", GATES, suite(multiplying_by(SaysNoParts)), SOUND, STORED, "in_parts"),
    Mutant("multiplies with codes without their scales", INPUTS, suite(multiplying_by(OfCodes)), QUANTIZING, STORED),
    Mutant("does not write the sum of input and residual", INPUTS, suite(multiplying_by(of_inputs(LeavesItsInput()))), QUANTIZING, STORED, "overwrite"),
    Mutant("quantizes the norm without the residual", INPUTS, suite(multiplying_by(of_inputs(ForgetsTheResidual()))), QUANTIZING, STORED),
    Mutant("quantizes each gate as SwiGLU", INPUTS, suite(multiplying_by(of_inputs(OneActivation()))), QUANTIZING, STORED),
    Mutant("multiplies few rows in another way", INVARIANCE, suite(multiplying_by(FewRowsInFloat64), invariant=True), INVARIANT, IN_FLOAT32, "other bits alone"),
    Mutant("has parts of few rows only", INVARIANCE, suite(multiplying_by(FewRowsInParts), invariant=True), INVARIANT, IN_FLOAT32, "only some steps have parts"),
    Mutant("declares a parameter that nothing fills", "test_every_element_is_filled", suite(FillsLess), SOUND, ONE_RANK, "zero_point"),
    Mutant("keeps the first product", "test_other_weights_give_other_products", suite(KeepsTheFirst), SOUND, STORED),
    Mutant("does not read the scales", "test_a_missing_tensor_is_named", suite(ReadsNoScales), SOUND, STORED),
    Mutant("quantizes the head", "test_precise_layers_keep_their_weights", suite(precise_too=True), SOUND, LOADING),
    Mutant("fills dummy weights with one number", "test_dummy_weights_are_small", suite(DummyOfOneNumber), SOUND, STORED),
    Mutant("makes dummy weights too large", "test_dummy_weights_are_small", suite(LargeDummy), SOUND, STORED),
    Mutant("exchanges the scales of gate and up", EXPERTS, suite(experts_method=ExchangesScales), SOUND, [("by row", "one", False)]),
    Mutant("holds experts in float32", "test_activations_of_experts_may_have_16_bits", suite(experts_method=ExpertsInFloat32), SOUND, STORED, "dtype"),
    Mutant("declares a parameter of experts that nothing fills", "test_every_element_of_experts_is_filled", suite(experts_method=ExpertsFillLess), SOUND, [("by row", "one")], "zero_point"),
    Mutant("keeps the first experts", "test_other_experts_give_other_results", suite(experts_method=KeepsTheFirstExperts), SOUND, STORED),
    Mutant("does not read the scales of experts", "test_a_missing_tensor_of_an_expert_is_named", suite(experts_method=ReadsNoScalesOfExperts), SOUND, STORED),
    Mutant("quantizes routers", "test_routers_keep_their_weights", suite(precise_too=True), SOUND, LOADING),
    Mutant("makes dummy experts too large", "test_dummy_experts_are_small", suite(experts_method=LargeDummyExperts), SOUND, STORED),
]  # fmt: skip
