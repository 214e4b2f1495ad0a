"""Test how quantizations store the weights of experts: the part of ``QuantizationSuite`` for components that offer
``quantization.experts``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dovetail.engine.build import as_module, build_model
from dovetail.engine.weights import load_weights
from dovetail.errors import WeightsError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.interfaces.quantization import Quantization
from dovetail.layers.expert_targets import FusedLayout, expert_targets, fused_expert_targets
from dovetail.layers.experts import Experts
from dovetail.ops.expert_formats import dequantized
from dovetail.testing.component import ComponentSuite
from dovetail.testing.ranks import run_ranks, thread_meshes

CPU = torch.device("cpu")
EXPERTS, HIDDEN, SIZE = 4, 64, 128
SHAPE = ExpertsShape(HIDDEN, SIZE, RoutingRule(EXPERTS, 2, renormalize=True), bias=True)
SIZES = (("num_experts", EXPERTS), ("size", SIZE))
GROUP = CacheGroup(1, 1, HIDDEN)
INFO = ModelInfo("OneLayer", 8, HIDDEN, 1, 1, 1, HIDDEN, 16, (GROUP,), needs=SHAPE.needs, expert_sizes=SIZES)
DUMMY = 1e-3

Divided = Literal["one", "tp", "ep"]
Stored = tuple[Mapping[str, torch.Tensor], torch.Tensor]
"""The tensors with which a checkpoint stores a weight, by their whole names, and the weight that they stand for."""

each_division = pytest.mark.parametrize("divided", ["one", "tp", "ep"])
each_layout = pytest.mark.parametrize("fused", [False, True], ids=["one by one", "fused"])


class LayerOfExperts(nn.Module, ModelArchitecture):
    """Have one layer of experts, and no forward pass. ``info.config`` is the layout of its tensors, or None for tensors
    of their own for each expert."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info, self.experts = info, Experts(SHAPE, mesh)

    def forward(self, batch: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raise an error: the layer is tested alone."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raise an error."""
        raise NotImplementedError

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """Return the targets of the unquantized layer."""
        layout: FusedLayout | None = self.info.config
        router = {"body.router.weight": WeightTarget("experts.router.gate.weight")}
        if layout is None:
            return router | dict(expert_targets(self.experts, "body.experts", "experts"))
        return router | dict(fused_expert_targets(self.experts, "body.experts", "experts", layout))


class QuantizedExpertsSuite(ComponentSuite):
    """Test the layers of experts of a quantization on the CPU. ``QuantizationSuite`` documents the settings."""

    checkpoints: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {}
    tolerance: ClassVar[float] = 1e-5
    optional: ClassVar[tuple[str, ...]] = ()
    loss: ClassVar[float] = 0.05
    fused_layout: ClassVar[FusedLayout] = FusedLayout()
    """The layout of the tensors that hold all experts in the checkpoints of ``store_experts``."""

    def store(self, checkpoint: Mapping[str, Any], module: str, weight: torch.Tensor) -> Stored:
        """See ``QuantizationSuite``."""
        raise NotImplementedError

    def store_experts(self, checkpoint: Mapping[str, Any], name: str, weight: torch.Tensor) -> Stored:
        """Return the tensors with which a checkpoint stores ``weight [experts, out, in]`` of all experts, in the layout
        ``fused_layout``, and the weight that they stand for, ``[experts, out, in]``. The whole name of the unquantized tensor
        is ``name``; the rows of gate of an expert precede those of up. Compute both without the code under test. By
        default the tests are skipped, because the checkpoints have no such tensors."""
        pytest.skip("no checkpoint of this component has tensors of all experts")

    def make(self, checkpoint: Mapping[str, Any] | None, dtype: torch.dtype = torch.float32) -> Quantization:
        """See ``QuantizationSuite``."""
        raise NotImplementedError

    def expert_layers(
        self, case: str, fused: bool = False, divided: Divided = "one", dtype: torch.dtype = torch.float32
    ) -> list[LayerOfExperts]:
        """Return the layers of one rank or of two, with the component's parameters, which are not filled."""
        quantization = self.make(self.checkpoints[case], dtype)
        return [_layer(self._layout(fused), mesh, quantization, dtype) for mesh in _meshes(divided)]

    def write_experts(self, case: str, directory: Path, fused: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
        """Write a checkpoint with random experts, and return the tensors that it stands for, one for each expert."""
        checkpoint, whole = self.checkpoints[case], _random_tensors(seed)
        stored = {name: whole.pop(name) for name in list(whole) if name.startswith("body.")}
        exact = dict(stored)
        layout = self._layout(fused)
        for name in ("gate_up_proj", "down_proj"):
            weight, bias = whole[name], whole[f"{name}_bias"]
            if layout is not None:
                place = f"body.experts.{name}"
                tensors, weight = (
                    ({place: _in_layout(weight, name, layout)}, weight)
                    if checkpoint is None
                    else self.store_experts(checkpoint, place, weight)
                )
                stored |= {**tensors, f"{place}_bias": _in_layout(bias, name, replace(layout, transposed=False))}
                exact |= _one_by_one(name, weight, bias)
                continue
            for own, tensor in _one_by_one(name, weight, bias).items():
                tensors, exact[own] = {own: tensor}, tensor
                if checkpoint is not None and own.endswith(".weight"):
                    tensors, exact[own] = self.store(checkpoint, own.removesuffix(".weight"), tensor)
                stored |= tensors
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / "model.safetensors")
        return exact

    def _layout(self, fused: bool) -> FusedLayout | None:
        return self.fused_layout if fused else None

    def _bound(self, case: str) -> float:
        return self.tolerance if self.checkpoints[case] is not None else self.loss

    @each_layout
    @each_division
    def test_experts_are_those_of_the_weights(self, case: str, divided: Divided, fused: bool, tmp_path: Path) -> None:
        """Layers of experts compute with the weights that the checkpoint stands for, also divided among ranks, and add
        the biases. Weights that were quantized while they were loaded are close to the exact ones."""
        self.require(Feature.QUANTIZATION_EXPERTS)
        exact = _dense(self.write_experts(case, tmp_path, fused), tmp_path)
        models = self.expert_layers(case, fused, divided)
        for model in models:
            load_weights(model, tmp_path)
            assert model.experts.method is not None, "the experts are not quantized"
        for tokens in (1, 9):
            x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
            expected = exact.forward(x)
            layers = [model.experts for model in models]
            found = (
                run_ranks([layer.mesh for layer in layers], lambda layer, x=x: layer.forward(x), layers)
                if len(layers) > 1
                else [layers[0].forward(x)]
            )
            for got in found:
                assert relative_error(got, expected) <= self._bound(case)

    def test_activations_of_experts_may_have_16_bits(self, case: str, tmp_path: Path) -> None:
        """With activations in bfloat16, results are in bfloat16, and those of the weights."""
        self.require(Feature.QUANTIZATION_EXPERTS)
        exact = _dense(self.write_experts(case, tmp_path), tmp_path)
        (model,) = self.expert_layers(case, dtype=torch.bfloat16)
        load_weights(model, tmp_path)
        x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
        routing = model.experts.router.forward(x)
        exact.router.forward = lambda x: routing  # rounded logits may choose otherwise
        got = model.experts.forward(x)
        assert got.dtype == torch.bfloat16
        assert relative_error(got, exact.forward(x.float())) <= 0.02 + self._bound(case)

    @each_division
    def test_every_element_of_experts_is_filled(self, case: str, divided: Divided, tmp_path: Path) -> None:
        """No element of a parameter keeps what was in its memory."""
        self.require(Feature.QUANTIZATION_EXPERTS)
        self.write_experts(case, tmp_path)
        found = []
        for poison in (0, 255):
            models = self.expert_layers(case, divided=divided)
            for parameter in (one for model in models for one in as_module(model).parameters()):
                parameter.view(torch.uint8).fill_(poison)
            for model in models:
                load_weights(model, tmp_path)
            found.append([dict(as_module(model).named_parameters()) for model in models])
        for one, other in zip(*found, strict=True):
            for name, parameter in one.items():
                assert parameter.view(torch.uint8).equal(other[name].view(torch.uint8)), f"{name} is not filled"

    def test_other_experts_give_other_results(self, case: str, tmp_path: Path) -> None:
        """After parameters are filled again, results are those of the new weights."""
        self.require(Feature.QUANTIZATION_EXPERTS)
        (model,) = self.expert_layers(case)
        for seed in (0, 1):
            exact = _dense(self.write_experts(case, tmp_path, seed=seed), tmp_path)
            load_weights(model, tmp_path)
        x = torch.randn(3, HIDDEN)
        assert relative_error(model.experts.forward(x), exact.forward(x)) <= self._bound(case)

    def test_a_missing_tensor_of_an_expert_is_named(self, case: str, tmp_path: Path) -> None:
        """A checkpoint that lacks a tensor is refused by its name."""
        self.require(Feature.QUANTIZATION_EXPERTS)
        self.write_experts(case, tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        needed = [name for name in tensors if not (self.optional and name.endswith(self.optional))]
        for name in [name for name in needed if name.startswith("body.experts.2.up_proj")]:
            save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
            with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
                load_weights(self.expert_layers(case)[0], tmp_path)

    def test_routers_keep_their_weights(self, case: str, tmp_path: Path) -> None:
        """The router of an unquantized checkpoint is not quantized."""
        self.require(Feature.QUANTIZATION_EXPERTS)
        if self.checkpoints[case] is not None:
            pytest.skip("the checkpoint itself decides what is quantized")
        exact, (model,) = self.write_experts(case, tmp_path), self.expert_layers(case)
        load_weights(model, tmp_path)
        assert model.experts.router.gate.method is None
        assert model.experts.router.gate.weight.equal(exact["body.router.weight"])

    def test_dummy_experts_are_small(self, case: str, tmp_path: Path) -> None:
        """Dummy weights of experts are random, finite, and within the limit; the same for one seed."""
        self.require(Feature.QUANTIZATION_EXPERTS)
        found: list[torch.Tensor] = []
        for seed in (3, 3, 4):
            (model,) = self.expert_layers(case)
            load_weights(model, tmp_path, "dummy", seed)
            plain = dequantized(model.experts.weights, torch.float32)
            found.append(torch.cat([plain.gate_up.flatten(), plain.down.flatten()]))
        assert found[0].equal(found[1])
        assert not found[0].equal(found[2])
        assert found[0].abs().max() <= DUMMY * 1.01
        assert found[0].std() > DUMMY / 10


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error (root mean square); infinity for a nan."""
    if not got.numel():
        return 0.0
    error = (got.float() - exact.float()).square().mean().sqrt() / exact.float().square().mean().sqrt()
    return float(error) if error.isfinite() else float("inf")


def _meshes(divided: Divided) -> list[Mesh]:
    """Return the meshes of one rank or of two."""
    return [SINGLE] if divided == "one" else thread_meshes(2, divided)


def _layer(
    layout: FusedLayout | None, mesh: Mesh, quantization: Quantization | None, dtype: torch.dtype = torch.float32
) -> LayerOfExperts:
    model = build_model(LayerOfExperts, replace(INFO, config=layout), CPU, dtype, mesh, quantization)
    assert isinstance(model, LayerOfExperts)
    return model


def _dense(exact: Mapping[str, torch.Tensor], directory: Path) -> Experts:
    """Return the unquantized layer with the weights ``exact``, on one rank."""
    model, folder = _layer(None, SINGLE, None), directory / "dense"
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in exact.items()}, folder / "model.safetensors")
    load_weights(model, folder)
    return model.experts


def _random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return the router's weight and, of all experts, the weights and biases: gate's rows before up's."""
    generator = torch.Generator().manual_seed(seed)
    found = {"body.router.weight": torch.randn(EXPERTS, HIDDEN, generator=generator)}
    for name, rows, columns in (("gate_up_proj", 2 * SIZE, HIDDEN), ("down_proj", HIDDEN, SIZE)):
        scale = torch.rand(EXPERTS, rows, 1, generator=generator) + 0.1  # rows of different magnitudes
        found[name] = torch.randn(EXPERTS, rows, columns, generator=generator) * scale / columns**0.5
        found[f"{name}_bias"] = torch.randn(EXPERTS, rows, generator=generator)
    return found


def _one_by_one(name: str, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of each expert, by their names in a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
    for expert in range(EXPERTS):
        for field, tensor in (("weight", weight), ("bias", bias)):
            parts = tensor[expert].chunk(len(names))
            found |= {f"body.experts.{expert}.{n}.{field}": part for n, part in zip(names, parts, strict=True)}
    return found


def _in_layout(tensor: torch.Tensor, name: str, layout: FusedLayout) -> torch.Tensor:
    """Return weights or biases of all experts as a checkpoint has them."""
    if name == "gate_up_proj":
        pair = list(tensor.chunk(2, 1))
        pair = pair[::-1] if layout.up_first else pair
        tensor = torch.stack(pair, 2).flatten(1, 2) if layout.interleaved else torch.cat(pair, 1)
    return tensor.mT if layout.transposed else tensor
