"""Test gated norms on the CPU against float64. tests/triton and tests/gpu use the same reference.

Run: python -m pytest tests/core/test_gated_norm.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.gated_norm import gated_rms_norm
from recurrences import check_gated_norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("groups", "size"), [(1, 80), (3, 12)])
def test_gated_norm(groups, size, norm_first, dtype, tolerance):
    check_gated_norm(gated_rms_norm, groups, size, norm_first, dtype, tolerance)
