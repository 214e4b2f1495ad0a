"""Compute dense attention over one group of rows, with PyTorch's fused kernel or with plain matrix products.

Shapes: R rows, H query heads, K key heads (H a multiple of K), Q queries and N keys a row, D head_dim.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from dovetail.interfaces.attention import AttentionLayer

_SCORES = 1 << 22  # the largest number of scores that plain products hold at a time: 16 MiB in float32


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, layer: AttentionLayer
) -> torch.Tensor:
    """Return the attention of ``q [R * Q, H, D]``, row after row, over ``k, v [R, K, N, D]``, as ``[R * Q, H, D]``.

    ``mask`` is added to the logits: ``[R or 1, 1, Q, N]`` in q's dtype. ``causal`` lets query i see keys ``[0, i]``; it
    is allowed only without a mask and where Q == N. Every query must see at least one key. The softmax is computed in
    float32.
    """
    tokens, heads, dim = q.shape
    rows, kv_heads = k.shape[:2]
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    plain = layer.soft_cap is not None or layer.sinks is not None
    if tokens == rows and not plain:  # the query heads of one key head become the queries of that head
        folded = q.view(rows, kv_heads, heads // kv_heads, dim)
        if mask is not None:
            mask = mask.expand(-1, -1, heads // kv_heads, -1)
        return _fused(folded, k, v, mask, False, layer.scale).reshape(rows, heads, dim)
    by_head = q.view(rows, -1, heads, dim).transpose(1, 2)
    out = _plain(by_head, k, v, mask, causal, layer) if plain else _fused(by_head, k, v, mask, causal, layer.scale)
    return out.transpose(1, 2).reshape(tokens, heads, dim)


def attend_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, out: torch.Tensor) -> None:
    """Write the causal attention of one row to ``out [Q, H, Dv]``: of ``q [Q, H, D]``, its last queries, over all of its
    keys ``k [N, H, D]`` and ``v [N, H, Dv]``, with Dv <= D. Queries are divided so that masks stay small."""
    queries, keys = len(q), len(k)
    wide = functional.pad(v, (0, k.shape[2] - v.shape[2]))  # the kernels want both of one size
    by_head, values = k.transpose(0, 1)[None], wide.transpose(0, 1)[None]
    step = max(1, _SCORES // keys)
    for start in range(0, queries, step):
        end = min(start + step, queries)
        seen = keys - queries + end
        whole, mask = end - start == seen, None  # queries of all keys
        if not whole:
            mask = q.new_zeros(end - start, seen).fill_(float("-inf")).triu_(seen - (end - start) + 1)[None, None]
        part = attend(q[start:end], by_head[:, :, :seen], values[:, :, :seen], mask, whole, layer)
        out[start:end] = part[..., : v.shape[2]]


def attend_shared(
    q: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Do the same as ``attend`` on the CPU, where every row also sees all keys of ``shared``, ``[1, K, S, D]``, before
    its own.

    The results of both parts are weighted by their log-sum-exps, as in Hydragen (arXiv 2402.05099). The result is
    exact.
    """
    tokens, heads, dim = q.shape
    rows, kv_heads = own[0].shape[:2]
    folds = heads // kv_heads
    # The query heads of one key head become queries of that head: for the shared keys of all rows together, for the
    # other keys row by row.
    together = q.view(tokens, kv_heads, folds, dim).transpose(0, 1).reshape(1, kv_heads, tokens * folds, dim)
    by_row = q.view(rows, -1, kv_heads, folds, dim).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)
    if mask is not None:
        mask = mask.repeat(1, 1, folds, 1)
    first, first_sum = _weighed(together, *shared, None, scale)
    second, second_sum = _weighed(by_row, *own, mask, scale)
    queries = tokens // rows
    first = first.view(kv_heads, rows, queries, folds, dim).permute(1, 2, 0, 3, 4).reshape(tokens, heads, dim)
    first_sum = first_sum.view(kv_heads, rows, queries, folds).permute(1, 2, 0, 3).reshape(tokens, heads, 1)
    second = second.view(rows, kv_heads, folds, queries, dim).permute(0, 3, 1, 2, 4).reshape(tokens, heads, dim)
    second_sum = second_sum.view(rows, kv_heads, folds, queries).permute(0, 3, 1, 2).reshape(tokens, heads, 1)
    share = torch.sigmoid(first_sum - second_sum)
    if q.dtype == torch.float32:
        return torch.lerp(second, first, share)
    return torch.lerp(second.float(), first.float(), share).to(q.dtype)


def _weighed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output and the log-sum-exps of the logits, float32 ``[R, K, Q]``."""
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    out, sums = torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out.contiguous(), sums.contiguous()


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    if q.device.type != "cpu":
        return _sdpa(q, k, v, mask, causal, scale)
    if q.shape[2] == 1 and q.dtype != torch.float32:  # products with one row are several times slower in 16 bits
        wide = None if mask is None else mask.float()
        return _fused(q.float(), k.float(), v.float(), wide, causal, scale).to(q.dtype)
    # scaled_dot_product_attention calls this too, but first takes 2 us to choose it.
    return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)[0]


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> torch.Tensor:
    gqa = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, layer: AttentionLayer
) -> torch.Tensor:
    """Return the attention of ``q [R, H, Q, D]`` by plain matrix products, in the same shape."""
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
            scores += mask[:, :, part]
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
