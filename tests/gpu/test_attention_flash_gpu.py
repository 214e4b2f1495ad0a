"""flash_attn on CUDA, with whichever provider is installed.

Run on a GPU machine: python -m pytest tests/gpu/test_attention_flash_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.testing.attention import AttentionSuite
from dovetail.testing.attention_reference import Case, Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def provider():
    from dovetail_attention.flash_attn.backend import probe

    if (reason := probe()) is not None:
        pytest.skip(f"no FlashAttention here: {reason}")


class TestFlashAttention(AttentionSuite):
    name = "flash_attn"
    device = "cuda"

    @pytest.mark.parametrize("page_size", [16, 64])
    @torch.inference_mode()
    def test_rows_that_lie_in_one_piece_and_end_with_a_tile(self, page_size: int):
        """Tiles are copied whole there; what other rows or nobody own is poisoned with NaN."""
        case = Case(
            [0, 128, 1024],
            [128, 256, 512],
            num_extend=3,
            ordered_pages=True,
            heads=8,
            kv_heads=2,
            head_dim=128,
            dtype=torch.bfloat16,
            page_size=page_size,
        )
        step = Step(self.fit(case), self.find_device())
        backend = self.make(step.context())
        step.batch.runs = step.batch.page_table[:, 0].cpu().numpy()
        backend.plan(step.batch)
        assert (backend._parts[0].starts is not None) == backend._takes_starts
        self.compare_output(step, backend.forward(step.q, step.layer, step.batch))
