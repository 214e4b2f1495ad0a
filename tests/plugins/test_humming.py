"""Test what is done for the products of humming-kernels without a GPU: the order of codes, and refusals.

Run: python -m pytest tests/plugins/test_humming.py
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch

from dovetail.config import Config
from dovetail.errors import ConfigError
from dovetail.interfaces.quantization import LinearProduct, LinearShape, QuantizationContext
from dovetail.ops.integers import Integers, dequantize, held, quantize
from dovetail_quantization import humming_products
from dovetail_quantization.config import IntegerConfig
from dovetail_quantization.humming_products import codes_of, fits, scales_of, words_of, zeros_of
from dovetail_quantization.integer import Integer, IntegerLinear
from dovetail_quantization.integer_formats import IntegerLayout, Scheme, describe, probe
from integer_checkpoints import awq, gptq

CPU = torch.device("cpu")
HUMMING = IntegerConfig(products="humming")


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
    method_without._humming = False
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
    assert probe(IntegerConfig(), Config()) is None

    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "pip install 'dovetail[humming]'" in str(probe(HUMMING, Config()))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.1.19")
    assert "humming-kernels 0.1.19 is installed; implemented for ==0.1.20" in str(probe(HUMMING, Config()))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.1.20")
    assert probe(HUMMING, Config()) is None
    assert "not batch invariant" in str(probe(HUMMING, Config(batch_invariant=True)))


def test_it_is_refused_where_it_has_no_products() -> None:
    with pytest.raises(ConfigError, match="the device is cpu; allowed: CUDA"):
        Integer(HUMMING, QuantizationContext(awq().config, torch.bfloat16, CPU))
    assert describe(awq().config, HUMMING) is None
    assert "multiplies 4 bits with scales for each 32, 64 or 128 columns" in str(
        describe(gptq(8, symmetric=True).config, HUMMING)
    )
    assert describe(None, HUMMING) is None
    assert "linear layers are stored as online of 4 bits with scales for each 256 columns" in str(
        describe(None, IntegerConfig(products="humming", group_size=256))
    )
