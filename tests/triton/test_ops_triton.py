"""Test the kernels of the layers, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_ops_triton.py
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from dovetail.layers.rope import RopeConfig
from dovetail.layers.rotary import rotary_table
from dovetail.ops.activation import Activation
from dovetail.ops.triton import invariant
from dovetail.ops.triton import matmul as matmul_module
from dovetail.ops.triton.activation import gate_rows, gelu_tanh_mul, sigmoid_mul, silu_mul, soft_cap
from dovetail.ops.triton.kv import store
from dovetail.ops.triton.matmul import GATE_KINDS, Workspace, matmul
from dovetail.ops.triton.norm import add_parts_layer_norm, add_parts_rms_norm, layer_norm, rms_norm
from dovetail.ops.triton.rotary import rotate_and_store
from dovetail.ops.triton.tuning import MAX_PARTS, MAX_ROWS, MEASURED, ProductTile, guess, tile_of

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3}
GATES = {"silu": functional.silu, "gelu_tanh": functools.partial(functional.gelu, approximate="tanh")}
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(got: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert ((got.double() - exact).abs() <= tolerance * (exact.abs() + 1)).all()


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@each_dtype
@pytest.mark.parametrize("shape", [(0, 8), (3, 48), (2, 3, 8), (1, 1000)])
def test_the_norm_is_the_formula(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1:]).to(dtype)
    close(rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), tolerance)


@each_dtype
def test_a_strided_norm_reads_its_own_tokens(dtype: torch.dtype, tolerance: float) -> None:
    qkv, weight = torch.randn(3, 5, 8).to(dtype), torch.randn(4, 8).to(dtype)
    close(rms_norm(qkv[:, :4], weight, 1e-5), normed(qkv[:, :4], weight, 1e-5), tolerance)


@each_dtype
def test_adding_first_overwrites_x_with_the_rounded_sum(dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = (torch.randn(3, 40).to(dtype) for _ in range(3))
    total, kept = x + residual, residual.clone()
    got = rms_norm(x, weight[0].contiguous(), 1e-5, residual)
    assert x.equal(total)
    assert residual.equal(kept)
    close(got, normed(total, weight[0], 1e-5), tolerance)


def layer_normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


@each_dtype
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 8), (3, 48), (1, 1000)])
def test_the_layer_norm_is_the_formula(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, int], with_bias: bool
) -> None:
    """The mean is far from 0, so that a variance without it would be wrong."""
    x, residual = (torch.randn(shape).add(3).to(dtype) for _ in range(2))
    weight, bias = torch.randn(2, shape[1]).to(dtype)
    bias, kept, before, total = bias if with_bias else None, residual.clone(), x.clone(), x + residual
    close(layer_norm(x, weight, bias, 1e-5), layer_normed(x, weight, bias, 1e-5), 2 * tolerance)
    assert x.equal(before)
    got = layer_norm(x, weight, bias, 1e-5, residual)
    assert x.equal(total)
    assert residual.equal(kept)
    close(got, layer_normed(total, weight, bias, 1e-5), 2 * tolerance)


@each_dtype
def test_a_layer_norm_adds_parts_in_their_order(dtype: torch.dtype, tolerance: float) -> None:
    parts, residual = torch.randn(3, 5, 40), torch.randn(5, 40).to(dtype)
    weight, bias = torch.randn(2, 40).to(dtype)
    x = (parts[0] + parts[1] + parts[2]).to(dtype)
    got, total = add_parts_layer_norm(parts, residual, weight, bias, 1e-5)
    assert total.equal(x + residual)
    assert got.equal(layer_norm(x, weight, bias, 1e-5, residual))


@each_dtype
@pytest.mark.parametrize("width", [6, 1025])
def test_silu_mul(dtype: torch.dtype, tolerance: float, width: int) -> None:
    gate_up = torch.randn(2, 2 * width).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    close(silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, tolerance)


@each_dtype
def test_gelu_tanh_mul(dtype: torch.dtype, tolerance: float) -> None:
    gate_up = torch.randn(2, 2 * 1025).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    close(gelu_tanh_mul(gate_up), functional.gelu(gate, approximate="tanh") * up, tolerance)


@each_dtype
def test_soft_cap(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(3, 700).to(dtype) * 40
    exact = 30 * (x.double() / 30).tanh()
    assert soft_cap(x, 30.0) is x
    close(x, exact, 2 * tolerance)


@each_dtype
def test_a_norm_may_have_a_weight_of_more_bits(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(3, 48).to(dtype), 1 + torch.rand(48) * 1e-3
    close(rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), tolerance)


@each_dtype
def test_store_writes_named_places_only(dtype: torch.dtype, tolerance: float) -> None:
    qkv = torch.randn(3, 6, 4).to(dtype)
    k, v = qkv[:, 2:4], qkv[:, 4:]
    keys, values = torch.full((2, 9, 2, 4), 7.0, dtype=torch.float32)
    store(k, v, keys, values, torch.tensor([7, 0, 4]))
    assert keys[[7, 0, 4]].equal(k.float())
    assert values[[7, 0, 4]].equal(v.float())
    for places in (keys, values):
        assert (places[[1, 2, 3, 5, 6, 8]] == 7).all()


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bits_saturate(pool_dtype: torch.dtype) -> None:
    """The numbers need no rounding, which is not quite right where Triton is interpreted."""
    largest = torch.finfo(pool_dtype).max
    row = torch.tensor([1e6, -largest - 32, 1.25, -0.5, 16, 0, -1e9, largest])
    qkv = row.expand(1, 4, 8).contiguous()
    wanted = row.clamp(-largest, largest).to(pool_dtype).expand(1, 1, 8)
    keys, values = torch.zeros(2, 3, 1, 8).to(pool_dtype)
    store(qkv[:, :1], qkv[:, 1:2], keys, values, torch.tensor([1]))
    table, at = torch.stack([torch.ones(1, 8), torch.zeros(1, 8)], 1), torch.zeros(1, dtype=torch.int64)
    q = rotate_and_store(qkv, 2, 1, table, at, None, keys[:, None], values[:, None], at + 2)
    assert q.equal(qkv[:, :2])
    for places in (keys, values):
        assert places.float()[1:].equal(wanted.float().expand(2, 1, 8))
        assert not places.float()[0].any()


@pytest.mark.sample(3)
@each_dtype
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 8), (3, 1, 12), (14, 2, 256), (0, 2, 8), (4, 0, 8)])
def test_rotate_and_store(
    dtype: torch.dtype, tolerance: float, with_norm: bool, pool_dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> None:
    table = rotary_table(RopeConfig(head_dim=size, theta=100.0, original_len=64, context_len=64), torch.device("cpu"))
    positions, places = torch.tensor([0, 63, 5]), torch.tensor([6, 4, 11])
    qkv = torch.randn(3, heads + 2 * kv_heads, size).to(dtype)
    kept, weights = qkv.clone(), torch.randn(2, size).to(dtype)
    keys, values = torch.full((2, 3, 4, kv_heads, size), 7.0, dtype=pool_dtype)  # pages of 4 places
    norm = (weights[0], weights[1], 1e-5) if with_norm else None
    q = rotate_and_store(qkv, heads, kv_heads, table, positions, norm, keys, values, places)
    assert qkv.equal(kept)

    exact = qkv[:, : heads + kv_heads].double()
    if with_norm:
        exact = normed(exact, weights.repeat_interleave(torch.tensor([heads, kv_heads]), 0), 1e-5)
    half = size // 2
    angles = positions[:, None, None].double() * 100.0 ** (-torch.arange(half).double() / half)
    turned = torch.complex(exact[..., :half], exact[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    exact = torch.cat((turned.real, turned.imag), -1)
    bound = 4 * max(tolerance, DTYPES[pool_dtype])
    close(q, exact[:, :heads], bound)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    close(keys[places], exact[:, heads:], bound)
    assert values[places].equal(qkv[:, heads + kv_heads :].to(pool_dtype))
    others = [place for place in range(12) if place not in places.tolist()]
    assert (keys[others] == 7).all()
    assert (values[others] == 7).all()


def test_nothing_to_do_launches_nothing() -> None:
    empty, pool, at = torch.zeros(0, 4, 8), torch.zeros(3, 1, 8), torch.zeros(0, dtype=torch.int64)
    assert silu_mul(torch.zeros(0, 8)).shape == (0, 4)
    store(empty[:, :1], empty[:, 1:2], pool, pool, at)
    assert rotate_and_store(empty, 2, 1, torch.zeros(4, 2, 8), at, None, pool, pool, at).shape == (0, 2, 8)


@pytest.mark.sample(5)
@each_dtype
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("gated", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 12, 96), (1, 10, 192), (5, 40, 192), (16, 36, 576)])
def test_products_of_few_rows(
    dtype: torch.dtype,
    tolerance: float,
    with_bias: bool,
    gated: Activation | None,
    m: int,
    n: int,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matmul_module, "processors", lambda device: 2)
    x, weight = torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype)
    bias, space = torch.randn(n).to(dtype) if with_bias else None, Workspace(torch.device("cpu"))
    space.parts.fill_(torch.nan)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    kind = GATE_KINDS[gated] if gated else False
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = GATES[gated](gate) * up
    tiles = [ProductTile(16, 16, 32, 4, split=split, early=early) for split in (1, 3) for early in (False, True)]
    if m == 1:
        tiles += [ProductTile(1, 4, 32, 1), ProductTile(1, 2, 32, 1, per_sm=1), ProductTile(1, 4, 32, 1, per_sm=2)]
    for tile in tiles:
        for _ in range(2):  # the second finds what the first left in the workspace
            close(matmul(x, weight, bias, tile, space, kind), exact, 4 * tolerance)
            assert not space.arrived.any()


def test_products_of_two_streams_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of different streams run at the same time, also those of two engines on one device."""
    device, current = torch.device("cuda", 0), SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(matmul_module, "Workspace", lambda device: Workspace(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    first, again = matmul_module.workspace(device), matmul_module.workspace(device)
    current.cuda_stream = 2
    other = matmul_module.workspace(device)
    matmul_module._workspace.cache_clear()
    assert first is again
    assert other.parts.data_ptr() != first.parts.data_ptr()
    assert other.arrived.data_ptr() != first.arrived.data_ptr()


@each_dtype
@pytest.mark.parametrize("early", [False, True])
def test_products_in_parts_are_added_up_by_the_norm(dtype: torch.dtype, tolerance: float, early: bool) -> None:
    m, n, k = 5, 40, 192
    x, weight = torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype)
    residual, scale, space = torch.randn(m, n).to(dtype), torch.randn(n).to(dtype), Workspace(torch.device("cpu"))
    kept = residual.clone()
    for split in (1, 2, 3):
        tile = ProductTile(16, 16, 32, 4, split=split, early=early)
        parts = matmul(x, weight, None, tile, space, in_parts=True)
        assert parts.shape == (split, m, n)
        for part, mine, theirs in zip(parts, x.chunk(split, 1), weight.chunk(split, 1), strict=True):
            close(part, mine.double() @ theirs.double().t(), 1e-5)
        whole = matmul(x, weight, None, tile, space)
        expected = rms_norm(whole, scale, 1e-5, residual)
        got, total = add_parts_rms_norm(parts, residual, scale, 1e-5)
        assert total.equal(whole)
        assert got.equal(expected)
        assert residual.equal(kept)


@pytest.mark.sample(7)
@each_dtype
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("gated", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 96), (5, 70, 192), (40, 128, 176), (65, 40, 1024), (140, 300, 80)])
def test_products_in_one_order(
    dtype: torch.dtype, tolerance: float, with_bias: bool, gated: Activation | None, m: int, n: int, k: int
) -> None:
    x, weight = torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype)
    bias, space = torch.randn(n).to(dtype) if with_bias else None, Workspace(torch.device("cpu"))
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    kind = GATE_KINDS[gated] if gated else False
    if gated:
        opens, up = exact.chunk(2, -1)
        exact = GATES[gated](opens) * up
    split = invariant.split_of(n, k)
    close(invariant.many_rows(x, weight, bias, split, kind), exact, 4 * tolerance)
    for bucket in invariant.FEW:
        tile = invariant.tile_of(bucket, n, k, split)
        assert tile is not None
        if m <= bucket:
            close(matmul(x, weight, bias, tile, space, kind, in_order=True), exact, 4 * tolerance)


