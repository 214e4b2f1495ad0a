"""Test quantizations of weights: the conformance suite of their interface.

class TestMine(QuantizationSuite):
    name = "mine"
    checkpoints = {"while loading": None, "by row": {"quant_method": "mine", ...}}

    def store(self, checkpoint, module, weight):      # for the checkpoints that are not None
        return {f"{module}.weight": ..., f"{module}.weight_scale": ...}, what_they_stand_for
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dovetail.engine.build import as_module, build_model
from dovetail.engine.weights import load_weights
from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget, WeightTransform
from dovetail.interfaces.quantization import (
    ActivationQuantizer,
    Quantization,
    QuantizationContext,
    QuantizedActivations,
)
from dovetail.layers.decoder import linear_targets
from dovetail.layers.linear import ColumnLinear, Linear, row_linear
from dovetail.layers.transforms import SplitHalves
from dovetail.ops.activation import GATES
from dovetail.ops.norm import add_parts_rms_norm, rms_norm
from dovetail.ops.parts import Parts
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.quantized_experts import QuantizedExpertsSuite, relative_error
from dovetail.testing.ranks import thread_meshes

CPU = torch.device("cpu")
INFO = ModelInfo("Layers", 8, 8, 1, 1, 1, 8, 8, (CacheGroup(1, 1, 8),))
HIDDEN, WIDE = 128, 256
PARTS = {"q": 128, "k": 64, "v": 64}
DUMMY = 1e-3

each_size = pytest.mark.parametrize("size", [1, 2])


class LayersOfAModel(nn.Module, ModelArchitecture):
    """Have the linear layers of a decoder, and no forward pass."""

    transforms: ClassVar[Mapping[str, WeightTransform]] = {}

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info = info
        self.qkv = ColumnLinear(HIDDEN, PARTS, mesh, bias=True, unit=32, transforms=self.transforms)
        self.gate_up = ColumnLinear(HIDDEN, {"gate": WIDE, "up": WIDE}, mesh)
        self.down = row_linear(WIDE, HIDDEN, mesh, bias=True)
        self.head = Linear(HIDDEN, 96)
        self.head.precise = True

    def forward(self, batch: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raise an error: the layers are tested one by one."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raise an error."""
        raise NotImplementedError

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """Return the targets of the unquantized layers."""
        found: dict[str, WeightTarget | list[WeightTarget]] = {}
        for name, parts in {"qkv": PARTS, "gate_up": ("gate", "up")}.items():
            for part in parts:
                found |= linear_targets(getattr(self, name), f"body.{part}_proj", name, part)
        found |= linear_targets(self.down, "body.down_proj", "down")
        return {**found, **dict(linear_targets(self.head, "lm_head", "head"))}


class RotatingOtherwise(LayersOfAModel):
    """Have queries and keys whose rows are in another order in the checkpoint."""

    transforms: ClassVar = dict.fromkeys("qk", SplitHalves(32, 16))


