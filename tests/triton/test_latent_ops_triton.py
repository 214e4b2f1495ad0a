"""Test the kernel that prepares latent attention, interpreted on the CPU, against plain float64 mathematics.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_latent_ops_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.layers.rope import RopeConfig
from dovetail.layers.rotary import rotary_table
from dovetail.ops.kv_scales import token_scales
from dovetail.ops.triton.latent import rotate_and_store_latents

EPS = 1e-6


def turned(x: torch.Tensor, positions: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Return ``x [tokens, heads, rope]`` rotated as complex numbers, the pairs' first elements first."""
    x = x.double()
    rope = x.shape[-1]
    low, high = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : rope // 2], x[..., rope // 2 :])
    frequencies = 10000.0 ** -(torch.arange(0, rope, 2, dtype=torch.float64) / rope)
    angles = (positions[:, None] * frequencies)[:, None]
    product = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((product.real, product.imag), -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(1, 8, 4), (3, 24, 8), (70, 16, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3)], ids=str)
def test_rotates_queries_and_stores_latents(
    dtype: torch.dtype, tolerance: float, heads: int, rank: int, rope: int, interleaved: bool
) -> None:
    torch.manual_seed(0)
    tokens, places = 3, torch.tensor([5, 0, 2])
    wide = torch.randn(tokens, heads, 7 + rope).to(dtype)
    first = torch.randn(tokens, 5 + rank + rope).to(dtype)
    weight, positions = torch.rand(rank).to(dtype) + 0.5, torch.tensor([0, 3, 17])
    table = rotary_table(RopeConfig(rope, 10000.0, 32, 32), torch.device("cpu"))
    keys = torch.full((6, 1, rank + rope), 7.0, dtype=dtype)
    out = torch.full((tokens, heads, rank + rope), 7.0, dtype=dtype)
    q, latents = wide[..., 7:], first[:, 5:]
    before = wide.clone(), first.clone()
    rotate_and_store_latents(
        q, out[..., rank:], latents, (weight, EPS), table, positions, keys, places, interleaved=interleaved
    )
    assert torch.equal(wide, before[0])
    assert torch.equal(first, before[1])
    assert (out[..., :rank] == 7).all(), "only the rotated elements are written"
    exact = turned(q, positions, interleaved=interleaved)
    torch.testing.assert_close(out[..., rank:].double(), exact, atol=tolerance, rtol=tolerance)
    latent = latents[:, :rank].double()
    normed = latent / (latent.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    key = turned(latents[:, None, rank:], positions, interleaved=interleaved)[:, 0]
    stored = torch.cat((normed, key), 1)
    torch.testing.assert_close(keys[places, 0].double(), stored, atol=tolerance, rtol=tolerance)
    untouched = torch.tensor([1, 3, 4])
    assert (keys[untouched] == 7).all()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("rank", "rope"), [(24, 8), (13, 6)])
def test_latents_with_scales(rank: int, rope: int, interleaved: bool) -> None:
    """The largest number of a latent, wherever it is, becomes about the largest number of the dtype, and zeros stay zeros.
    What is stored is what a store keeps of the normalised latent and the rotated key."""
    torch.manual_seed(0)
    tokens, places = 5, torch.tensor([5, 0, 2, 1, 6])
    latents = torch.randn(tokens, rank + rope)
    latents[1, rank:] *= 5000
    latents[2, rank:] = 0
    latents[3] = 0
    weight, positions = torch.rand(rank) + 0.5, torch.tensor([0, 3, 17, 2, 9])
    table = rotary_table(RopeConfig(rope, 10000.0, 32, 32), torch.device("cpu"))
    keys, scales = (
        torch.zeros(8, 1, rank + rope, dtype=torch.float8_e4m3fn),
        torch.full((8, 1), 7.0, dtype=torch.bfloat16),
    )
    q = torch.randn(tokens, 2, rope)
    rotate_and_store_latents(
        q, q, latents, (weight, EPS), table, positions, keys, places, scales=scales, interleaved=interleaved
    )
    latent = latents[:, :rank].double()
    normed = latent / (latent.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    key = turned(latents[:, None, rank:], positions, interleaved=interleaved)[:, 0]
    exact = torch.cat((normed, key), 1).float()
    own = token_scales(exact[:, None], keys.dtype)
    torch.testing.assert_close(scales[places], own, atol=0, rtol=2**-7)
    read = keys[places, 0].float() * scales[places].float()
    bound = 1.02 * (2**-4 * exact.abs() + 2**-9 * exact.abs().amax(1, keepdim=True) / 448)
    right = (read - exact).abs() <= bound
    assert right.float().mean() >= 0.95, "all but those that the interpreter does not round up to a power of two"
    assert torch.where(right, exact, 2 * read).sub(exact).abs().le(2 * bound).all()
    assert (scales[[3, 4, 7]] == 7).all()
    assert not keys[[3, 4, 7]].float().any()


def test_queries_are_rotated_in_place() -> None:
    torch.manual_seed(0)
    q, latents, positions = torch.randn(2, 4, 8), torch.randn(2, 16), torch.tensor([1, 2])
    table = rotary_table(RopeConfig(8, 10000.0, 32, 32), torch.device("cpu"))
    exact, keys = turned(q, positions, interleaved=False), torch.zeros(4, 1, 16)
    rotate_and_store_latents(q, q, latents, (torch.ones(8), EPS), table, positions, keys, positions, interleaved=False)
    torch.testing.assert_close(q.double(), exact, atol=1e-5, rtol=1e-5)


def test_stored_numbers_saturate_in_8_bits() -> None:
    latents = torch.tensor([[1.0, 1.0, 1e4, 0.0]])
    keys = torch.zeros(2, 1, 4, dtype=torch.float8_e4m3fn)
    table, at = rotary_table(RopeConfig(2, 10000.0, 8, 8), torch.device("cpu")), torch.tensor([0])
    q = torch.zeros(1, 1, 2)
    rotate_and_store_latents(q, q, latents, (torch.ones(2), EPS), table, at, keys, torch.tensor([1]), interleaved=False)
    assert keys[1, 0].float().tolist() == [1.0, 1.0, 448.0, 0.0]
