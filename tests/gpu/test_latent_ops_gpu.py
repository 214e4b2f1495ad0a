"""Test the kernel that prepares latent attention on a CUDA device, against plain float64 mathematics."""

from __future__ import annotations

import pytest
import torch

from dovetail.layers.rope import RopeConfig
from dovetail.layers.rotary import rotary_table
from dovetail.ops.latent import rotate_and_store_latents

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
RANK, ROPE, NOPE = 512, 64, 128


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 16), (5, 128), (2000, 16)])
@pytest.mark.parametrize(
    ("pool_dtype", "scaled"),
    [(torch.bfloat16, False), (torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True)],
    ids=["bfloat16", "fp8", "fp8 with scales"],
)
def test_rotates_queries_and_stores_latents(
    pool_dtype: torch.dtype, scaled: bool, tokens: int, heads: int, interleaved: bool
) -> None:
    torch.manual_seed(0)
    table = rotary_table(RopeConfig(ROPE, 1e4, 4096, 4096), torch.device("cuda"))
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    places = torch.randperm(4 * 600, device="cuda")[:tokens]
    q = torch.randn(tokens, heads, NOPE + ROPE, device="cuda").bfloat16()
    first = torch.randn(tokens, 16 + RANK + ROPE, device="cuda").bfloat16()
    weight = (torch.rand(RANK, device="cuda") + 0.5).bfloat16()
    keys = torch.full((2400, 1, RANK + ROPE), 7.0, device="cuda").to(pool_dtype)
    scales = torch.full((2400, 1), 7.0, device="cuda", dtype=torch.bfloat16) if scaled else None
    out = torch.full((tokens, heads, RANK + ROPE), 7.0, device="cuda", dtype=torch.bfloat16)
    rotate_and_store_latents(
        q[..., NOPE:],
        out[..., RANK:],
        first[:, 16:],
        (weight, 1e-6),
        table,
        positions,
        keys,
        places,
        scales=scales,
        interleaved=interleaved,
    )
    rows = table[positions].double()

    def turned(x: torch.Tensor) -> torch.Tensor:
        x, half = x.double(), ROPE // 2
        low, high = (x[..., 0::2], x[..., 1::2]) if interleaved else x.split(half, -1)
        cos, sin = rows[:, 0, None, half:], rows[:, 1, None, half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    torch.testing.assert_close(out[..., RANK:].double(), turned(q[..., NOPE:]), atol=0.02, rtol=0.01)
    assert (out[..., :RANK] == 7).all()
    latent = first[:, 16 : 16 + RANK].double()
    normed = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    stored = torch.cat((normed, turned(first[:, None, 16 + RANK :])[:, 0]), 1)
    rough = 0.01 if pool_dtype is torch.bfloat16 else 0.07
    read = keys[places, 0].double()
    if scales is not None:
        largest = stored.abs().amax(1, keepdim=True)
        torch.testing.assert_close(scales[places].double(), largest / 448, atol=0, rtol=0.01)
        read = read * scales[places].double()
    torch.testing.assert_close(read, stored, atol=2 * rough, rtol=rough)
    others = torch.ones(2400, dtype=torch.bool, device="cuda").index_fill_(0, places, False)
    assert (keys[others].float() == 7).all()
