"""Test merging attention states, interpreted, against attention over all keys at once.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_merge_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops import merge
from dovetail.ops.triton.merge import merge_states


def attend(q, k, v):
    """Attend ``q [tokens, heads, d]`` over ``k, v [keys, heads, d]``; return output and log-sum-exp."""
    scores = torch.einsum("thd,khd->htk", q, k)
    return torch.einsum("htk,khd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("merged_by", [merge_states, merge.merge_states], ids=["triton", "torch"])
@pytest.mark.parametrize(("heads", "size"), [(1, 16), (6, 40), (32, 128)])
def test_merged_states_are_attention_over_all_keys(merged_by, heads, size):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, heads, size), *torch.randn(2, 20, heads, size)
    expected, _ = attend(q, k, v)
    a, b = attend(q, k[:13], v[:13]), attend(q, k[13:], v[13:])
    torch.testing.assert_close(merged_by(*a, *b), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("merged_by", [merge_states, merge.merge_states], ids=["triton", "torch"])
@pytest.mark.parametrize("nothing", [float("-inf"), float("inf"), float("nan")])
def test_what_saw_no_key_counts_for_nothing(merged_by, nothing):
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 2, 16), *torch.randn(2, 9, 2, 16)
    out, lse = attend(q, k, v)
    other, other_lse = torch.full_like(out, float("nan")), torch.full_like(lse, nothing)
    torch.testing.assert_close(merged_by(other, other_lse, out, lse), out)
    torch.testing.assert_close(merged_by(out, lse, other, other_lse), out)
