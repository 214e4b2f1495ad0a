"""Test the kernels of packed blocks of GGUF, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_packed_triton.py
"""

from __future__ import annotations

import pytest
import torch
from tests.gguf_blocks import random_blocks

from dovetail.gguf.block_types import TYPES
from dovetail.gguf.blocks import dequantize
from dovetail.ops.activation import GATES
from dovetail.ops.packed_blocks import PACKED, PackedWeight, pack
from dovetail_quantization import coded_product
from dovetail_quantization.gguf_cuda import PackedProduct
from dovetail_quantization.triton.packed_product import MOST_ROWS, PackedRows, few_rows_tile, one_row_tile

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}
LIKELY = ("Q4_K", "Q6_K")


def weight_of(kind: str, n: int, k: int, scale: float = 0.01) -> tuple[PackedWeight, torch.Tensor]:
    """Return a packed weight of random blocks, and its elements in float64."""
    blocks = random_blocks(kind, n, k, scale)
    return PackedWeight(pack(blocks, TYPES[kind]), PACKED[kind], k), dequantize(blocks, TYPES[kind]).double()


def close(got: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert (got.double() - exact).abs().max() <= 4 * tolerance * float(exact.square().mean().sqrt())


def sweep(likely: object, *others: object) -> list[object]:
    return [
        likely,
        *(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.full) for one in others),
    ]


each_kind = pytest.mark.parametrize(
    "kind", [kind if kind in LIKELY else pytest.param(kind, marks=pytest.mark.full) for kind in PACKED]
)


@each_kind
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [
        (3, 70, 512, torch.float16),
        (1, 70, 768, torch.float16),
        (1, 12, 4096, torch.float16),
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in ((17, 64, 256, torch.float32), (64, 130, 512, torch.float16))
        ),
    ],
)
def test_products_are_those_of_the_dequantized_weight(kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, elements = weight_of(kind, n, k)
    x, bias = (torch.randn(m, k) / elements.abs().max() / 16).to(dtype), torch.randn(n).to(dtype)
    product, exact, tolerance = PackedProduct([weight]), x.double() @ elements.T, TOLERANCES[dtype]
    close(product.forward(x, None), exact, tolerance)
    close(product.forward(x, bias), exact + bias.double(), tolerance)
    close(product.gated(x, bias, "silu"), GATES["silu"](exact + bias.double()), 4 * tolerance)
    parts = product.parts(x)
    if m == 1 and dtype is torch.float16 and one_row_tile(k, weight.packing) is not None:
        assert (parts is None) == (k % 2048 > 0)
    else:
        assert (parts is None) == (few_rows_tile(m, n, k, weight.packing).split == 1)
    if parts is not None:
        close(parts.sum(0), exact, tolerance)


@each_kind
@pytest.mark.parametrize("columns", sweep(96, 608))
def test_one_row_of_any_number_of_columns(kind: str, columns: int) -> None:
    torch.manual_seed(0)
    k = columns * TYPES[kind].elements // 32
    weight, elements = weight_of(kind, 37, k)
    x = torch.randn(2, k)
    exact = x.double() @ elements.T
    close(PackedProduct([weight]).forward(x, None), exact, 2e-5)
    close(PackedProduct([weight]).forward(x[:1].contiguous(), None), exact[:1], 2e-5)
    short = (x[:1] / exact.abs().max()).half()
    close(PackedProduct([weight]).forward(short, None), short.double() @ elements.T, 4e-4)


@each_kind
def test_extreme_scales(kind: str) -> None:
    """Scales from the smallest to large ones, and inputs of which some are far larger than others."""
    torch.manual_seed(0)
    for scale in (3e-6, 1e-3, 1e3):
        weight, elements = weight_of(kind, 16, 256, scale)
        x = torch.randn(2, 256) * torch.logspace(-3, 3, 256) / max(float(elements.abs().max()), 0.01)
        close(PackedProduct([weight]).forward(x, None), x.double() @ elements.T, 5e-5)
        one = x[:1].bfloat16()
        exact = one.double() @ elements.T
        least = 1e-4 * float(exact.square().mean().sqrt())
        torch.testing.assert_close(
            PackedProduct([weight]).forward(one, None).double(), exact, rtol=2**-7, atol=least
        )  # truncated


def test_rows_of_zeros_have_products_of_zeros() -> None:
    weight, _ = weight_of("Q4_K", 8, 256)
    assert PackedProduct([weight]).forward(torch.zeros(1, 256).half(), None).equal(torch.zeros(1, 8).half())


@each_kind
def test_weights_are_dequantized(kind: str) -> None:
    torch.manual_seed(0)
    weight, elements = weight_of(kind, 45, 512)
    rows = PackedRows(weight)
    for dtype in (torch.float32, torch.float16):
        out = torch.full((45, 512), torch.nan, dtype=dtype)
        rows.write(out)
        assert weight.dequantized(dtype).equal(elements.float().to(dtype))
        torch.testing.assert_close(
            out, weight.dequantized(dtype), rtol=2e-3 if dtype is torch.float16 else 1e-6, atol=1e-6
        )


def test_modules_of_several_types_share_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weights, elements = zip(
        *(weight_of(kind, n, 256) for kind, n in (("Q4_K", 64), ("Q6_K", 16), ("Q4_0", 48))), strict=True
    )
    product, bias = PackedProduct(weights), torch.randn(128)
    for m in (1, 5, MOST_ROWS + 1):
        x = torch.randn(m, 256)
        exact = x.double() @ torch.cat(elements).T
        close(product.forward(x, bias), exact + bias.double(), 2e-5)
        close(product.gated(x, None, "silu"), GATES["silu"](exact), 2e-5)
        assert product.parts(x) is None
        monkeypatch.setattr(coded_product, "MOST_ELEMENTS", 40 * 256)
        close(product.forward(x, bias), exact + bias.double(), 2e-5)
        monkeypatch.undo()
    assert product.forward(torch.empty(0, 256), None).shape == (0, 128)
