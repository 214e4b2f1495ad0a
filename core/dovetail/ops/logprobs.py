"""Compute log-probabilities of chosen tokens and of the most likely ones, with two kernels on CUDA and with torch
elsewhere."""

from __future__ import annotations

import torch


def chosen_and_top(
    logits: torch.Tensor, tokens: torch.Tensor, chosen: torch.Tensor, top: torch.Tensor, top_ids: torch.Tensor
) -> None:
    """Write the natural logarithms of probabilities (softmax of ``logits [n, V]`` in float32): of ``tokens`` (int64
    ``[n]``) to ``chosen`` (float32 ``[n]``), and of the ``k`` most likely tokens, in descending order, to ``top``
    (float32 ``[n, k]``), with the ids of these tokens in ``top_ids`` (int64 ``[n, k]``).

    ``k`` is at least 1 and at most ``V``. Which of several equal logits are listed is not defined. On CUDA nothing
    waits for the device, so that a graph may be captured.
    """
    if logits.device.type == "cuda":
        from dovetail.ops.triton.logprobs import chosen_and_top as kernel

        return kernel(logits, tokens, chosen, top, top_ids)
    logp = torch.log_softmax(logits.float(), dim=-1)
    torch.gather(logp, 1, tokens[:, None], out=chosen[:, None])
    best = logp.topk(top.shape[1], dim=-1)
    top.copy_(best.values)
    top_ids.copy_(best.indices)
