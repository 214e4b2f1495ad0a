"""Test torch_native and the KV pool on CUDA.

Run on a GPU machine: python -m pytest tests/gpu/test_attention_gpu.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail.interfaces.cache import CacheGroup
from dovetail.memory.pool import PagedKVPool, pool_dtype
from dovetail.testing.attention import AttentionSuite
from dovetail.testing.attention_cases import STEPS
from dovetail.testing.attention_reference import AttentionStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestTorchNativeOnCuda(AttentionSuite):
    name = "torch_native"
    device = "cuda"

    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize("features", [{}, {"window": 5}, {"soft_cap": 2.0, "sinks": True}], ids=str)
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")
    @torch.inference_mode()
    def test_forward_never_waits_for_the_device(self, step: str, features: dict[str, object]):
        prepared = AttentionStep(replace(STEPS[step][0], **features), torch.device("cuda"))
        backend = self.make(prepared.context())
        backend.plan(prepared.batch)
        backend.forward(prepared.q, prepared.layer, prepared.batch)  # a window is planned when it is first met
        backend.plan(prepared.batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = backend.forward(prepared.q, prepared.layer, prepared.batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.compare_output(prepared, out)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_8_bits_round_and_saturate_as_on_the_cpu(name: str, dtype: torch.dtype):
    stored = []
    values = torch.cat([torch.randn(4000) * 3, torch.randn(4000) * 1e-2, torch.linspace(-1e5, 1e5, 8000)]).to(dtype)
    values[0] = torch.nan
    for device in ("cpu", "cuda"):
        pool = PagedKVPool(CacheGroup(2, 2, 16), 600, 1, pool_dtype(name), device)
        k = values.view(-1, 2, 16).to(device)
        places = torch.arange(1, 1 + len(k), device=device)
        pool.store(1, k, -k, places)
        pool.copy(places[:3], places[:3] + len(k))
        stored.append([x.cpu().float()[1 : 4 + len(k)] for x in (pool.keys(1), pool.values(1))])
    torch.testing.assert_close(stored[1], stored[0], equal_nan=True, rtol=0, atol=0)


def test_store_and_copy():
    pool = PagedKVPool(CacheGroup(2, 2, 16), 8, 4, torch.bfloat16, "cuda")
    k, v = torch.randn(2, 3, 2, 16, device="cuda")
    pool.store(1, k, v, torch.tensor([4, 30, 9], device="cuda"))
    pool.copy(torch.tensor([4, 30], device="cuda"), torch.tensor([30, 17], device="cuda"))
    assert torch.equal(pool.keys(1).flatten(0, 1)[[30, 17, 9]], k.bfloat16())
    assert torch.equal(pool.values(1).flatten(0, 1)[[30, 17, 9]], v.bfloat16())


def test_a_pool_starts_as_zeros():
    group = CacheGroup(2, 2, 64)
    junk = [torch.full((2, 64, 128, 2, 64), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    junk.clear()  # their memory is what the pool gets
    pool = PagedKVPool(group, 64, 128, torch.bfloat16, "cuda")
    assert not pool.k.any()
    assert not pool.v.any()
