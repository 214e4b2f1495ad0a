"""Attention over two sets of keys from attention over each, by their log-sum-exps."""

from __future__ import annotations

import torch


def merge_states(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """``out [tokens, heads, d]`` with ``lse`` float32 ``[heads, tokens]`` (natural logarithm) of two disjoint sets of keys.

    An infinite or NaN log-sum-exp says that a query saw no key there; its output is then not looked at. Every query must
    have seen a key in one of the sets. Returns a new tensor in the dtype of ``out_b``. See Ye et al., arXiv 2501.01005.
    """
    if out_b.is_cuda:
        from dovetail.ops.triton.merge import merge_states as kernel

        return kernel(out_a, lse_a, out_b, lse_b)
    weights = torch.stack([lse_a, lse_b]).permute(0, 2, 1)[..., None]  # [2, tokens, heads, 1]
    weights = weights.masked_fill(~weights.isfinite(), float("-inf")).softmax(0)
    outs = torch.stack([out_a, out_b]).float().masked_fill(weights == 0, 0.0)
    return (weights * outs).sum(0).to(out_b.dtype)
