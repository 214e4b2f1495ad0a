"""triton attention on CUDA: the conformance suite in every dtype, graphs included.

Run on a GPU machine: python -m pytest tests/gpu/test_attention_triton_gpu.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail.testing.attention import SHARED_STEPS, STEPS, AttentionSuite
from dovetail.testing.attention_reference import Case, Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestTritonOnCuda(AttentionSuite):
    name = "triton"
    device = "cuda"

    @pytest.mark.parametrize("step", SHARED_STEPS)
    @pytest.mark.parametrize("window", [7, 20, 60])
    def test_a_window_may_begin_before_in_or_behind_what_is_shared(self, step: str, window: int):
        self.compare(replace(SHARED_STEPS[step], window=window))

    @pytest.mark.parametrize("head_dim", [24, 80, 192, 256])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("step", ["mixed", "decode", "extend after a prefix", "trees"])
    def test_more_head_dims(self, head_dim: int, dtype: torch.dtype, step: str):
        self.compare(replace(STEPS[step][0], head_dim=head_dim, dtype=dtype, page_size=16))

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_trees_of_several_tiles(self, dtype: torch.dtype, window: int | None, head_dim: int):
        trees = [[node // 3 - 1 for node in range(63)], [(node * 7) % (node + 1) - 1 for node in range(39)], []]
        case = Case([300, 0, 40], [64, 40, 1], trees=trees, heads=8, head_dim=head_dim, page_size=16)
        self.compare(replace(case, dtype=dtype, window=window))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("groups", [None, [(100, 512), (12, 1024), (1, 0), (2, 16)]], ids=["alone", "shared"])
    def test_many_rows(self, dtype: torch.dtype, groups: list[tuple[int, int]] | None):
        prefix = [512 + 11 * row % 300 for row in range(100)] + [1024 + row for row in range(12)] + [2, 16, 17, 1900]
        case = Case(prefix, [1] * len(prefix), page_size=16, groups=groups, dtype=dtype, heads=8, head_dim=128)
        self.compare(case)

    @pytest.mark.parametrize("step", [*STEPS, *SHARED_STEPS])
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")
    @torch.inference_mode()
    def test_nothing_waits_for_the_device(self, step: str):
        case = SHARED_STEPS[step] if step in SHARED_STEPS else STEPS[step][0]
        prepared = Step(replace(case, window=50), torch.device("cuda"))
        backend = self.make(prepared.context())
        for mode in ("default", "error"):  # kernels are compiled in the first turn
            torch.cuda.set_sync_debug_mode(mode)
            try:
                backend.plan(prepared.batch)
                out = backend.forward(prepared.q, prepared.layer, prepared.batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self.compare_output(prepared, out)
