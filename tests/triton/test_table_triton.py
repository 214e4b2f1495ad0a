"""Test the kernels of weights whose codes stand for numbers of a table, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_table_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.activation import GATES
from dovetail_quantization import coded_product
from dovetail_quantization.bnb_tensors import TABLES
from dovetail_quantization.table_product import FEWER_ROWS, MOST_ROWS, TableProduct
from dovetail_quantization.table_weights import TableWeight, codes_of, packed_codes, padded_scales

full = pytest.mark.full


def weight_of(kind: str, n: int, k: int, block: int) -> tuple[TableWeight, torch.Tensor]:
    """Return a random weight, and its elements in float32."""
    codes, scales = torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.rand(n, k // block) / 8
    packed = packed_codes(codes)
    assert codes_of(packed, k).equal(codes)
    elements = torch.tensor(TABLES[kind])[codes.int()] * scales.repeat_interleave(block, 1)
    return TableWeight(packed, padded_scales(scales, block), TABLES[kind], k, block, kind.upper()), elements


def close(got: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert (got.double() - exact).abs().max() <= 4 * tolerance * float(exact.square().mean().sqrt())


@pytest.mark.parametrize(
    ("kind", "n", "k", "block"),
    [
        ("nf4", 20, 192, 64),
        ("fp4", 12, 256, 64),
        *(pytest.param(*one, marks=full) for one in (("nf4", 70, 576, 64), ("fp4", 24, 4096, 64), ("nf4", 64, 1024, 128), ("nf4", 34, 256, 32), ("fp4", 40, 512, 256), ("nf4", 20, 288, 32))),
    ],
)  # fmt: skip
def test_products_are_those_of_the_dequantized_weight(
    kind: str, n: int, k: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, elements = weight_of(kind, n, k, block)
    assert weight.dequantized(torch.float32).equal(elements)
    product, bias = TableProduct(weight), torch.randn(n)
    assert product.weight(torch.float32).equal(elements)
    for m in (1, 5, FEWER_ROWS + 3, MOST_ROWS + 1):
        x = torch.randn(m, k)
        exact = x.double() @ elements.double().T
        close(product.forward(x, bias), exact + bias.double(), 2e-5)
        close(product.gated(x, None, "silu"), GATES["silu"](exact), 4e-5)
        if (parts := product.parts(x)) is not None:
            close(parts.sum(0), exact, 2e-5)
        short = x.half()
        exact = short.double() @ elements.double().T
        if product.is_few(short):
            close(product.forward(short, bias.half()), exact + bias.half().double(), 1e-3)
            close(product.gated(short, None, "silu"), GATES["silu"](exact), 2e-3)
            if (parts := product.parts(short)) is not None:
                close(parts.sum(0), exact, 1e-3)
    monkeypatch.setattr(coded_product, "MOST_ELEMENTS", 3 * k)
    close(product.forward(x, bias), x.double() @ elements.double().T + bias.double(), 2e-5)
    assert product.forward(x[:0], None).shape == (0, n)