class QuantizationSuite(QuantizedExpertsSuite):
    """Test a quantization of weights on the CPU. ``name`` and ``checkpoints`` are required."""

    kind: ClassVar[ComponentKind] = ComponentKind.QUANTIZATION
    checkpoints: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {}
    """The ``quantization_config`` of checkpoints, by a name for the report. With None, an unquantized checkpoint is
    quantized while it is loaded. The suite stores the head, ``lm_head``, and the router of experts,
    ``body.router``, unquantized: a config that would quantize them must leave them out."""
    tolerance: ClassVar[float] = 1e-5
    """Products in float32 may differ from those with the weights that the checkpoint stands for by this much, relative to
    their root mean square."""
    optional: ClassVar[tuple[str, ...]] = ()
    """The ends of names of tensors that checkpoints may lack."""
    loss: ClassVar[float] = 0.05
    """Products with weights that were quantized while they were loaded may differ from the exact ones by this much,
    relative to their root mean square: about 0.01 for 8 bits, 0.1 for 4 bits."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run the tests that take a ``case`` once per checkpoint."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", list(self.checkpoints))

    def store(
        self, checkpoint: Mapping[str, Any], module: str, weight: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Return the tensors with which a checkpoint stores ``weight [out, in]`` of a module, by their whole names, and
        the weight that they stand for. Override it for the checkpoints that are not None; compute both without the code
        under test."""
        raise NotImplementedError(f"{type(self).__name__}.store must write checkpoints like {checkpoint}")

    def make(self, checkpoint: Mapping[str, Any] | None, dtype: torch.dtype = torch.float32) -> Quantization:
        """Return the component for a checkpoint, with activations of ``dtype``."""
        return self.build(QuantizationContext(checkpoint, dtype, CPU))

    def make_invariant(
        self, checkpoint: Mapping[str, Any] | None, dtype: torch.dtype, device: torch.device
    ) -> Quantization:
        """Return the component for a checkpoint, with products in which rows do not depend on each other."""
        return self.build(QuantizationContext(checkpoint, dtype, device, batch_invariant=True))

    def model(
        self,
        case: str,
        mesh: Mesh = SINGLE,
        dtype: torch.dtype = torch.float32,
        layers: type[LayersOfAModel] = LayersOfAModel,
    ) -> ModelArchitecture:
        """Return layers with the component's parameters, which are not filled."""
        return build_model(layers, INFO, CPU, dtype, mesh, self.make(self.checkpoints[case], dtype))

    def write(self, case: str, directory: Path, seed: int = 0) -> dict[str, torch.Tensor]:
        """Write a checkpoint with random weights, and return the unquantized tensors that it stands for."""
        checkpoint, stored, exact = self.checkpoints[case], dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, tensor in _random_tensors(seed).items():
            stored[name] = exact[name] = tensor
            if checkpoint is not None and name.endswith("_proj.weight"):
                del stored[name]
                tensors, exact[name] = self.store(checkpoint, name.removesuffix(".weight"), tensor)
                stored |= tensors
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / "model.safetensors")
        return exact

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Use one thread, because small products are computed faster by one thread than by several."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    def test_it_states_what_it_can_load(self, case: str) -> None:
        """``describe`` accepts the checkpoints of the suite, and gives a reason against another one."""
        assert self.spec.describe is not None
        describe = load_attribute(self.spec.describe, self.component.label)
        assert describe(self.checkpoints[case], self.config()) is None
        reason = describe({"quant_method": "no method of this name"}, self.config())
        assert isinstance(reason, str), "a checkpoint of another method is not refused"
        assert reason

    @each_size
    def test_products_are_those_of_the_weights(self, case: str, size: int, tmp_path: Path) -> None:
        """Products, with biases, are those of the weights that the checkpoint stands for, for any number of rows and
        divided among ranks. Weights that are quantized while they are loaded are close to the exact ones."""
        exact = self.write(case, tmp_path)
        for mesh in thread_meshes(size) if size > 1 else [SINGLE]:
            model, dense = self.model(case, mesh), _dense(exact, tmp_path, mesh)
            load_weights(model, tmp_path)
            quantized = 0
            for name, layer in _layers(model).items():
                expected = _layers(dense)[name]
                x = torch.randn(7, layer.in_features, generator=torch.Generator().manual_seed(1))
                for rows in (x, x[:1].contiguous(), x[:0]):
                    before = rows.clone()
                    got = layer.product.forward(rows, layer.bias)
                    assert rows.equal(before), "the input was changed"
                    assert got.shape == (len(rows), layer.out_features)
                    bound = self.tolerance if self.checkpoints[case] is not None else self.loss
                    assert relative_error(got, expected.product.forward(rows, expected.bias)) <= bound, name
                quantized += layer.method is not None
            assert quantized, "no layer is quantized"

    @each_size
    def test_weights_can_be_converted_back(self, case: str, size: int, tmp_path: Path) -> None:
        """``dequantized`` returns the weights with which the products multiply, in the dtype of activations. A method that
        does not implement it is refused for latent attention."""
        exact = self.write(case, tmp_path)
        for mesh in thread_meshes(size) if size > 1 else [SINGLE]:
            for dtype in (torch.float32, torch.bfloat16):
                model = self.model(case, mesh, dtype)
                load_weights(model, tmp_path)
                dense = _layers(_dense(exact, tmp_path, mesh))
                for name, layer in _layers(model).items():
                    try:
                        weight = layer.dense_weight()
                    except ConfigError as error:
                        pytest.skip(f"refused: {error}")
                    assert weight.dtype is dtype
                    bound = self.tolerance if self.checkpoints[case] is not None else self.loss
                    bound += 2**-8 * (dtype is torch.bfloat16)
                    assert relative_error(weight.float(), dense[name].weight) <= bound, name

    @each_size
    def test_transformed_weights_are_those_of_the_model(self, case: str, size: int, tmp_path: Path) -> None:
        """If the model reads a weight in another order, products are those of the weight in that order. A checkpoint whose
        format cannot be read so may be refused."""
        exact = self.write(case, tmp_path)
        for mesh in thread_meshes(size) if size > 1 else [SINGLE]:
            model = self.model(case, mesh, layers=RotatingOtherwise)
            try:
                load_weights(model, tmp_path)
            except ConfigError as error:
                if self.checkpoints[case] is None:
                    raise AssertionError(f"an unquantized checkpoint is refused: {error}") from error
                pytest.skip(f"refused: {error}")
            got = _layers(model)["qkv"]
            expected = _layers(_dense(exact, tmp_path, mesh, RotatingOtherwise))["qkv"]
            x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
            bound = self.tolerance if self.checkpoints[case] is not None else self.loss
            assert relative_error(got.product.forward(x, None), expected.product.forward(x, None)) <= bound

    def test_activations_may_have_16_bits(self, case: str, tmp_path: Path) -> None:
        """With activations in bfloat16, products are in bfloat16, and those of the weights."""
        exact = self.write(case, tmp_path)
        model = self.model(case, dtype=torch.bfloat16)
        load_weights(model, tmp_path)
        dense = _layers(_dense(exact, tmp_path))
        for name, layer in _layers(model).items():
            x = torch.randn(7, layer.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
            got = layer.product.forward(x, layer.bias)
            assert got.dtype == torch.bfloat16
            expected = dense[name].product.forward(x.float(), dense[name].bias)
            bound = 0.02 + (self.tolerance if self.checkpoints[case] is not None else self.loss)
            assert relative_error(got, expected) <= bound, name

    def test_gates_and_parts_are_those_of_the_product(self, case: str, tmp_path: Path) -> None:
        """``gated`` is the activation of ``forward``, and ``parts`` add up to it."""
        self.write(case, tmp_path)
        model = self.model(case)
        load_weights(model, tmp_path)
        layers = _layers(model)
        x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
        product = layers["gate_up"].product
        for activation, gate in GATES.items():
            got, expected = product.gated(x, None, activation), gate(product.forward(x, None))
            assert relative_error(got, expected) <= self.tolerance, activation
        parts = product.parts(x)
        assert parts is None or product.in_parts, "parts are returned, and in_parts is False"
        if parts is not None:
            assert parts.dtype == torch.float32
            assert relative_error(parts.sum(0), product.forward(x, None)) <= self.tolerance

    def test_inputs_may_be_quantized_before(self, case: str, tmp_path: Path) -> None:
        """Products compute the same of inputs that their ``quantizer`` quantized, alone or with a norm or gate, as of
        tensors. A product without one is not tested."""
        self.write(case, tmp_path)
        model = self.model(case)
        load_weights(model, tmp_path)
        for name, layer in _layers(model).items():
            quantizer = layer.product.quantizer
            if quantizer is not None:
                for what, got, plain in _quantized_inputs(quantizer, layer.in_features):
                    assert isinstance(got, QuantizedActivations), f"{what} returned {type(got).__name__}"
                    assert (got.shape, got.dtype) == (plain.shape, plain.dtype), what
                    expected = layer.product.forward(plain, layer.bias)
                    found = layer.product.forward(cast("torch.Tensor", got), layer.bias)
                    assert relative_error(found, expected) <= 0.01, f"{what} before {name}"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @torch.inference_mode()
    def test_batch_invariance(self, case: str, dtype: torch.dtype, tmp_path: Path) -> None:
        """With ``batch_invariant``, the bits of a row do not depend on the other rows of a step: in products, gates and parts,
        and whether there are parts does not either. Tested on CUDA if there is a device."""
        self.require(Feature.QUANTIZATION_BATCH_INVARIANT)
        self.write(case, tmp_path)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        made = self.make_invariant(self.checkpoints[case], dtype, device)
        model = build_model(LayersOfAModel, INFO, device, dtype, SINGLE, made)
        load_weights(model, tmp_path)
        quantized = {name: layer for name, layer in _layers(model).items() if layer.method is not None}
        for name, layer in quantized.items():
            x = torch.randn(150, layer.in_features, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            whole = _outputs(layer, x)
            for start, stop in ((0, 1), (149, 150), (7, 9), (3, 20), (50, 114)):
                for got, expected in zip(_outputs(layer, x[start:stop]), whole, strict=True):
                    assert (got is None) == (expected is None), f"{name}: only some steps have parts"
                    if got is not None and expected is not None:
                        assert got.equal(expected[..., start:stop, :]), (
                            f"{name}: rows {start} to {stop} have other bits alone"
                        )

    @each_size
    def test_every_element_is_filled(self, case: str, size: int, tmp_path: Path) -> None:
        """No element of a parameter keeps what was in its memory."""
        self.write(case, tmp_path)
        for mesh in thread_meshes(size) if size > 1 else [SINGLE]:
            found = []
            for poison in (0, 255):
                model = self.model(case, mesh)
                for parameter in as_module(model).parameters():
                    parameter.view(torch.uint8).fill_(poison)
                load_weights(model, tmp_path)
                found.append({name: p.view(torch.uint8) for name, p in as_module(model).named_parameters()})
            for name, parameter in found[0].items():
                assert parameter.equal(found[1][name]), f"{name} is not filled"

    def test_other_weights_give_other_products(self, case: str, tmp_path: Path) -> None:
        """After parameters are filled again, products are those of the new weights."""
        model = self.model(case)
        for seed in (0, 1):
            exact = self.write(case, tmp_path, seed)
            load_weights(model, tmp_path)
        layer, expected = _layers(model)["down"], _layers(_dense(exact, tmp_path))["down"]
        x = torch.randn(3, WIDE)
        bound = self.tolerance if self.checkpoints[case] is not None else self.loss
        assert relative_error(layer.forward(x), expected.forward(x)) <= bound

    def test_a_missing_tensor_is_named(self, case: str, tmp_path: Path) -> None:
        """A checkpoint that lacks a tensor is refused by its name."""
        self.write(case, tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        needed = [name for name in tensors if not (self.optional and name.endswith(self.optional))]
        for name in [name for name in needed if name.startswith("body.k_proj")]:
            save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
            with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
                load_weights(self.model(case), tmp_path)

    def test_precise_layers_keep_their_weights(self, case: str, tmp_path: Path) -> None:
        """The head of an unquantized checkpoint is not quantized."""
        if self.checkpoints[case] is not None:
            pytest.skip("the checkpoint itself decides what is quantized")
        exact, model = self.write(case, tmp_path), self.model(case)
        load_weights(model, tmp_path)
        head = _layers(model)["head"]
        assert head.method is None
        assert head.weight.equal(exact["lm_head.weight"])

    def test_dummy_weights_are_small(self, case: str, tmp_path: Path) -> None:
        """Dummy weights are random, finite, and within the limit; the same for one seed."""
        found = []
        for seed in (3, 3, 4):
            model = self.model(case)
            load_weights(model, tmp_path, "dummy", seed)
            layer = _layers(model)["gate_up"]
            found.append(layer.product.forward(torch.eye(HIDDEN), None))
        assert found[0].equal(found[1])
        assert not found[0].equal(found[2])
        assert found[0].abs().max() <= DUMMY * 1.01
        assert found[0].std() > DUMMY / 10


def _random_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = {"q": 128, "k": 64, "v": 64, "gate": WIDE, "up": WIDE, "down": HIDDEN}
    tensors: dict[str, torch.Tensor] = {}
    for name, count in rows.items():
        scale = torch.rand(count, 1, generator=generator) + 0.1  # rows of different magnitudes
        columns = WIDE if name == "down" else HIDDEN
        tensors[f"body.{name}_proj.weight"] = torch.randn(count, columns, generator=generator) * scale
        if name in (*PARTS, "down"):
            tensors[f"body.{name}_proj.bias"] = torch.randn(count, generator=generator)
    return {**tensors, "lm_head.weight": torch.randn(96, HIDDEN, generator=generator)}


def _dense(
    exact: Mapping[str, torch.Tensor],
    directory: Path,
    mesh: Mesh = SINGLE,
    layers: type[LayersOfAModel] = LayersOfAModel,
) -> ModelArchitecture:
    model, folder = build_model(layers, INFO, CPU, torch.float32, mesh), directory / "dense"
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in exact.items()}, folder / "model.safetensors")
    load_weights(model, folder)
    return model


def _outputs(layer: Linear, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return what a layer's product computes of rows that enter as norms and gates give them to it."""
    product = layer.product
    quantizer = product.quantizer
    entering = x if quantizer is None or len(x) <= quantizer.few_rows else quantizer.quantize(x)
    gated = (
        [product.gated(entering, layer.bias, activation) for activation in GATES] if layer.out_features % 2 == 0 else []
    )
    return [product.forward(entering, layer.bias), *gated, product.parts(entering)]


def _quantized_inputs(
    quantizer: ActivationQuantizer, size: int
) -> Iterator[tuple[str, QuantizedActivations, torch.Tensor]]:
    """Yield what each method of ``quantizer`` returns, and the tensor for which it stands."""
    rows, eps, generator = quantizer.few_rows + 3, 1e-5, torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, rows, size, generator=generator)
    weight, parts = torch.randn(size, generator=generator), torch.randn(3, rows, size, generator=generator)
    yield "quantize", quantizer.quantize(x), x
    yield "rms_norm", quantizer.rms_norm(x, weight, eps), rms_norm(x, weight, eps)
    total = x.clone()
    got = quantizer.add_rms_norm(total, residual, weight, eps)
    assert total.equal(x + residual), "add_rms_norm did not overwrite its input with the sum"
    yield "add_rms_norm", got, rms_norm(total, weight, eps)
    got, total = quantizer.add_parts_rms_norm(parts, residual, weight, eps)
    expected, expected_total = add_parts_rms_norm(Parts(parts), residual, weight, eps)
    assert total.equal(expected_total), "add_parts_rms_norm returned another sum"
    yield "add_parts_rms_norm", got, expected
    gate_up = torch.randn(rows, 2 * size, generator=generator)
    for activation, gate in GATES.items():
        yield f"gate {activation}", quantizer.gate(gate_up, activation), gate(gate_up)


def _layers(model: ModelArchitecture) -> dict[str, Linear]:
    return {name: layer for name, layer in as_module(model).named_modules() if isinstance(layer, Linear)}
