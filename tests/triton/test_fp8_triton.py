"""Test the FP8 kernels, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_fp8_triton.py
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import dovetail_quantization.triton.quantize as quantize_kernels
from dovetail.interfaces.quantization import QuantizedActivations
from dovetail.ops.triton import experts_fp8
from dovetail.ops.triton.tuning import MAX_PARTS
from dovetail_quantization.fp8_products import RowScaled, dequantize
from dovetail_quantization.triton.block_product import block_product
from dovetail_quantization.triton.few_rows import few_rows, tile_of
from dovetail_quantization.triton.quantize import quantize, quantize_static

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "width", "size"), [(0, 32, None), (3, 80, None), (2, 5000, None), (5, 96, 32), (4, 100, 32)]
)
def test_activations_are_rounded_to_the_nearest(dtype: torch.dtype, tokens: int, width: int, size: int | None) -> None:
    torch.manual_seed(0)
    x = (torch.randn(tokens, width) * torch.logspace(-3, 3, max(tokens, 1))[:tokens, None]).to(dtype)
    if tokens > 1:
        x[1] = 0
    before = x.clone()
    found, scales = quantize(x, size)
    assert x.equal(before)
    group = width if size is None else size
    assert scales.shape == (tokens, -(-width // group))
    for start in range(0, width, group):
        part = x[:, start : start + group].float()
        largest = part.abs().amax(1, keepdim=True)
        expected = torch.where(largest > 0, largest / 448, 1.0)
        torch.testing.assert_close(scales[:, start // group, None], expected)
        scale = scales[:, start // group, None]
        assert found[:, start : start + group].float().equal((part / scale).clamp(-448, 448).to(FP8).float())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("static", [False, True])
def test_nan_stays_nan(static: bool) -> None:
    """It must not become a number, which would hide that a layer before has failed."""
    x = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 2.0, 4.0]])
    got, _ = quantize_static(x, torch.tensor(0.5)) if static else quantize(x)
    assert got.float().isnan().tolist() == [[False, True, False], [False] * 3]


@pytest.mark.parametrize(("size", "bound"), [(None, None), (None, 1.5), (32, None), (32, 1.5)])
def test_experts_quantize_what_linear_layers_quantize(size: int | None, bound: float | None) -> None:
    x = torch.randn(5, 80)
    x[1], x[2, 3], x[3] = 0.0, torch.nan, x[3] * 1e-30
    codes, scales = quantize(x, size, bound)
    expert_codes, expert_scales = experts_fp8.quantize_rows(x, size, math.inf if bound is None else bound)
    torch.testing.assert_close(expert_codes.float(), codes.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(expert_scales, scales, rtol=0, atol=0, equal_nan=True)


def test_activations_beyond_a_bound_count_as_the_bound() -> None:
    x = torch.tensor([[1.0, -30.0, 4.0, 0.5], [1.0, -2.0, 0.25, 0.0]])
    got, scales = quantize(x, bound=5.0)
    exact, exact_scales = quantize(x.clamp(-5, 5))
    assert scales.equal(exact_scales)
    assert got.float().equal(exact.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(0, 32), (1, 80), (3, 2500)])
def test_a_static_scale_is_one_launch(
    tokens: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, static = torch.randn(tokens, width).to(dtype), torch.tensor(0.003)
    launches = list[object]()
    run = quantize_kernels.launch
    monkeypatch.setattr(
        quantize_kernels, "launch", lambda kernel, *args, **kw: (launches.append(kernel), run(kernel, *args, **kw))
    )
    codes, scales = quantize_static(x, static)
    assert len(launches) == (tokens > 0)
    assert codes.float().equal((x.float() / static).clamp(-448, 448).to(FP8).float())
    assert scales.equal(torch.full((tokens, 1), 0.003))
    assert all(scales.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "k", "block"),
    [(0, 16, 32, (16, 32)), (1, 40, 64, (16, 32)), (5, 96, 80, (32, 32)), (70, 130, 96, (64, 32))],
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_of_blocks_is_that_of_the_numbers(
    m: int, n: int, k: int, block: tuple[int, int], dtype: torch.dtype, biased: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(m, k).to(FP8), torch.randn(n, k).to(FP8)
    columns = -(-k // block[1])
    x_scale, scale = torch.rand(m, columns) + 0.1, torch.rand(-(-n // block[0]), columns) + 0.1
    bias = torch.randn(n).to(dtype) if biased else None
    got = block_product(x, x_scale, weight, scale, block, bias, dtype)
    assert got.shape == (m, n)
    assert got.dtype == dtype
    whole = x.double() * x_scale.double().repeat_interleave(block[1], 1)[:, :k]
    exact = whole @ dequantize(weight, scale, block, torch.float64).T
    exact = exact if bias is None else exact + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert ((got.double() - exact).abs() <= tolerance * (exact.abs() + 1)).all()


@pytest.mark.parametrize("static", [None, 0.01])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_product_with_scales_of_rows_is_that_of_the_numbers(tokens: int, biased: bool, static: float | None) -> None:
    """Activations above 4.48 are clamped by the static scale."""
    torch.manual_seed(0)
    weight, scale, x = torch.randn(64, 96).to(FP8), torch.rand(64) + 0.5, torch.randn(tokens, 96) * 3
    bias = torch.randn(64) if biased else None
    product = RowScaled(weight, scale, None if static is None else torch.tensor(static), None)
    got = product.forward(x, bias)
    of_x = x.abs().amax(1, keepdim=True) / 448 if static is None else torch.tensor(static)
    stood_for = (x / of_x).clamp(-448, 448).to(FP8).double() * of_x
    exact = stood_for @ dequantize(weight, scale, None, torch.float64).T
    exact = exact if bias is None else exact + bias.double()
    assert got.shape == (tokens, 64)
    assert ((got.double() - exact).abs() <= 1e-5 * (exact.abs() + 1)).all()


class Operations(TorchDispatchMode):
    """Record the names of the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_bias_has_no_kernel_of_its_own() -> None:
    weight, x, bias = torch.randn(64, 96).to(FP8), torch.randn(3, 96), torch.randn(64)
    product = RowScaled(weight, torch.rand(64) + 0.5, torch.tensor(0.01), None)
    with Operations() as recorded:
        product.forward(x, bias)
    names = recorded.names
    assert names.count("_scaled_mm") == 1
    assert not {"add", "add_", "mul", "div", "clamp_", "repeat", "expand"} & set(names[names.index("_scaled_mm") :])


