"""Stand in for the kernels of the libraries that flash_attn uses: each behaves as its library documents, and records its
arguments in ``calls``."""

from __future__ import annotations

import torch

calls: list[dict] = []

SCHEMA = """fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q,
Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k,
Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary,
Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_left,
int window_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,
int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"""

SCHEDULE_SCHEMA = """get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,
int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,
Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal,
int window_left, int window_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) -> Tensor"""
schedules: list[tuple] = []


def library_schedule(rows, max_q, max_k, heads, kv_heads, dim, value_dim, dtype, used_k, cu_q, cu_k, cu_new, used_q, leftpad,
                     page_size, max_new, causal, left, right, has_cap, splits, pack, margin):  # fmt: skip
    """Return what ``library_fwd`` compares with its arguments: the number of this schedule, and the lengths."""
    assert cu_k is cu_new is used_q is leftpad is pack is None
    assert max_new == margin == 0
    assert rows == len(used_k)
    key = (max_q, max_k, heads, kv_heads, dim, value_dim, dtype, page_size, causal, left, right, has_cap, splits)
    schedules.append(key)
    return torch.cat((torch.tensor([len(schedules) - 1], dtype=torch.int32), used_k))


def check_schedule(metadata, key, used_k):
    """Assert that a schedule was made for a call with these arguments and lengths."""
    assert schedules[int(metadata[0])] == key
    assert torch.equal(metadata[1:], used_k)


