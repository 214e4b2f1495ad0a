"""Test the kernel in which warps multiply slices of the columns on a GPU, with tiles of all kinds, against plain float32 mathematics.

Run: python -m pytest tests/gpu/test_integer_slices_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.activation import GATES, Activation
from dovetail.ops.integers import Integers, dequantize
from dovetail.ops.triton.matmul import GATE_KINDS, workspace
from dovetail_quantization.triton.integer_slices import SliceTile, fits_slices, multiply_slices

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

TILES = {
    "one part, one block in a warp": (1024, SliceTile(8, 8, 5, 3, 1)),
    "one part, two blocks": (1024, SliceTile(4, 8, 7, 2, 1)),
    "one part, four blocks": (4096, SliceTile(8, 32, 3, 3, 1)),
    "16 warps": (4096, SliceTile(16, 32, 9, 4, 1)),
    "warps without a second block": (1792, SliceTile(8, 14, 6, 4, 1)),
    "two parts": (4096, SliceTile(8, 16, 6, 3, 2)),
    "parts of which warps have none": (3584, SliceTile(8, 7, 11, 3, 4)),
    "as many programs as tiles": (2048, SliceTile(8, 8, 33, 4, 2)),
}


def random_weight(n: int, k: int) -> Integers:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    return Integers(codes, (torch.rand(k // 128, n, device="cuda") + 0.1) / 256)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("name", TILES)
def test_products_are_those_of_the_numbers(name: str, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    (k, tile), n = TILES[name], 528
    weight, space = random_weight(n, k), workspace(torch.device("cuda"))
    assert fits_slices(weight)
    x = torch.randn(rows, k, device="cuda").to(dtype)
    x[:, 3] *= 50
    bias = torch.randn(n, device="cuda").to(dtype)
    exact = x.float() @ dequantize(weight, torch.float32).T
    # sums are of codes plus 128 in bfloat16, plus 1024 in float16
    bound, bound_of_parts = (3e-3, 1e-5) if dtype is torch.bfloat16 else (5e-4, 1e-4)
    space.parts.fill_(torch.nan)
    for given in (None, bias):
        y = torch.full((rows, n), torch.nan, device="cuda", dtype=dtype)
        whole = exact if given is None else exact + bias.float()
        for _ in range(2):  # counters of finished programs are zeros again
            multiply_slices(x, weight, given, y, 0, tile, space, in_parts=False)
            assert error(y, whole) < bound
        kinds: tuple[Activation, ...] = ("silu", "gelu_tanh")
        for kind in kinds:
            gated = torch.full((rows, n // 2), torch.nan, device="cuda", dtype=dtype)
            multiply_slices(x, weight, given, gated, GATE_KINDS[kind], tile, space, in_parts=False)
            assert error(gated, GATES[kind](whole)) < bound
    assert not space.arrived.any()
    parts = torch.full((tile.split, rows, n), torch.nan, device="cuda")
    multiply_slices(x, weight, None, parts, 0, tile, space, in_parts=True)
    assert error(parts.sum(0), exact) < bound_of_parts
    step = tile.blocks * 128
    first = x[:, :step].float() @ dequantize(weight, torch.float32)[:, :step].T
    assert error(parts[0], first) < bound_of_parts


def test_equal_inputs_give_equal_bits() -> None:
    torch.manual_seed(0)
    weight, x = random_weight(6144, 4096), torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    space, found = workspace(torch.device("cuda")), []
    for _ in range(20):
        y = torch.full((16, 6144), torch.nan, device="cuda", dtype=torch.bfloat16)
        multiply_slices(x, weight, None, y, 0, SliceTile(8, 16, 132, 3, 2), space, in_parts=False)
        found.append(y)
    assert all(one.equal(found[0]) for one in found)