def few_rows_case(n: int, k: int, *, blocks: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight in FP8, its scales, and the numbers for which they stand."""
    torch.manual_seed(0)
    weight = torch.randn(n, k).mul_(20).to(FP8)
    scale = torch.rand((-(-n // 128), k // 128) if blocks else (n,)) / 64
    return weight, scale, dequantize(weight, scale, (128, 128) if blocks else None, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(96, 128), (268, 512), (64, 1024)])
@pytest.mark.parametrize("blocks", [False, True])
def test_few_rows_keep_their_dtype(dtype: torch.dtype, n: int, k: int, *, blocks: bool) -> None:
    weight, scale, exact_weight = few_rows_case(n, k, blocks=blocks)
    product, bias = few_rows(weight, scale), torch.randn(n).to(dtype)
    assert product is not None
    atol, rtol = (2e-2, 2e-3) if dtype is torch.float16 else (1e-4, 1e-5)
    for rows in (1, 2, 16):
        x = torch.randn(rows, k).to(dtype)
        exact = x.double() @ exact_weight.T
        torch.testing.assert_close(product.forward(x, bias).double(), exact + bias, atol=atol, rtol=rtol)
        gated = functional.silu((exact + bias)[:, : n // 2]) * (exact + bias)[:, n // 2 :]
        torch.testing.assert_close(product.gated(x, bias, "silu").double(), gated, atol=atol, rtol=rtol)
        parts = product.parts(x)
        if parts is not None:
            torch.testing.assert_close(parts.double().sum(0), exact, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("blocks", [False, True])
def test_few_quantized_rows(*, blocks: bool) -> None:
    n, k = 268, 512
    weight, scale, exact_weight = few_rows_case(n, k, blocks=blocks)
    product = few_rows(weight, scale)
    assert product is not None
    for rows in (1, 17, 64):
        codes = torch.randn(rows, k).to(FP8)
        scales = torch.rand(rows, k // 128 if blocks else 1)
        exact = (codes.double() * scales.repeat_interleave(k // scales.shape[1], 1)) @ exact_weight.T
        x = QuantizedActivations(codes, scales, torch.float32)
        torch.testing.assert_close(product.forward(x, None).double(), exact, atol=1e-4, rtol=1e-5)
        parts = product.parts(x)
        if parts is not None:
            torch.testing.assert_close(parts.double().sum(0), exact, atol=1e-4, rtol=1e-5)


def test_scales_of_other_blocks_have_no_kernels_for_few_rows() -> None:
    weight = torch.zeros(256, 512, dtype=FP8)
    assert few_rows(weight, torch.ones(4, 8)) is None
    assert few_rows(weight[:, :200].contiguous(), torch.ones(256)) is None


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_tiles_divide_their_weights(*, quantized: bool, blocks: bool) -> None:
    for n, k in itertools.product((16, 1000, 4096, 28672, 201088), (128, 384, 2048, 4096, 14336)):
        for rows in (1, 16, 40, 64):
            tile = tile_of(rows, n, k, quantized=quantized, blocks=blocks)
            assert rows <= tile.block_m
            assert k % (tile.block_k * tile.split) == 0
            assert not blocks or tile.block_k == 128
            assert tile.split == 1 or -(-n // tile.block_n) * tile.split * tile.block_n * tile.block_m <= MAX_PARTS
