"""Test the ops of the layers on CUDA, through their public functions and in captured graphs, against float64.

Run on a GPU machine: python -m pytest tests/gpu/test_ops_gpu.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from dovetail.layers.linear import Linear
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rope import RopeConfig
from dovetail.layers.rotary import rotary_table
from dovetail.ops.activation import gate_rows, gelu_tanh_mul, sigmoid_mul, silu_mul, soft_cap
from dovetail.ops.kv import store
from dovetail.ops.layer_norm import add_layer_norm, add_parts_layer_norm, layer_norm
from dovetail.ops.linear import describe, few_rows, invariant_rows
from dovetail.ops.norm import add_parts_rms_norm, add_rms_norm, rms_norm
from dovetail.ops.parts import Parts
from dovetail.ops.rotary import rotate_and_store
from dovetail.ops.triton.tuning import MEASURED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def close(got: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert ((got.double() - exact).abs() <= tolerance * (exact.abs() + 1)).all()


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@each_dtype
@pytest.mark.parametrize("tokens", [1, 7, 3000])
@pytest.mark.parametrize("size", [64, 1000, 1024, 4096, 16384])
def test_norms(dtype: torch.dtype, tolerance: float, tokens: int, size: int) -> None:
    x, residual, weight = randn(tokens, size, dtype=dtype), randn(tokens, size, dtype=dtype), randn(size, dtype=dtype)
    kept, total = residual.clone(), x + residual
    close(rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), tolerance)
    got = add_rms_norm(x, residual, weight, 1e-5)
    assert x.equal(total)
    assert residual.equal(kept)
    close(got, normed(total, weight, 1e-5), tolerance)


@each_dtype
@pytest.mark.parametrize("tokens", [1, 7, 3000])
@pytest.mark.parametrize("size", [64, 1000, 6144, 16384])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norms(dtype: torch.dtype, tolerance: float, tokens: int, size: int, with_bias: bool) -> None:
    x, residual = (randn(tokens, size, dtype=dtype).add_(2) for _ in range(2))
    weight, bias = randn(2, size, dtype=dtype)
    bias, kept, total = bias if with_bias else None, residual.clone(), x + residual

    def exact(x: torch.Tensor) -> torch.Tensor:
        doubles = (x.double(), (size,), weight.double(), None if bias is None else bias.double(), 1e-5)
        return torch.nn.functional.layer_norm(*doubles)

    close(layer_norm(x, weight, bias, 1e-5), exact(x), 2 * tolerance)
    got = add_layer_norm(x, residual, weight, bias, 1e-5)
    assert x.equal(total)
    assert residual.equal(kept)
    close(got, exact(total), 2 * tolerance)
    parts = randn(3, tokens, size, dtype=torch.float32)
    whole = (parts[0] + parts[1] + parts[2]).to(dtype)
    got, total = add_parts_layer_norm(Parts(parts), residual, weight, bias, 1e-5)
    assert total.equal(whole + residual)
    close(got, exact(total), 2 * tolerance)


@each_dtype
@pytest.mark.parametrize("tokens", [1, 7, 3000])
@pytest.mark.parametrize("width", [96, 3072, 14336])
def test_silu_mul(dtype: torch.dtype, tolerance: float, tokens: int, width: int) -> None:
    gate_up = randn(tokens, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    close(silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, tolerance)


@each_dtype
@pytest.mark.parametrize("tokens", [1, 3000])
def test_gelu_tanh_mul_and_soft_cap(dtype: torch.dtype, tolerance: float, tokens: int) -> None:
    gate_up = randn(tokens, 2 * 3072, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    close(gelu_tanh_mul(gate_up), functional.gelu(gate, approximate="tanh") * up, tolerance)
    exact = 2 * (gate_up.double() / 2).tanh()
    close(soft_cap(gate_up, 2.0), exact, tolerance)


@each_dtype
def test_norms_with_weights_of_more_bits(dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = (
        randn(7, 2560, dtype=dtype),
        randn(7, 2560, dtype=dtype),
        1 + torch.rand(2560, device="cuda") / 99,
    )
    total = x + residual
    close(rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), tolerance)
    close(add_rms_norm(x, residual, weight, 1e-5), normed(total, weight, 1e-5), tolerance)


@each_dtype
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_store(dtype: torch.dtype, tolerance: float, pool_dtype: torch.dtype) -> None:
    qkv = randn(50, 48, 128, dtype=dtype)
    places = torch.randperm(80, device="cuda")[:50]
    keys, values = torch.full((2, 80, 8, 128), 7.0, device="cuda").to(pool_dtype)
    store(qkv[:, 32:40], qkv[:, 40:], keys, values, places)
    assert keys[places].float().equal(qkv[:, 32:40].to(pool_dtype).float())
    assert values[places].float().equal(qkv[:, 40:].to(pool_dtype).float())
    others = torch.ones(80, dtype=torch.bool, device="cuda").index_fill_(0, places, False)
    assert (keys[others].float() == 7).all()


@each_dtype
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("pool_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [1, 5, 2000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(32, 8, 128), (16, 8, 128), (14, 2, 64), (8, 1, 256), (5, 5, 96)]
)
def test_rotate_and_store(
    dtype: torch.dtype,
    tolerance: float,
    with_norm: bool,
    pool_dtype: torch.dtype | None,
    tokens: int,
    heads: int,
    kv_heads: int,
    size: int,
) -> None:
    table = rotary_table(
        RopeConfig(head_dim=size, theta=1e4, original_len=4096, context_len=4096), torch.device("cuda")
    )
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    pool = pool_dtype or dtype
    places = torch.randperm(4 * 600, device="cuda")[:tokens]
    qkv, weights = randn(tokens, heads + 2 * kv_heads, size, dtype=dtype), randn(2, size, dtype=dtype)
    kept = qkv.clone()
    keys, values = torch.full((2, 600, 4, kv_heads, size), 7.0, device="cuda").to(pool)
    norm = (weights[0], weights[1], 1e-6) if with_norm else None
    q = rotate_and_store(qkv, heads, kv_heads, table, positions, norm, keys, values, places)
    assert qkv.equal(kept)

    exact = qkv[:, : heads + kv_heads].double()
    if with_norm:
        repeats = torch.tensor([heads, kv_heads], device="cuda")
        exact = normed(exact, weights.repeat_interleave(repeats, 0), 1e-6)
    half = size // 2
    rows = table[positions].double()[:, :, None]
    low, high, cos, sin = exact[..., :half], exact[..., half:], rows[:, 0, :, half:], rows[:, 1, :, half:]
    exact = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    close(q, exact[:, :heads], 4 * tolerance)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    close(keys[places].float(), exact[:, heads:], 4 * (tolerance if pool_dtype is None else 0.04))
    assert values[places].float().equal(qkv[:, heads + kv_heads :].to(pool).float())
    others = torch.ones(2400, dtype=torch.bool, device="cuda").index_fill_(0, places, False)
    assert (keys[others].float() == 7).all()
    assert (values[others].float() == 7).all()


def replayed(step: Callable[[], torch.Tensor], refill: Callable[[], object]) -> torch.Tensor:
    """Return the result of ``step`` as a graph that was captured with other inputs."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    refill()
    out.fill_(torch.nan)
    graph.replay()
    return out


