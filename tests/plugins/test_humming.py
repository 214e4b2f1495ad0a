"""Test what is done for the products of humming-kernels without a GPU: the order of codes, and refusals.

Run: python -m pytest tests/plugins/test_humming.py
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dovetail.engine.build import build_model
from dovetail.errors import ConfigError, ResolutionError
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelInfo, WeightTarget
from dovetail.interfaces.quantization import LinearProduct, LinearShape, QuantizationContext
from dovetail.layers.decoder import linear_targets
from dovetail.layers.linear import Linear
from dovetail.ops.integers import Integers, dequantize, held, quantize
from dovetail.registry import Machine, resolve
from dovetail.registry.resolution import Resolved
from dovetail.registry.setup import setup
from dovetail.testing.quantization import INFO, LayersOfAModel
from dovetail_quantization import humming_products
from dovetail_quantization.config import IntegerConfig
from dovetail_quantization.humming_products import codes_of, fits, scales_of, words_of, zeros_of
from dovetail_quantization.humming_requirements import HUMMING as HUMMING_NAME
from dovetail_quantization.humming_requirements import probe
from dovetail_quantization.integer import Integer, IntegerLinear
from dovetail_quantization.integer_formats import IntegerLayout, Scheme, describe
from integer_checkpoints import awq, gptq

CPU = torch.device("cpu")
HUMMING = IntegerConfig(products="humming")
SETTINGS = {
    "model": {"path": "tiny", "dtype": "bfloat16"},
    "quantization": {"kind": "integer", "products": "humming", "group_size": 32},
}


def test_words_are_what_threads_of_tensor_cores_read() -> None:
    torch.manual_seed(0)
    rows, columns = 128, 160
    numbers = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    words = words_of(held(numbers, 4))
    assert words.shape == (columns // 16, 2 * rows)
    assert words.dtype is torch.int32
    expected = torch.zeros_like(words, dtype=torch.int64)
    for line in range(columns // 16):
        for block in range(rows // 64):
            for thread in range(32):
                for tile in range(4):
                    row, column = 64 * block + 16 * tile + thread // 4, 16 * line + 2 * (thread % 4)
                    read = [(row + low, column + high) for high in (0, 1) for low in (0, 8)]
                    order = [(r, c + far) for r, c in read for far in (0, 8)]
                    word = sum(int(numbers[place]) << 4 * at for at, place in enumerate(order))
                    expected[line, 128 * block + 4 * thread + tile] = word
    assert (words.long() & 0xFFFFFFFF).equal(expected)


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (4224, 96), (128, 256)])
def test_codes_come_back(rows: int, columns: int) -> None:
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert codes_of(words_of(codes)).equal(codes)


def test_scales_and_zero_points_are_in_the_order_of_threads() -> None:
    scales = torch.arange(2 * 128.0).view(2, 128)
    placed = scales_of(scales)
    assert placed[0, :16].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1, 9, 17, 25, 33, 41, 49, 57]
    assert placed[1, 64:72].tolist() == [192, 200, 208, 216, 224, 232, 240, 248]
    zeros = torch.randint(0, 16, (2, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = zeros_of(zeros).view(torch.uint8)
    assert packed.shape == (2, 64)
    assert (packed & 15).equal(scales_of(zeros)[:, ::2])
    assert (packed >> 4).equal(scales_of(zeros)[:, 1::2])


class Recorded(LinearProduct):
    """Stand for a product on a GPU."""

    def __init__(self, words: torch.Tensor, scales: torch.Tensor, zeros: Any, order: Any, dtype: torch.dtype) -> None:
        self.words, self.weight, self.order = words, Integers(codes_of(words), scales, zeros), order

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        raise NotImplementedError

    @property
    def describe(self) -> str:
        return "recorded"


def linear(group: int = 32, rows: int = 128, *, ordered: bool = False) -> tuple[IntegerLinear, dict[str, torch.Tensor]]:
    layout = IntegerLayout.GPTQ if ordered else IntegerLayout.ONLINE
    scheme = Scheme(layout, 4, group, indexed=ordered, ordered=ordered)
    context = QuantizationContext(None, torch.bfloat16, CPU)
    method = IntegerLinear(LinearShape(("m",), (rows,), 128), scheme, context, humming=True)
    own = {name: torch.empty(*shape, dtype=dtype) for name, (shape, dtype) in method.parameters().items()}
    method.fill_dummy(own, 0.5, torch.Generator().manual_seed(0))
    own["scale"].copy_(torch.rand(own["scale"].shape))
    return method, own


def test_codes_take_the_place_of_those_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming_products, "HummingProduct", Recorded)
    method, parameters = linear()
    before = parameters["weight"].clone()
    for _ in range(2):
        product = method.prepare(parameters)
        assert isinstance(product, Recorded)
        assert product.words.data_ptr() == parameters["weight"].data_ptr()
        assert product.weight.codes.equal(before)
        assert method.dequantized(parameters).equal(
            dequantize(Integers(before, parameters["scale"].mT.contiguous()), torch.bfloat16)
        )
    method.fill_dummy(parameters, 0.5, torch.Generator().manual_seed(1))
    after = parameters["weight"].clone()
    assert not after.equal(before)
    product = method.prepare(parameters)
    assert isinstance(product, Recorded)
    assert product.weight.codes.equal(after)


def test_columns_are_sorted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming_products, "HummingProduct", Recorded)
    method, parameters = linear(ordered=True)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0)).int()
    groups = torch.empty(128, dtype=torch.int32)
    groups[order.long()] = torch.arange(128, dtype=torch.int32) // 32
    parameters["order"][0], parameters["group_of"][0] = order, groups
    plain = linear(ordered=True)
    method_without = plain[0]
    method_without.humming = False
    expected = method_without.dequantized({name: one.clone() for name, one in parameters.items()})
    for _ in range(2):
        product = method.prepare(parameters)
        assert isinstance(product, Recorded)
        assert product.order is not None
        assert product.order.equal(order)
        assert method.dequantized(parameters).equal(expected)


@pytest.mark.parametrize(("rows", "group"), [(96, 32), (128, 64), (128, 128)])
def test_sizes(rows: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humming_products, "HummingProduct", Recorded)
    method, parameters = linear(group, rows)
    assert isinstance(method.prepare(parameters), Recorded) == (rows == 128)


def test_other_weights_do_not_fit() -> None:
    weight = torch.randn(256, 256)
    assert fits(quantize(weight, 4, 128))
    assert not fits(quantize(weight, 8, 128))
    assert not fits(quantize(weight, 4, 256))
    assert not fits(quantize(weight[:192], 4, 128))


def test_it_is_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(IntegerConfig()) is None

    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "pip install 'dovetail[humming]'" in str(probe(HUMMING))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.1.19")
    assert "humming-kernels 0.1.19 is installed; implemented for ==0.1.20" in str(probe(HUMMING))


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a package ``humming`` before the installed one, whose module of kernels is ``text``."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "humming"]:
        monkeypatch.delitem(sys.modules, name)
    for module in ("__init__", "kernel/__init__", "schema", "transform", "tune"):
        (folder / "humming" / module).parent.mkdir(parents=True, exist_ok=True)
        (folder / "humming" / f"{module}.py").write_text("")
    (folder / "humming/kernel/humming.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.20" if name == HUMMING_NAME else version(name))


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Forget the modules of ``installed``."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "humming"]:
        del sys.modules[name]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("fault", ["import cuda_that_is_not_there", "raise OSError('libcudart.so.12: not found')"])
def test_a_broken_installation_is_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, fault)
    found = str(probe(HUMMING))
    assert "the installed humming-kernels is broken" in found
    assert "cuda_that_is_not_there" in found or "OSError: libcudart.so.12: not found" in found
    assert "pip install --force-reinstall 'humming-kernels==0.1.20'" in found
    config, registry = setup(arguments=SETTINGS)
    with pytest.raises(ResolutionError, match="the installed humming-kernels is broken"):
        resolve(config, registry, Machine("cuda", (9, 0), "H100", "cuda:0"))
    with pytest.raises(ConfigError, match="the installed humming-kernels is broken"):
        humming_products.kernels_of(128, 128, 128, False, torch.bfloat16, CPU)


@pytest.mark.usefixtures("forgotten")
def test_an_installation_that_can_be_imported_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, "")
    assert probe(HUMMING) is None


@pytest.mark.parametrize(
    ("machine", "more", "reason"),
    [
        ("cpu", {}, "and device is cpu; allowed: CUDA of compute capability 8.0 or more"),
        ("sm75", {}, "and sm75 has 7.5; allowed: CUDA of compute capability 8.0 or more"),
        ("sm90", {"batch_invariant": True}, "whose results are not batch invariant, and batch_invariant is true"),
        (
            "sm90",
            {"model": {"path": "tiny", "dtype": "float32"}},
            "and model.dtype is float32; allowed: bfloat16, float16",
        ),
    ],
)
def test_it_is_refused_when_components_are_chosen(machine: str, more: dict[str, Any], reason: str) -> None:
    """Also for machines that are assumed, on which nothing is probed."""
    config, registry = setup(arguments={**SETTINGS, **more})
    with pytest.raises(ResolutionError) as caught:
        resolve(config, registry, Machine.assume(machine))
    assert "quantization 'integer'" in str(caught.value)
    assert "quantization.products is humming" in str(caught.value)
    assert reason in str(caught.value)
    assert "Set quantization.products to triton" in str(caught.value)
    config, registry = setup(arguments={**SETTINGS, **more, "quantization": {"kind": "integer", "group_size": 32}})
    assert chosen(resolve(config, registry, Machine.assume(machine))) == "integer"


@pytest.mark.parametrize("machine", ["sm80", "sm90", "sm100"])
def test_it_is_chosen_where_it_has_products(machine: str) -> None:
    config, registry = setup(arguments=SETTINGS)
    assert chosen(resolve(config, registry, Machine.assume(machine))) == "integer"


def chosen(resolved: Resolved) -> str | None:
    return next(one.chosen for one in resolved.resolutions if one.slot == "quantization")


def test_it_is_refused_for_other_formats() -> None:
    assert describe(awq().config, HUMMING) is None
    assert "multiplies 4 bits with scales for each 32, 64 or 128 columns" in str(
        describe(gptq(8, symmetric=True).config, HUMMING)
    )
    assert describe(None, HUMMING) is None
    assert "linear layers are stored as online of 4 bits with scales for each 256 columns" in str(
        describe(None, IntegerConfig(products="humming", group_size=256))
    )


class Layers(LayersOfAModel):
    """Have layers of given sizes ``[out, in]``, and a head, which is not quantized."""

    sizes: ClassVar[dict[str, tuple[int, int]]] = {}

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        torch.nn.Module.__init__(self)
        self.info = info
        self.names = list(self.sizes)
        for name, (rows, columns) in self.sizes.items():
            setattr(self, name, Linear(columns, rows))
        self.head = Linear(128, 96)
        self.head.precise = True

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """See ``Model``."""
        found = {
            k: v
            for name in self.names
            for k, v in dict(linear_targets(getattr(self, name), f"body.{name}", name)).items()
        }
        return {**found, **dict(linear_targets(self.head, "lm_head", "head"))}


def built(monkeypatch: pytest.MonkeyPatch, section: IntegerConfig, **sizes: tuple[int, int]) -> Any:
    monkeypatch.setattr(Layers, "sizes", sizes)
    context = QuantizationContext(None, torch.bfloat16, CPU)
    return build_model(Layers, INFO, CPU, torch.bfloat16, SINGLE, Integer(section, context))


def test_a_model_without_a_weight_that_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        built(monkeypatch, HUMMING, first=(96, 128), third=(192, 128))
    assert "quantization.products is humming" in str(caught.value)
    assert "the first one is body.first, 96 x 128 on this rank, stored as online of 4 bits" in str(caught.value)
    assert "multiples of 128 rows and columns on a rank, 4 bits with scales for each 32, 64 or 128 columns" in str(
        caught.value
    )
    assert built(monkeypatch, IntegerConfig(), first=(96, 128), third=(192, 128)) is not None


def test_layers_that_do_not_fit_are_counted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dovetail.quantization")
    monkeypatch.setattr(humming_products, "HummingProduct", Recorded)
    model = built(monkeypatch, HUMMING, first=(96, 128), second=(128, 256), third=(256, 128))
    assert [record.getMessage() for record in caplog.records] == [
        "quantization.products is humming: 2 linear layers have the products of humming-kernels, and 1 those of triton"
    ]
    for name, with_humming in {"first": False, "second": True, "third": True}.items():
        layer = getattr(model, name)
        layer.method.fill_dummy(dict(layer.named_parameters()), 0.5, torch.Generator().manual_seed(0))
        layer.prepare()
        assert isinstance(layer.product, Recorded) == with_humming


def test_a_weight_whose_columns_ranks_divide_in_any_order_does_not_fit() -> None:
    """What a rank holds of its groups is known only when the weight is read."""
    scheme = Scheme(IntegerLayout.GPTQ, 4, 128, indexed=True, ordered=True)
    context = QuantizationContext(None, torch.bfloat16, CPU)
    for whole, fitting in ((256, False), (None, True)):
        shape = LinearShape(("m",), (128,), 128, whole_inputs=whole)
        assert IntegerLinear(shape, scheme, context, humming=True).humming == fitting


def test_groups_of_different_numbers_of_columns_are_refused() -> None:
    method, parameters = linear(ordered=True)
    parameters["order"][0] = torch.arange(128, dtype=torch.int32)
    parameters["group_of"][0] = torch.tensor([0] * 33 + [1] * 31 + [2] * 32 + [3] * 32, dtype=torch.int32)
    with pytest.raises(ConfigError, match="m lists groups with different numbers of columns"):
        method.prepare(parameters)
