"""Test the layers of models that are not of Llama's family: LayerNorm, the MLP without a gate, and sums of two layers.

Run: python -m pytest tests/core/test_layer_norm_layers.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from dovetail.interfaces.mesh import SINGLE
from dovetail.layers.layer_norm import LayerNorm
from dovetail.layers.mlp import ACTIVATIONS, MLP
from dovetail.layers.norm import RMSNorm
from dovetail.ops.parts import Addend, Parts, RankAddend, sum_addends
from dovetail.testing.ranks import run_ranks, thread_meshes


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def filled(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


def exact(x: torch.Tensor, layer: LayerNorm) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight.double()
    return y if layer.bias is None else y + layer.bias.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_layer_norm_is_the_formula(bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    layer = LayerNorm(24, 1e-3, bias=bias)
    filled(layer)
    layer.to(dtype)
    x, residual = (torch.randn(5, 24).add(3).to(dtype) for _ in range(2))
    before, kept, total = x.clone(), residual.clone(), x + residual
    got = layer.forward(x)
    assert x.equal(before)
    assert ((got.double() - exact(x, layer)).abs() <= tolerance * (exact(x, layer).abs() + 1)).all()
    assert got.equal(torch.cat([layer.forward(row[None]) for row in x]))  # each token alone
    normed, stream = layer.add_forward(x, residual)
    assert stream is x
    assert stream.equal(total)
    assert residual.equal(kept)
    assert ((normed.double() - exact(total, layer)).abs() <= tolerance * (exact(total, layer).abs() + 1)).all()
    normed, stream = layer.add_forward(before, None)
    assert stream is before
    assert normed.equal(got)


def test_layer_norm_adds_up_parts_and_ranks() -> None:
    layer, meshes = LayerNorm(8, 1e-5), thread_meshes(2)
    filled(layer)
    parts, residual = torch.randn(3, 4, 8), torch.randn(4, 8)
    normed, stream = layer.add_forward(Parts(parts), residual)
    torch.testing.assert_close(stream, parts.sum(0) + residual)
    torch.testing.assert_close(normed, exact(stream, layer).float())
    for x in (parts, parts.sum(0)):
        results = run_ranks(
            meshes, lambda mesh, x=x: layer.add_forward(RankAddend(x.clone(), mesh.tp), residual), meshes
        )
        for normed, stream in results:
            torch.testing.assert_close(stream, 2 * parts.sum(0) + residual)
            torch.testing.assert_close(normed, exact(stream, layer).float())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = torch.linspace(-6, 6, 200)
    torch.testing.assert_close(ACTIVATIONS[name](x), ACT2FN[name](x), rtol=1e-5, atol=1e-6)


def test_mlp_is_the_formula() -> None:
    layer, x = MLP(8, 12, SINGLE, "gelu_new"), torch.randn(3, 8)
    filled(layer)
    before = x.clone()
    inner = ACT2FN["gelu_new"](linear(x, layer.up.weight, layer.up.bias))
    torch.testing.assert_close(layer.forward(x), linear(inner, layer.down.weight, layer.down.bias))
    assert x.equal(before)


def test_two_layers_are_added_up_once() -> None:
    """The sum of tensors, parts and addends of ranks is what the next norm adds, in each form."""
    layer, (mesh,) = RMSNorm(8, 1e-5), thread_meshes(1)
    layer.weight.fill_(1.0)
    parts, other, x, residual = torch.randn(3, 4, 8), torch.randn(2, 4, 8), torch.randn(4, 8), torch.randn(4, 8)
    cases: list[tuple[Addend, Addend, torch.Tensor]] = [
        (x, x, 2 * x),
        (Parts(parts), x, parts.sum(0) + x),
        (x, Parts(parts), parts.sum(0) + x),
        (Parts(parts), Parts(other), parts.sum(0) + other.sum(0)),
        (RankAddend(x, mesh.tp), RankAddend(2 * x, mesh.tp), 3 * x),
    ]
    for first, second, expected in cases:
        _, stream = layer.add_forward(sum_addends(first, second), residual)
        torch.testing.assert_close(stream, expected + residual)
