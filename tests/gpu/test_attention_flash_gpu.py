"""flash_attn on CUDA, with whichever provider is installed.

Run on a GPU machine: python -m pytest tests/gpu/test_attention_flash_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.testing.attention import AttentionSuite

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


class TestFlashAttention(AttentionSuite):
    name = "flash_attn"
    device = "cuda"
