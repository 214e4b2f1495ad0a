"""Test flash_attn on CUDA, with any provider that is installed.

Run on a GPU machine: python -m pytest tests/gpu/test_attention_flash_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.testing.attention import AttentionSuite
from dovetail.testing.attention_divided import DividedRows
from dovetail.testing.attention_reference import AttentionCase, AttentionStep
from dovetail_attention.flash_attn.latent import TRITON

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def provider():
    from dovetail_attention.flash_attn.providers import open_first

    opened, reasons = open_first(torch.cuda.get_device_capability(), page_size=16)
    if opened is None:
        pytest.skip(f"no FlashAttention here: {'; '.join(reasons)}")


class TestFlashAttentionLatent(AttentionSuite):
    name = "flash_attn_mla"
    device = "cuda"

    @pytest.fixture(autouse=True)
    def reads_latents(self):
        from dovetail_attention.flash_attn.providers import open_first

        opened, reasons = open_first(torch.cuda.get_device_capability(), page_size=16, latents=True)
        if opened is None:
            pytest.skip(f"no FlashAttention-3 here: {'; '.join(reasons)}")

    @pytest.mark.parametrize("prefix", [[33_000], [9000, 3], [0]], ids=str)
    @torch.inference_mode()
    def test_few_rows(self, prefix: list[int]):
        """Decode steps of few rows have kernels of another backend, also between steps of other kinds."""
        latents = {"heads": 16, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "scale": 192**-0.5}
        case = AttentionCase(prefix, [1] * len(prefix), page_size=16, dtype=torch.bfloat16, **latents)
        step = AttentionStep(case, torch.device("cuda"))
        backend = self.make(step.context())
        assert backend.variant(step.batch) == TRITON
        for variant in (TRITON, 0, TRITON):
            step.batch.variant = variant
            for plan in (backend.plan, backend.plan_capture):
                plan(step.batch)
                self.compare_output(step, backend.forward(step.q, step.layer, step.batch))


class TestFlashAttention(AttentionSuite):
    name = "flash_attn"
    device = "cuda"

    @pytest.mark.parametrize("page_size", [16, 128])
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1), (8, 8)])
    @torch.inference_mode()
    def test_bits_do_not_depend_on_the_division_of_long_rows(self, head_dim, page_size, heads, kv_heads):
        """Every tile is tested: tiles of causal rows depend on head_dim, and on whether the page table is read by
        TMA."""
        shape = {"head_dim": head_dim, "page_size": page_size, "heads": heads, "kv_heads": kv_heads}
        lens = [2000, 700, 3, 300]
        rows = DividedRows(self.fit(AttentionCase([], [], dtype=torch.bfloat16, **shape)), lens, torch.device("cuda"))
        for memory in (rows.whole.pool.k, rows.whole.pool.v):
            memory.nan_to_num_(nan=0.0)  # TMA reads whole pages, and zero times NaN is NaN
        backend = self.make(rows.whole.context())

        def attend(parts, num_extend):
            step = rows.step(parts, num_extend)
            backend.plan(step.batch)
            return backend.forward(step.q, step.layer, step.batch)

        expected = attend([(0, 0, 2000)], 1)
        for start in (0, 1, 127, 128, 129, 640, 1500, 1872, 1990, 1999):
            for parts, num_extend in (
                ([(0, start, 2000)], 1),
                ([(0, start, 2000), (1, 600, 700), (2, 2, 3)], 2),
                ([(0, start, 2000), (3, 299, 300), (2, 2, 3)], 0),
            ):
                out = attend(parts, num_extend)[: 2000 - start]
                assert torch.equal(out, expected[start:]), f"queries {start} to 2000 beside {parts[1:]}"
