"""Dense attention over one group of rows: the kernel PyTorch has for it, or plain matrix products.

Shapes: R rows, H query heads, K key heads (H a multiple of K), Q queries and N keys a row, D head_dim.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from dovetail.interfaces.attention import AttentionLayer

_SCORES = 1 << 22  # elements of a score matrix that plain products hold at a time: 16 MiB in float32


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, layer: AttentionLayer
) -> torch.Tensor:
    """``q [R, H, Q, D]`` over ``k, v [R, K, N, D]``; returns ``[R, H, Q, D]``. The softmax is taken in float32.

    ``mask`` is added to the logits, ``[R or 1, 1, Q or 1, N]`` in q's dtype. ``causal`` (only without a mask, and where
    Q == N) lets query i see keys ``[0, i]``. Every query must see at least one key.
    """
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    if layer.soft_cap is not None or layer.sinks is not None:
        return _plain(q, k, v, mask, causal, layer)
    if q.shape[2] > 1:
        return _fused(q, k, v, mask, causal, layer.scale)
    rows, heads, _, dim = q.shape
    group = heads // k.shape[1]
    folded = q.view(rows, k.shape[1], group, dim)  # the query heads of one key head become its queries
    if mask is not None:
        mask = mask.expand(-1, -1, group, -1)
    return _fused(folded, k, v, mask, False, layer.scale).reshape(rows, heads, 1, dim)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    if q.device.type != "cpu":
        return _sdpa(q, k, v, mask, causal, scale)
    if q.shape[2] == 1 and q.dtype != torch.float32:  # products with a single row in 16 bits are several times slower
        wide = None if mask is None else mask.float()
        return _fused(q.float(), k.float(), v.float(), wide, causal, scale).to(q.dtype)
    # What scaled_dot_product_attention calls, after choosing for 2 us.
    return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)[0]


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    gqa = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, layer: AttentionLayer
) -> torch.Tensor:
    rows, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.float().view(rows, kv_heads, heads // kv_heads, queries, dim)
    k_t, values = k.float().transpose(2, 3), v.float()
    out = torch.empty_like(q)
    step = max(1, _SCORES // (rows * heads * keys))
    for start in range(0, queries, step):
        part = slice(start, min(start + step, queries))
        scores = torch.matmul(grouped[..., part, :].flatten(2, 3), k_t).view(rows, heads, -1, keys).mul_(layer.scale)
        if layer.soft_cap is not None:
            scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
        if causal:
            scores += torch.full_like(scores[0, 0], float("-inf")).triu_(start + 1)
        elif mask is not None:
            scores += mask if mask.shape[2] == 1 else mask[:, :, part]
        weights = _softmax(scores, layer.sinks).view(rows, kv_heads, -1, keys)
        out[:, :, part] = torch.matmul(weights, values).view(rows, heads, -1, dim)
    return out


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores, -1)
    sink = sinks.view(1, -1, 1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = torch.exp(scores - top)
    return weights.div_(weights.sum(-1, keepdim=True) + torch.exp(sink - top))