def attend(q, keys, values, *, cu_q, used_k, table, scale, causal, window, cap, sinks=None, nothing=float("-inf"),
           max_q=None, max_k=None, splits=0, qv=None):  # fmt: skip
    """Attend in float64, so that results do not depend on the batch: one query per row if ``cu_q`` is None, otherwise
    ragged queries. ``qv`` is the part of queries that meets the values, which may then have another size than keys.

    Queries without a key get NaN, and ``nothing`` as their log-sum-exp, ``[heads, tokens]`` or ``[rows, heads, 1]``.
    """
    calls.append(
        {"causal": causal, "max_q": max_q, "max_k": max_k, "splits": splits, "window": window, "rows": len(used_k),
         "cu_q": cu_q}
    )  # fmt: skip
    if qv is None:
        assert keys.shape == values.shape
    else:  # what the kernels require
        assert keys.shape[:3] == values.shape[:3]
        assert keys.shape[3] == q.shape[-1] <= 64
        assert values.shape[3] == qv.shape[-1] >= 256
        assert qv.shape[:-1] == q.shape[:-1]
        assert qv.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    assert table.dtype == used_k.dtype == torch.int32
    one_each = cu_q is None
    if one_each:
        assert q.shape[:2] == (len(used_k), 1)
        q, cu_q = q[:, 0], torch.arange(len(used_k) + 1, dtype=torch.int32)
        qv = None if qv is None else qv[:, 0]
    assert cu_q.dtype == torch.int32
    assert len(table) == len(used_k) == len(cu_q) - 1
    assert cu_q[-1] == len(q)
    assert max_q is None or max_q >= int(cu_q.diff().max())
    assert max_k is None or max_k >= int(used_k.max())
    out = q.new_full((*q.shape[:2], values.shape[3]), torch.nan)
    lse = torch.full((q.shape[1], len(q)), nothing)
    page_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    for row, count in enumerate(used_k.tolist()):
        tokens = slice(*cu_q[row : row + 2].tolist())
        if count == 0 or tokens.start == tokens.stop:
            continue
        pages = table[row, : -(-count // page_size)].long()
        k, v = (x[pages].flatten(0, 1)[:count].double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[tokens].double(), k)
        if qv is not None:
            scores = scores + torch.einsum("qhd,khd->hqk", qv[tokens].double(), v)
        scores = scores * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        scores = scores.masked_fill(~seen(tokens.stop - tokens.start, count, causal, window), float("-inf"))
        total = scores.logsumexp(-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double()[:, None])
        out[tokens] = torch.einsum("hqk,khd->qhd", (scores - total[..., None]).exp(), v).to(q.dtype)
        lse[:, tokens] = total.float()
    return (out[:, None], lse.t()[..., None]) if one_each else (out, lse)


def seen(queries, keys, causal, window):
    """Return which keys a query sees. The last query has the position of the last key."""
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    left, right = window
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    allowed = allowed & (distance <= left) if left >= 0 else allowed
    return allowed & (distance >= -right) if right >= 0 else allowed


def library_fwd(q, k, v, k_new, v_new, q_v, out, cu_q, cu_k, cu_k_new, used_q, used_k, max_q, max_k, table, *rest):
    """Do what vLLM's library does."""
    (index, leftpad, cos, sin, rotary, qd, kd, vd, scale, causal, left, right, cap, _, metadata, splits, _, margin,
     sinks, world, rank, lengths) = rest  # fmt: skip
    given = (
        k_new,
        v_new,
        out,
        cu_k_new,
        used_q,
        index,
        leftpad,
        cos,
        sin,
        rotary,
        qd,
        kd,
        vd,
        lengths,
    )
    assert all(value is None for value in given)
    assert (margin, world, rank) == (0, 1, 0)
    assert cu_q is None or max_q is not None
    if table is None:
        assert used_k is q_v is None
        assert (left, right, cap) == (-1, -1, 0.0)
        assert causal
        return [ragged(q, k, v, cu_q, cu_k, max_q, max_k, scale)]
    assert cu_k is None
    if metadata is not None:
        wide = v if q_v is not None else k
        longest = 1 if cu_q is None else max_q
        keys = table.shape[1] * k.shape[1] if cu_q is None else max_k
        check_schedule(metadata, (longest, keys, q.shape[-2], k.shape[2], q.shape[-1], wide.shape[3], q.dtype, k.shape[1], causal,
                                  left, right, cap > 0, splits), used_k)  # fmt: skip
    return list(attend(q, k, v, cu_q=cu_q, used_k=used_k, table=table, scale=scale, causal=causal, window=(left, right),
                       cap=cap, sinks=sinks, max_q=max_q, max_k=max_k, splits=splits, qv=q_v))  # fmt: skip


def ragged(q, k, v, cu_q, cu_k, max_q, max_k, scale):
    """Attend causally over keys that are not in pages."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert max_q >= int(cu_q.diff().max())
    assert max_k >= int(cu_k.diff().max())
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    out = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
    for row in range(len(cu_q) - 1):
        tokens, keys = slice(*cu_q[row : row + 2].tolist()), slice(*cu_k[row : row + 2].tolist())
        scores = torch.einsum("qhd,khd->hqk", q[tokens].double(), k[keys].double()) * scale
        allowed = seen(tokens.stop - tokens.start, keys.stop - keys.start, True, (-1, -1))
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, v[keys].double()).to(q.dtype)
    return out


def varlen_3(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    """Do what FlashAttention-3 does for keys that are not in pages."""
    assert causal
    return ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale)


def varlen_sgl(q, k, v, **keywords):
    """Do the same, and return log-sum-exps too."""
    return varlen_3(q, k, v, **keywords), None


def kvcache_3(q, k, v, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size, softcap,
              num_splits, return_softmax_lse, qv=None):  # fmt: skip
    """Do what FlashAttention-3 does."""
    assert return_softmax_lse
    return *attend(q, k, v, cu_q=cu_seqlens_q, used_k=cache_seqlens, table=page_table, scale=softmax_scale, causal=causal,
                   window=window_size, cap=softcap, max_q=max_seqlen_q, splits=num_splits, qv=qv), None  # fmt: skip


def kvcache_sgl(q, k, v, *, sinks=None, **keywords):
    """Do what sglang-kernel does, which supports sinks too."""
    assert sinks is None
    return kvcache_3(q, k, v, **keywords)


def kvcache_2(q, k, v, *, cache_seqlens, block_table, softmax_scale, causal, window_size, softcap, num_splits,
              return_softmax_lse):  # fmt: skip
    assert return_softmax_lse
    assert k.shape[1] % 256 == 0
    return attend(q, k, v, cu_q=None, used_k=cache_seqlens, table=block_table, scale=softmax_scale, causal=causal,
                  window=window_size, cap=softcap, splits=num_splits)  # fmt: skip


def varlen_2(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap,
             block_table, return_attn_probs):  # fmt: skip
    """Do what FlashAttention-2 does for ragged queries: the log-sum-exp of queries without a key is +inf."""
    assert return_attn_probs
    assert k.shape[1] % 256 == 0
    assert cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_k[0] == 0
    out, lse = attend(
        q, k, v, cu_q=cu_seqlens_q, used_k=cu_seqlens_k.diff(), table=block_table, scale=softmax_scale, causal=causal,
        window=window_size, cap=softcap, max_q=max_seqlen_q, max_k=max_seqlen_k, nothing=float("inf"),
    )  # fmt: skip
    return out, lse, None
