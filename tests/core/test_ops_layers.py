"""Test ops and layers against plain float64 mathematics.

Run: python -m pytest tests/core/test_ops_layers.py
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.mesh import SINGLE
from dovetail.layers.base import prepare_layers
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.linear import ColumnLinear, Linear, make_batch_invariant
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import HeadNorm, RMSNorm
from dovetail.layers.rope import RopeConfig, RopeKind
from dovetail.layers.rotary import HeadCounts, KVPlace, LayerRotary, Rotary
from dovetail.memory.pool import PagedKVPool
from dovetail.ops import activation, kv, norm, rotary
from dovetail.ops.activation import gelu_tanh_mul, silu_mul, soft_cap
from dovetail.ops.kv import store
from dovetail.ops.linear import compiled_rows, linear, packed, packed_linear
from dovetail.ops.norm import add_rms_norm, rms_norm
from dovetail.ops.parts import Parts
from dovetail.ops.rotary import apply_rotary

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), DTYPES.items(), ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["compiled", "torch"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the compiled kernels (where there are any) and without."""
    if request.param == "torch":
        for module in (activation, kv, norm, rotary):
            monkeypatch.setattr(module, "kernels", lambda dtype: None)


def filled(layer: torch.nn.Module) -> torch.nn.Module:
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


@each_dtype
@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(1, 256), (16, 256), (3, 5, 8)])
def test_the_norm_is_the_formula(dtype: torch.dtype, tolerance: float, scale: float, shape: tuple[int, ...]) -> None:
    x, weight, eps = (torch.randn(shape) * scale).to(dtype), torch.randn(shape[1:]).to(dtype), 1e-5
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    got = rms_norm(x, weight, eps)
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= tolerance * (exact.abs() + 1)).all()


@each_dtype
@pytest.mark.usefixtures("either")
def test_adding_first_is_the_same_norm(dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = (torch.randn(5, 40).to(dtype) for _ in range(3))
    total = x + residual
    got = add_rms_norm(x, residual, weight[0], 1e-5)
    assert x.equal(total)
    torch.testing.assert_close(got, rms_norm(total, weight[0], 1e-5), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("either")
def test_the_norm_of_nothing_is_nothing() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).equal(torch.zeros(2, 8))


@each_dtype
@pytest.mark.usefixtures("either")
def test_store_writes_named_places_only(dtype: torch.dtype, tolerance: float) -> None:
    k, v = torch.randn(2, 3, 2, 4).to(dtype)
    keys, values = torch.zeros(2, 9, 2, 4).to(dtype)
    store(k, v, keys, values, torch.tensor([7, 0, 4]))
    assert keys[[7, 0, 4]].equal(k)
    assert values[[7, 0, 4]].equal(v)
    assert not keys[[1, 2, 3, 5, 6, 8]].any()


def test_add_forward_returns_norm_and_sum() -> None:
    layer = RMSNorm(8, 1e-5)
    filled(layer)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    expected, kept = x + residual, residual.clone()
    normed, total = layer.add_forward(x, residual)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, rms_norm(expected, layer.weight, 1e-5))
    assert residual.equal(kept)
    kept = x.clone()
    normed, total = layer.add_forward(x, None)
    assert total is x
    assert x.equal(kept)
    torch.testing.assert_close(normed, rms_norm(x, layer.weight, 1e-5))


def test_a_norm_adds_up_parts() -> None:
    layer = RMSNorm(8, 1e-5)
    filled(layer)
    addends, residual = torch.randn(3, 5, 8), torch.randn(5, 8)
    kept = addends.clone(), residual.clone()
    normed, total = layer.add_forward(Parts(addends), residual)
    torch.testing.assert_close(total, addends.sum(0) + residual)
    torch.testing.assert_close(normed, rms_norm(total, layer.weight, 1e-5))
    assert addends.equal(kept[0])
    assert residual.equal(kept[1])


