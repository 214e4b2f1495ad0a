"""Test products with weights of bitsandbytes of 4 bits on a GPU, against float32.

Run: python -m pytest tests/gpu/test_table_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.activation import GATES
from dovetail_quantization.bnb_tensors import TABLES
from dovetail_quantization.table_product import TableProduct
from dovetail_quantization.table_weights import TableWeight, packed_codes, padded_scales

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error relative to the size of ``exact``."""
    return float((got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize(
    ("kind", "n", "k", "block"),
    [("nf4", 1030, 768, 64), ("fp4", 4096, 4096, 64), ("nf4", 1024, 14336, 64), ("nf4", 512, 576, 64),
     ("nf4", 256, 1024, 32), ("fp4", 320, 2048, 256)],
)  # fmt: skip
def test_products_are_those_of_the_dequantized_weight(kind: str, n: int, k: int, block: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = torch.rand(n, k // block, device="cuda") / 8
    elements = torch.tensor(TABLES[kind], device="cuda")[codes.int()] * scales.repeat_interleave(block, 1)
    weight = TableWeight(packed_codes(codes), padded_scales(scales, block), TABLES[kind], k, block, kind.upper())
    product = TableProduct(weight)
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype, tolerance in TOLERANCES.items():
        assert error(product.weight(dtype), elements) < tolerance
        bias = torch.randn(n, device="cuda", dtype=dtype)
        for m in (1, 2, 16, 33, 64, 65, 128, 300):
            x = torch.randn(m, k, device="cuda").mul_(0.1).to(dtype)
            exact = x.float() @ elements.T
            assert error(product.forward(x, bias), exact + bias.float()) < tolerance, (dtype, m)
            gate = GATES["silu"](exact + bias.float())
            assert error(product.gated(x, bias, "silu"), gate) < 3 * tolerance, (dtype, m)
            parts = product.parts(x)
            assert parts is None or error(parts.sum(0), exact) < tolerance, (dtype, m)
