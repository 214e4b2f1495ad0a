"""Merge attention over two sets of keys, by the log-sum-exps of each."""

from __future__ import annotations

import torch


def merge_states(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Return ``out [tokens, heads, d]``, the attention over the union of two disjoint sets of keys, in a new tensor
    with the dtype of ``out_b``.

    ``lse_a`` and ``lse_b`` are the log-sum-exps of each set, float32 ``[heads, tokens]`` (natural logarithm). An
    infinite or NaN log-sum-exp means that a query saw no key of that set; its output is then not read. Every query must
    have seen a key of at least one set. See Ye et al., arXiv 2501.01005.
    """
    if out_b.is_cuda:
        from dovetail.ops.triton.merge import merge_states as kernel

        return kernel(out_a, lse_a, out_b, lse_b)
    weights = torch.stack([lse_a, lse_b]).permute(0, 2, 1)[..., None]  # [2, tokens, heads, 1]
    weights = weights.masked_fill(~weights.isfinite(), float("-inf")).softmax(0)
    outs = torch.stack([out_a, out_b]).float().masked_fill(weights == 0, 0.0)
    return (weights * outs).sum(0).to(out_b.dtype)