@pytest.mark.parametrize("bias", [False, True])
def test_products_on_a_cpu_never_come_in_parts(bias: bool) -> None:
    linear, mlp, x = Linear(16, 8, bias=bias), GatedMLP(16, 24, SINGLE, bias=bias), torch.randn(5, 16)
    for layer in (linear, mlp):
        filled(layer)
        parts = layer.parts_forward(x)
        assert isinstance(parts, torch.Tensor)
        assert parts.equal(layer.forward(x))


def test_head_norm_gives_queries_and_keys_their_own_weights() -> None:
    layer = HeadNorm(4, 2, 8, 1e-5)
    filled(layer)
    qk = torch.randn(3, 6, 8)
    got = layer.forward(qk)
    torch.testing.assert_close(got[:, :4], rms_norm(qk[:, :4], layer.q_weight.expand(4, 8).contiguous(), 1e-5))
    torch.testing.assert_close(got[:, 4:], rms_norm(qk[:, 4:], layer.k_weight.expand(2, 8).contiguous(), 1e-5))


@each_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 300])
def test_packed_weights_give_the_product(dtype: torch.dtype, tolerance: float, bias: bool, rows: int) -> None:
    weight, x = torch.randn(96, 40).to(dtype), torch.randn(rows, 40).to(dtype)
    shift = torch.randn(96).to(dtype) if bias else None
    ready = packed(weight)
    if ready is None:
        pytest.skip("this processor has no kernels for packed weights")
    exact = linear(x.double(), weight.double(), None if shift is None else shift.double())
    got = packed_linear(x, ready, shift)
    assert got.is_contiguous()
    assert got.shape == (rows, 96)
    assert ((got.double() - exact).abs() <= 4 * tolerance * math.sqrt(40)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out", [4, 1408, 4096])
def test_rows_of_a_linear_layer_are_the_same_alone_as_far_as_they_are_compiled(dtype: torch.dtype, out: int) -> None:
    layer = Linear(256, out, bias=True)
    filled(layer)
    layer.to(dtype)
    x = torch.randn(compiled_rows(layer.weight), 256).to(dtype)
    if not len(x):
        pytest.skip("there are no compiled kernels here")
    got = layer.forward(x)
    assert got.equal(torch.cat([layer.forward(row[None]) for row in x]))
    more = layer.forward(torch.cat((x, x)))  # computed otherwise, and no worse
    tolerance = 16 * torch.finfo(dtype).eps * (1 + got.abs().max())
    assert ((more[: len(x)] - got).abs() <= tolerance).all()
    assert ((more[len(x) :] - got).abs() <= tolerance).all()


def test_compiled_rows_grow_as_weights_shrink() -> None:
    assert compiled_rows(torch.empty(8, 8, device="meta")) == 0
    assert compiled_rows(torch.empty(8, 8, dtype=torch.float64)) == 0
    if compiled_rows(torch.empty(8, 8)):
        rows = [compiled_rows(torch.empty(size, 1024)) for size in (1, 512, 1024, 2048, 4096, 8192)]
        assert rows == sorted(rows, reverse=True)
        assert rows[0] == 16
        assert rows[-1] == 4


def test_no_packed_weight_of_dtypes_without_kernels() -> None:
    assert packed(torch.zeros(8, 8, dtype=torch.float64)) is None
    assert packed(torch.zeros(8, 8, device="meta")) is None


@pytest.mark.parametrize("rows", [1, 3, 16, 200])
def test_logits_are_contiguous(rows: int) -> None:
    head = LMHead(64, 300, SINGLE)
    filled(head)
    hidden = torch.randn(rows, 64)
    logits = head.forward(hidden)
    assert logits.is_contiguous()
    torch.testing.assert_close(logits, hidden @ head.weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_gives_one_token_what_it_gives_many(bias: bool) -> None:
    layer = Linear(256, 512, bias=bias)
    filled(layer)
    x = torch.randn(5, 256)
    together = layer.forward(x)
    alone = torch.cat([layer.forward(x[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-4)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-4)


def test_fused_linear_knows_its_parts() -> None:
    layer = ColumnLinear(8, {"q": 6, "k": 2, "v": 4}, SINGLE)
    assert layer.weight.shape == (12, 8)
    assert [layer.target("w", part)[:4] for part in "qkv"] == [("w", 0, 6, ()), ("w", 6, 2, ()), ("w", 8, 4, ())]


def test_a_moved_layer_computes_with_its_new_parameters() -> None:
    layer = Linear(256, 512)
    filled(layer)
    layer.forward(torch.zeros(1, 256))
    layer.to(torch.float64)
    x = torch.randn(1, 256, dtype=torch.float64)
    torch.testing.assert_close(layer.forward(x), linear(x, layer.weight))


def test_prepare_layers_takes_up_new_weights() -> None:
    layer, x = RMSNorm(8, 1e-5), torch.randn(2, 8)
    layer.weight.fill_(1.0)
    before = layer.forward(x)
    layer.weight.fill_(2.0)
    prepare_layers(layer)
    torch.testing.assert_close(layer.forward(x), before * 2)


@pytest.mark.usefixtures("either")
@each_dtype
def test_silu_mul(dtype: torch.dtype, tolerance: float) -> None:
    gate_up = torch.randn(3, 64).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    exact = gate / (1 + (-gate).exp()) * up
    assert ((silu_mul(gate_up).double() - exact).abs() <= 2 * tolerance * (exact.abs() + 1)).all()
    assert gate_up.equal(before)


@pytest.mark.usefixtures("either")
@each_dtype
def test_gelu_tanh_mul_and_soft_cap(dtype: torch.dtype, tolerance: float) -> None:
    gate_up = torch.randn(3, 64).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    exact = functional.gelu(gate, approximate="tanh") * up
    assert ((gelu_tanh_mul(gate_up).double() - exact).abs() <= 2 * tolerance * (exact.abs() + 1)).all()
    exact = 2 * (gate_up.double() / 2).tanh()
    assert ((soft_cap(gate_up, 2.0).double() - exact).abs() <= tolerance * (exact.abs() + 1)).all()


@pytest.mark.usefixtures("either")
@each_dtype
def test_a_norm_of_weights_minus_one_keeps_their_bits(dtype: torch.dtype, tolerance: float) -> None:
    torch.set_default_dtype(dtype)
    try:
        layer = RMSNorm(64, 1e-5, plus_one=True)
        heads = HeadNorm(2, 1, 64, 1e-5, plus_one=True)
    finally:
        torch.set_default_dtype(torch.float32)
    given = (torch.randn(64) * 1e-3).to(dtype)  # with the one, bfloat16 would round them away
    ((name, target),) = layer.targets("theirs", "ours")
    assert (name, target.parameter) == ("theirs.weight", "ours.weight")
    assert target.transform is not None
    for weight in (layer.weight, heads.q_weight, heads.k_weight):
        weight.copy_(target.transform.apply(given, (64,)))
    x, residual = torch.randn(9, 64).to(dtype), torch.randn(9, 64).to(dtype)
    expected = functional.rms_norm((x + residual).double(), (64,), 1 + given.double(), 1e-5)
    normed, total = layer.add_forward(x.clone(), residual)
    assert normed.dtype == dtype
    assert ((normed.double() - expected).abs() <= tolerance * (expected.abs() + 1) / 2).all()
    assert layer.forward(total).equal(normed)
    assert heads.forward(total.view(3, 3, 64)).view(9, 64).equal(normed)


def test_a_gate_may_have_another_function() -> None:
    layer = GatedMLP(8, 12, SINGLE, activation="gelu_tanh")
    filled(layer)
    x = torch.randn(3, 8)
    gate, up = (x @ layer.gate_up.weight.t()).chunk(2, -1)
    expected = (functional.gelu(gate, approximate="tanh") * up) @ layer.down.weight.t()
    torch.testing.assert_close(layer.forward(x), expected, rtol=1e-5, atol=1e-4)


def test_mlp_is_the_formula() -> None:
    layer = GatedMLP(8, 12, SINGLE, bias=True)
    filled(layer)
    x = torch.randn(3, 8)
    gate, up = (x @ layer.gate_up.weight.t() + layer.gate_up.bias).chunk(2, -1)
    expected = (gate * gate.sigmoid() * up) @ layer.down.weight.t() + layer.down.bias
    torch.testing.assert_close(layer.forward(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("either")
@each_dtype
def test_rotary_turns_each_pair_by_its_angle(dtype: torch.dtype, tolerance: float) -> None:
    torch.set_default_dtype(dtype)
    try:
        layer = Rotary(RopeConfig(head_dim=8, theta=100.0, original_len=64, context_len=64))
    finally:
        torch.set_default_dtype(torch.float32)
    positions = torch.tensor([0, 5, 63])
    x = torch.randn(3, 2, 8).to(dtype)
    kept = x.clone()
    got = apply_rotary(x, *layer.forward(positions))
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    angles = positions[:, None].double() * 100.0 ** (-torch.arange(4).double() / 4)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    exact = torch.cat((turned.real, turned.imag), -1)
    assert got.dtype == dtype
    assert x.equal(kept)
    assert ((got.double() - exact).abs() <= 4 * tolerance * (exact.abs() + 1)).all()


def test_linear_rope_is_positions_pressed_together() -> None:
    plain = Rotary(RopeConfig(8, 100.0, 64, 64)).forward(torch.tensor([3]))
    pressed = Rotary(RopeConfig(8, 100.0, 64, 256, RopeKind.LINEAR, 4.0)).forward(torch.tensor([12]))
    torch.testing.assert_close(pressed, plain)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    rope = RopeConfig(64, 10000.0, 4096, 16384, RopeKind.YARN, 4.0, attention_factor=1.2)
    plain = RopeConfig(64, 10000.0, 4096, 4096).inverse_frequencies()
    ratio = plain / rope.inverse_frequencies()
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(4.0)
    assert (ratio[1:] >= ratio[:-1] - 1e-6).all()
    cos, sin = Rotary(rope).forward(torch.tensor([7]))
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full_like(cos, 1.2))


def test_a_tied_head_shares_the_embedding() -> None:
    embed = Embedding(300, 64, SINGLE)
    head = LMHead(64, 300, SINGLE, tied=embed)
    filled(embed)
    assert head.weight is embed.weight
    hidden = embed.forward(torch.tensor([7]))
    assert hidden.equal(embed.weight[7:8])
    torch.testing.assert_close(head.forward(hidden), hidden @ embed.weight.t())
    assert LMHead(64, 300, SINGLE).weight.shape == (300, 64)


def test_batch_invariant_products_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"weight \[4, 16\] of torch.float32 on cpu; allowed: bfloat16"):
        make_batch_invariant(Linear(16, 4))


def test_batch_invariance_is_refused_to_products_that_are_not_those_of_the_layers() -> None:
    mixed = nn.ModuleDict({"norm": RMSNorm(8, 1e-5), "own": nn.Linear(8, 8)})
    with pytest.raises(ConfigError, match=r"own is a Linear with its own parameters"):
        make_batch_invariant(mixed)


def test_layers_may_differ_in_their_rotation() -> None:
    ropes = [RopeConfig(head_dim=8, theta=theta, original_len=32, context_len=32) for theta in (100.0, 9.0)]
    positions = torch.tensor([3, 17])
    rotation = LayerRotary((ropes[0], None, ropes[1], ropes[0])).forward(positions)
    qkv, counts = torch.randn(2, 5, 8), HeadCounts(3, 1)
    for layer, rope in enumerate((ropes[0], None, ropes[1], ropes[0])):
        group = PagedKVPool(CacheGroup(4, 1, 8), 2, 4, torch.float32, "cpu")
        place = KVPlace(group, layer, torch.tensor([5, 2]))
        q = rotation.rotate_and_store(qkv, counts, None, place)
        k = group.keys(layer).view(-1, 1, 8)[[5, 2]]
        expected = qkv[:, :4]
        if rope is not None:
            expected = apply_rotary(expected, *Rotary(rope).forward(positions))  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(torch.cat((q, k), 1), expected)
        torch.testing.assert_close(group.values(layer).view(-1, 1, 8)[[5, 2]], qkv[:, 4:])