def test_one_order_fits_every_shape() -> None:
    shapes = [*MEASURED, *((n, k) for n in (1, 1000, 4096, 200000) for k in (16, 80, 96, 256, 704, 1536, 5120))]
    for n, k in shapes:
        split = invariant.split_of(n, k)
        for bucket in invariant.FEW:
            tile = invariant.tile_of(bucket, n, k, split)
            assert split == 1 or tile is None or n * bucket * split <= MAX_PARTS
            assert tile is None or (tile.block_m == bucket and k % (tile.block_k * split) == 0)


def test_every_choice_fits_its_shape() -> None:
    shapes = {**MEASURED, **{(n, k): {} for n in (1, 1000, 4096, 200000) for k in (1, 96, 256, 1536, 5120)}}
    for n, k in shapes:
        for rows in range(1, MAX_ROWS + 1):
            tile = tile_of(rows, n, k)
            if tile is not None:
                assert tile.block_m == 1 if rows == 1 and tile.split == 1 and tile.stages == 1 else tile.block_m >= rows
                assert k % (tile.block_k * tile.split) == 0
    assert guess(1, 4096, 100) is None


@each_dtype
def test_a_gate_opens_by_its_sigmoid(dtype: torch.dtype, tolerance: float) -> None:
    whole = torch.randn(3, 2500).to(dtype)
    x, gate = whole[:, 100:1300], whole[:, 1300:]
    close(sigmoid_mul(x, gate), gate.double().sigmoid() * x.double(), tolerance)


@each_dtype
@pytest.mark.parametrize(("size", "width"), [(96, 96), (5000, 1300)])
def test_each_row_has_a_gate_of_its_own(dtype: torch.dtype, tolerance: float, size: int, width: int) -> None:
    x, y, weight = torch.randn(3, size).to(dtype), torch.randn(3, width).to(dtype), torch.randn(1, size) / size**0.5
    weight = weight.to(dtype)
    close(gate_rows(x, weight, y), (x.double() @ weight.double().T).sigmoid() * y.double(), tolerance)