def test_a_chain_of_ops_is_the_same_as_a_graph() -> None:
    x, residual, weight = (randn(4, 2048, dtype=torch.bfloat16) for _ in range(3))
    fresh = randn(4, 2048, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        return silu_mul(add_rms_norm(rms_norm(x, weight[0], 1e-5), residual, weight[1], 1e-5))

    got = replayed(step, lambda: x.copy_(fresh))
    assert got.equal(step())


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="measured on 9.0 only"
)


@needs_hopper
@pytest.mark.parametrize(("n", "k"), [*MEASURED, (1000, 768), (4096, 5120), (97, 256)])
def test_products_of_few_rows(n: int, k: int) -> None:
    weight = randn(n, k, dtype=torch.bfloat16) * 0.05
    product = few_rows(weight)
    assert product is not None
    for rows in (1, 2, 3, 8, 16, 17, 32, 33, 64, 65, 96, 128):
        x = randn(rows, k, dtype=torch.bfloat16)
        expected = x.float() @ weight.float().t()
        torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device="cuda")  # freed: the memory of the output
        got = product(x, None)
        assert (got.float() - expected).norm() < 5e-3 * expected.norm()
        assert got.equal(product(x, None))
    assert product(x[:0], None).shape == (0, n)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "k"), [(28672, 4096), (16384, 3072), (3072, 8192), (6144, 1024), (1024, 3072), (1000, 768)]
)
def test_products_with_bias_and_gate(n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias = randn(n, k, dtype=dtype) * 0.05, randn(n, dtype=dtype)
    product = few_rows(weight)
    assert product is not None
    for rows in (1, 5, 16, 32, 64, 100):
        x = randn(rows, k, dtype=dtype)
        expected = x.float() @ weight.float().t() + bias.float()
        assert (product(x, bias).float() - expected).norm() < 5e-3 * expected.norm()
        gate, up = expected.chunk(2, -1)
        of_gelu = functional.gelu(gate, approximate="tanh") * up
        assert (product.gated(x, bias, "gelu_tanh").float() - of_gelu).norm() < 1e-2 * of_gelu.norm()
        expected = functional.silu(gate) * up
        torch.full((rows, n // 2), torch.nan, dtype=dtype, device="cuda")
        assert (product.gated(x, bias).float() - expected).norm() < 1e-2 * expected.norm()


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(3072, 3072), (3072, 8192), (4096, 14336), (1024, 3072)])
def test_products_in_parts(n: int, k: int, dtype: torch.dtype) -> None:
    weight, scale = randn(n, k, dtype=dtype) * 0.05, randn(n, dtype=dtype)
    product = few_rows(weight)
    assert product is not None
    assert product.parts(randn(0, k, dtype=dtype)) is None
    assert product.parts(randn(9, k, dtype=dtype)) is not None
    assert invariant_rows(weight).parts(randn(9, k, dtype=dtype)) is None
    for rows in (1, 2, 9, 16, 32, 64, 128):
        x, residual = randn(rows, k, dtype=dtype), randn(rows, n, dtype=dtype)
        parts = product.parts(x)
        if parts is not None:
            whole = product(x, None)
            add_rms_norm(whole, residual, scale, 1e-5)
            got, total = add_parts_rms_norm(parts, residual, scale, 1e-5)
            assert total.equal(whole)
            close(got, normed(total, scale, 1e-5), 2 * torch.finfo(dtype).eps)


@needs_hopper
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_leave_parts_to_the_norm(bias: bool) -> None:
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            layer, norm = Linear(8192, 3072, bias=bias), RMSNorm(3072, 1e-5)
        finally:
            torch.set_default_dtype(torch.float32)
    for parameter in (*layer.parameters(), *norm.parameters()):
        parameter.normal_()
    for rows in (0, 1, 9, 16, 128, 129):
        x, residual = randn(rows, 8192, dtype=torch.bfloat16), randn(rows, 3072, dtype=torch.bfloat16)
        found, whole = layer.parts_forward(x), layer.forward(x)
        assert isinstance(found, Parts) == (rows in (9, 16) and not bias)
        normed, total = norm.add_forward(found, residual)
        expected, sums = norm.add_forward(whole, residual)
        assert total.equal(sums)
        close(normed, expected.double(), 2 * torch.finfo(torch.bfloat16).eps)


@needs_hopper
def test_linear_layers_use_them_and_say_so() -> None:
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            layer = Linear(1024, 6144)
        finally:
            torch.set_default_dtype(torch.float32)
    layer.weight.normal_()
    torch.cuda.synchronize()
    x = randn(200, 1024, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x, layer.weight).float()
    for rows in (1, 16, 64, 128, 200):
        got = layer.forward(x[:rows]).float()
        assert (got - expected[:rows]).norm() < 5e-3 * expected[:rows].norm()
    assert describe(layer.weight).startswith("[6144, 1024] measured")
    assert describe(layer.weight.float()) == "torch"


@needs_hopper
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (3072, 8192)])
def test_a_step_of_dependent_kernels_gives_the_same_every_time(hidden: int, inner: int) -> None:
    """Kernels start before those that they depend on have ended, so a missing wait would show as a changed result."""
    weights = [
        (randn(2 * inner, hidden, dtype=torch.bfloat16) * 0.03, randn(hidden, inner, dtype=torch.bfloat16) * 0.03)
        for _ in range(8)
    ]
    pairs = [(few_rows(up), few_rows(down)) for up, down in weights]
    scale = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 9, 16, 64):
        start = randn(rows, hidden, dtype=torch.bfloat16)

        def step(pause: Callable[[], object], start: torch.Tensor = start) -> torch.Tensor:
            x, residual = rms_norm(start, scale, 1e-5), start
            for up, down in pairs:
                assert up is not None
                assert down is not None
                pause()
                inner = up.gated(x, None)
                pause()
                parts = down.parts(inner)
                if parts is None:
                    out = down(inner, None)
                    pause()
                    x, residual = add_rms_norm(out, residual, scale, 1e-5), out
                else:
                    pause()
                    x, residual = add_parts_rms_norm(parts, residual, scale, 1e-5)
            return x

        slow = step(torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fast = step(lambda: None)
        for _ in range(50):
            fast.fill_(torch.nan)
            graph.replay()
            assert fast.equal(slow)


@each_dtype
def test_a_gate_opens_by_its_sigmoid(dtype: torch.dtype, tolerance: float) -> None:
    whole = randn(3, 2500, dtype=dtype)
    x, gate = whole[:, 100:1300], whole[:, 1300:]
    close(sigmoid_mul(x, gate), gate.double().sigmoid() * x.double(), tolerance)


@each_dtype
@pytest.mark.parametrize(("size", "width"), [(2048, 2048), (5000, 1300)])
def test_each_row_has_a_gate_of_its_own(dtype: torch.dtype, tolerance: float, size: int, width: int) -> None:
    x, y, weight = randn(30, size, dtype=dtype), randn(30, width, dtype=dtype), randn(1, size, dtype=dtype) / 50
    close(gate_rows(x, weight, y), (x.double() @ weight.double().T).sigmoid() * y.double(), tolerance)
