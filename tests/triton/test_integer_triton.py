"""Test the kernels of integer weights, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_integer_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.activation import GATES
from dovetail.ops.integers import Integers, dequantize
from dovetail_quantization import coded_product
from dovetail_quantization.integer_products import Int8Product, IntegerProduct
from dovetail_quantization.triton import integer_one_row
from dovetail_quantization.triton.integer_bytes import BytesTile
from dovetail_quantization.triton.integer_many import FEWEST_MANY, MOST_MANY, MOST_MANY_GROUPS, ManyTile, many_tile
from dovetail_quantization.triton.integer_rows import (
    MOST_ROWS,
    IntegerTile,
    column_tile,
    integer_rows,
    narrowed,
    plain_weight,
    with_words,
)

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}


def random_weight(n: int, k: int, bits: int, group: int, *, zeros: bool) -> Integers:
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8)
    scales = (torch.rand(k // group, n) + 0.1) / (1 << bits) / 16
    own = torch.randint(0, 1 << bits, (k // group, n), dtype=torch.uint8) if zeros else None
    return Integers(codes.view(torch.int8) if bits == 8 else codes, scales, own)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def sweep(*cases: object) -> list[object]:
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full) for case in cases]


each_dtype = pytest.mark.parametrize("dtype", [torch.float16, *sweep(torch.float32)])


@each_dtype
@pytest.mark.parametrize(
    ("m", "n", "k", "group"),
    [
        (3, 70, 128, 64),
        (1, 70, 384, 128),
        (1, 40, 4096, 256),
        *sweep((1, 64, 64, 32), (17, 128, 256, 256), (64, 64, 96, 96), (5, 130, 512, 128)),
    ],
)
@pytest.mark.parametrize(("bits", "zeros"), [(4, True), (8, False), *sweep((4, False), (8, True))])
def test_products_of_few_rows_are_those_of_the_numbers(
    m: int, n: int, k: int, group: int, bits: int, zeros: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = random_weight(n, k, bits, group, zeros=zeros)
    x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
    rows = integer_rows(with_words(weight))
    assert rows is not None
    exact = x.double() @ dequantize(weight, torch.float64).T
    bound = TOLERANCES[dtype] * float(exact.square().mean().sqrt())
    assert (rows.forward(x, None).double() - exact).abs().max() <= 4 * bound
    assert (rows.forward(x, bias).double() - exact - bias.double()).abs().max() <= 4 * bound
    parts = rows.parts(x)
    tile = rows.tile(x)
    assert tile is not None
    if rows.one_row is None or m > 1 or dtype is torch.float32:
        assert (parts is None) == (tile.split == 1)
    else:
        assert (parts is None) == (k % 2048 > 0)
    if parts is not None:
        assert (parts.double().sum(0) - exact).abs().max() <= 4 * bound
    gated = GATES["silu"](exact + bias.double())
    error = (rows.gated(x, bias, "silu").double() - gated).abs().max()
    assert error <= 4 * TOLERANCES[dtype] * float(gated.square().mean().sqrt()) + 4 * bound


@each_dtype
@pytest.mark.parametrize(("group", "zeros"), [(64, True), *sweep((32, True), (128, False), (256, True))])
@pytest.mark.parametrize("split", [2, *sweep(1)])
def test_rows_of_the_weight_may_be_the_columns_of_the_product(
    group: int, zeros: bool, split: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = random_weight(70, 512, 4, group, zeros=zeros)
    x, bias = torch.randn(10, 512).to(dtype), torch.randn(70).to(dtype)
    rows = integer_rows(with_words(weight))
    assert rows is not None
    rows.tiles[10] = IntegerTile(16, 64, 256, 4, 3, split, columns=True, ahead=4)
    rows.byte_tiles[10] = None
    exact = x.double() @ dequantize(weight, torch.float64).T
    bound = 4 * TOLERANCES[dtype] * float(exact.square().mean().sqrt())
    assert (rows.forward(x, bias).double() - exact - bias.double()).abs().max() <= bound
    parts = rows.parts(x)
    assert (parts is None) == (split == 1)
    assert parts is None or (parts.double().sum(0) - exact).abs().max() <= bound
    gated = GATES["silu"](exact)
    assert (rows.gated(x, None, "silu").double() - gated).abs().max() <= 2 * bound


@pytest.mark.parametrize(
    ("m", "k", "group", "split"), [(17, 256, 128, 2), *sweep((32, 768, 384, 3), (20, 512, 256, 1))]
)
def test_rows_are_multiplied_in_bytes(m: int, k: int, group: int, split: int) -> None:
    torch.manual_seed(0)
    weight = random_weight(70, k, 4, group, zeros=False)
    x, bias = torch.randn(m, k).half() + 1, torch.randn(70).half()
    x[:, 5] *= 100
    x[0] = 0
    rows = integer_rows(with_words(weight))
    assert rows is not None
    rows.byte_tiles[m] = BytesTile(64, 128, 2, 3, split, 4)
    exact = x.double() @ dequantize(weight, torch.float64).T
    got = rows.forward(x, bias)
    assert not got[0].sub(bias).any()
    torch.testing.assert_close(got.double(), exact + bias.double(), rtol=2e-3, atol=2e-2)
    parts = rows.parts(x)
    assert (parts is None) == (split == 1)
    if parts is not None:  # rounded to integers of 16 bits, more exact than x is
        assert (parts.double().sum(0) - exact).abs().max() <= 1e-3 * float(exact.square().mean().sqrt())
    gated = GATES["silu"](exact)
    torch.testing.assert_close(rows.gated(x, None, "silu").double(), gated, rtol=4e-3, atol=4e-2)


@pytest.mark.parametrize(
    ("m", "group", "split", "zeros"),
    [(40, 64, 2, True), *sweep((33, 128, 1, False), (70, 32, 3, True), (48, 256, 3, False), (64, 384, 2, True))],
)
def test_many_rows_are_multiplied_from_the_codes(m: int, group: int, split: int, zeros: bool) -> None:
    torch.manual_seed(0)
    k = 768 if group >= 256 else 384
    weight = random_weight(70, k, 4, group, zeros=zeros)
    x, bias = torch.randn(m, k).half(), torch.randn(70).half()
    rows = integer_rows(with_words(weight))
    assert rows is not None
    rows.many_tiles[m] = ManyTile(16, 32, 4, 3, split)
    rows._space.parts.fill_(torch.nan)
    exact = x.double() @ dequantize(weight, torch.float64).T
    bound = 4 * TOLERANCES[torch.float16] * float(exact.square().mean().sqrt())
    for _ in range(2):  # counters of finished programs are zeros again
        assert (rows.forward(x, bias).double() - exact - bias.double()).abs().max() <= bound
    parts = rows.parts(x)
    assert (parts is None) == (split == 1)
    assert parts is None or (parts.double().sum(0) - exact).abs().max() <= bound
    gated = GATES["silu"](exact + bias.double())
    assert (rows.gated(x, bias, "silu").double() - gated).abs().max() <= 2 * bound


def test_many_rows_of_16_bits_and_planes_have_tiles_of_their_own() -> None:
    for bits, k, group, zeros, most in (
        (4, 256, 128, False, MOST_MANY),
        (4, 256, 128, True, MOST_MANY_GROUPS),
        (4, 256, 64, False, MOST_MANY_GROUPS),
        (4, 96, 32, False, MOST_ROWS),
        (8, 256, 128, False, MOST_ROWS),
    ):
        rows = integer_rows(with_words(random_weight(64, k, bits, group, zeros=zeros)))
        assert rows is not None
        assert rows.most_rows == most
        for m in (0, 1, FEWEST_MANY - 1, FEWEST_MANY, MOST_ROWS, MOST_ROWS + 1, most, most + 1):
            x = torch.zeros(m, k, dtype=torch.half)
            assert rows.is_few(x) == (0 < m <= most)
            assert rows.is_few(x.float()) == (0 < m <= MOST_ROWS)
            if 0 < m <= most:
                assert isinstance(rows.tile(x), ManyTile) == (m >= FEWEST_MANY and most > MOST_ROWS)
            if 0 < m <= MOST_ROWS:
                assert not isinstance(rows.tile(x.float()), ManyTile)


def test_tiles_of_many_rows_fill_two_programs_on_each_multiprocessor() -> None:
    def tile(rows: int, n: int, k: int = 4096, *, one_scale: bool = True) -> tuple[int, int, int]:
        found = many_tile(rows, n, k, one_scale=one_scale)
        return found.block_m, found.block_n, found.split

    assert [tile(64, n) for n in (4096, 6144, 28672)] == [(64, 64, 4), (64, 64, 2), (64, 128, 1)]
    assert [tile(65, n) for n in (4096, 6144, 28672)] == [(128, 64, 4), (128, 64, 2), (128, 128, 1)]
    assert [tile(512, n) for n in (4096, 6144, 28672)] == [(128, 128, 2), (128, 128, 1), (128, 128, 1)]
    assert tile(128, 28672, one_scale=False) == (128, 64, 1)
    assert tile(33, 64, 256) == (64, 64, 2)


def test_17_to_32_rows_of_16_bits_and_a_large_weight_have_tiles_of_bytes() -> None:
    def of_bytes(
        m: int, dtype: torch.dtype = torch.half, n: int = 16384, group: int = 128, *, zeros: bool = False
    ) -> bool:
        rows = integer_rows(with_words(random_weight(n, 256, 4, group, zeros=zeros)))
        assert rows is not None
        return isinstance(rows.tile(torch.zeros(m, 256, dtype=dtype)), BytesTile)

    assert of_bytes(17)
    assert of_bytes(32, torch.bfloat16)
    assert not any((of_bytes(16), of_bytes(33), of_bytes(17, torch.float32)))
    assert not any((of_bytes(17, n=16383), of_bytes(17, group=64), of_bytes(17, zeros=True)))


@pytest.mark.parametrize("zeros", [True, *sweep(False)])
@pytest.mark.parametrize("dtype", [torch.float16, *sweep(torch.float32)])
def test_scales_in_tiles_give_the_same_bits(zeros: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = random_weight(128, 256, 4, 128, zeros=zeros)
    weight = with_words(weight._replace(scales=weight.scales.to(dtype)))
    x = torch.randn(1, 256).half()
    plain = integer_rows(weight)
    monkeypatch.setattr(integer_one_row, "LEAST_OUT", 64)
    tiled = integer_rows(weight)
    assert plain is not None
    assert tiled is not None
    scales = integer_one_row.with_scales_in_tiles(weight).scales
    assert (scales.shape, scales.dtype) == ((2, 2, 64), dtype)
    assert tiled.gated(x, None, "silu").equal(plain.gated(x, None, "silu"))


def test_large_weights_have_tiles_whose_columns_are_their_rows() -> None:
    assert column_tile(16, 28672, 4096, 1) == (16, 128, 256, 4, 3, 2, True, 4)
    assert column_tile(2, 6144, 4096, 2) == (16, 128, 128, 4, 6, 8, True, 4)
    assert column_tile(32, 6144, 2048, 1) == (32, 128, 128, 4, 3, 4, True, 4)
    for few in (
        (33, 6144, 4096, 1),
        (16, 4096, 4096, 1),
        (16, 6144, 4096, 4),
        (16, 6144, 2176, 1),
        (16, 1 << 18, 4096, 1),
    ):
        assert column_tile(*few) is None


@each_dtype
@pytest.mark.parametrize(("n", "k", "group"), [(32, 192, 96), *sweep((40, 64, 32), (7, 256, 128))])
@pytest.mark.parametrize(("bits", "zeros"), [(4, True), *sweep((4, False), (8, False), (8, True))])
def test_weights_are_dequantized(n: int, k: int, group: int, bits: int, zeros: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = random_weight(n, k, bits, group, zeros=zeros)
    assert plain_weight(weight, dtype).equal(dequantize(weight, dtype))


def test_many_rows_are_multiplied_with_the_dequantized_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, order = random_weight(64, 128, 4, 32, zeros=True), torch.randperm(128).int()
    product, x = IntegerProduct(weight, order), torch.randn(MOST_ROWS + 1, 128)
    expected = x[:, order.long()] @ dequantize(weight, torch.float32).T
    close(product.forward(x, None), expected)
    close(product.forward(x[:2].contiguous(), None), expected[:2])
    close(product.gated(x, None, "silu"), GATES["silu"](expected))
    close(product.gated(x[:2].contiguous(), None, "silu"), GATES["silu"](expected[:2]))
    assert product.parts(x) is None
    assert product.forward(x[:0], None).shape == (0, 64)
    monkeypatch.setattr(coded_product, "MOST_ELEMENTS", 24 * 128)
    bias = torch.randn(64)
    close(product.forward(x, bias), expected + bias)
    odd = random_weight(8, 40, 8, 40, zeros=False)
    x = torch.randn(3, 40)
    close(IntegerProduct(odd, None).forward(x, None), x @ dequantize(odd, torch.float32).T)


def test_scales_are_narrowed_only_if_nothing_is_lost() -> None:
    scales = torch.rand(3, 5)
    assert narrowed(scales).equal(scales)
    assert narrowed(scales.half().float()).dtype is torch.float16
    assert narrowed((scales * 1e-9).bfloat16().float()).dtype is torch.bfloat16


def test_int8_activations_are_rounded() -> None:
    torch.manual_seed(0)
    weight, x = random_weight(16, 64, 8, 64, zeros=False), torch.randn(33, 64)
    scale = x.abs().amax(1, keepdim=True) / 127
    exact = (x / scale).round() * scale @ dequantize(weight, torch.float32).T
    close(Int8Product(weight, None).forward(x, None), exact)
    static = torch.tensor(0.02)
    exact = (x / static).round().clamp(-128, 127) * static @ dequantize(weight, torch.float32).T
    close(Int8Product(weight, static).forward(x, None), exact)
