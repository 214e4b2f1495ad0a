"""Test paged attention of one query per row, interpreted, against attention in float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_decode_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.triton import decode, pages
from dovetail.ops.triton.decode import paged_decode

LENS = [1, 7, 64, 65, 130]


def expected(q, keys, values, table, kv_lens, scale, window, soft_cap, sinks):
    heads, kv_heads = q.shape[1], keys.shape[2]
    outs, logs = [], []
    for row, length in enumerate(kv_lens.tolist()):
        begin = 0 if window is None else max(0, length - window)
        k, v = (
            x[table[row].long()].flatten(0, 1)[begin:length].double().repeat_interleave(heads // kv_heads, 1)
            for x in (keys, values)
        )
        scores = torch.einsum("hd,khd->hk", q[row].double(), k) * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
            v = torch.cat([v, torch.zeros_like(v[:1])])
        outs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
        logs.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(logs, 1)


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "page"), [(4, 2, 16, 1), (6, 1, 24, 16), (2, 2, 128, 4)])
@pytest.mark.parametrize(
    ("window", "soft_cap", "with_sinks"), [(None, None, False), (9, None, True), (None, 2.0, False), (70, 3.0, True)]
)
def test_rows_of_many_lengths(splits, heads, kv_heads, size, page, window, soft_cap, with_sinks):
    torch.manual_seed(0)
    rows, pages = len(LENS), -(-max(LENS) // page)
    keys, values = torch.full((2, rows * pages + 2, page, kv_heads, size), float("nan")).unbind(0)
    table = (torch.randperm(rows * pages, dtype=torch.int32) + 1).view(rows, pages)
    for row, length in enumerate(LENS):
        places = table[row].long()[:, None] * page + torch.arange(page)
        for pool in (keys, values):
            pool.view(-1, kv_heads, size)[places.flatten()[:length]] = torch.randn(length, kv_heads, size)
    q, kv_lens = torch.randn(rows, heads, size), torch.tensor(LENS, dtype=torch.int32)
    sinks = torch.randn(heads) if with_sinks else None
    out, lse = paged_decode(
        q, keys, values, table, kv_lens, 0.3, splits=splits, window=window, soft_cap=soft_cap, sinks=sinks
    )
    keys, values = keys.nan_to_num(), values.nan_to_num()
    wanted, wanted_lse = expected(q, keys, values, table, kv_lens, 0.3, window, soft_cap, sinks)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("whole", [8, 64], ids=["keys in two parts", "keys in one"])
@pytest.mark.parametrize("heads", [20, 6])
@pytest.mark.parametrize("large", [8, 64], ids=["blocks of heads", "all heads"])
def test_values_may_be_the_first_part_of_keys(splits, whole, heads, large, monkeypatch):
    monkeypatch.setattr(pages, "WHOLE", whole)
    monkeypatch.setattr(decode, "LARGE", large)
    torch.manual_seed(0)
    keys, table = torch.randn(40, 16, 1, 24), torch.randperm(40, dtype=torch.int32).view(4, 10)
    q, kv_lens = torch.randn(4, heads, 24), torch.tensor([1, 17, 99, 160], dtype=torch.int32)
    out, lse = paged_decode(q, keys, keys[..., :16], table, kv_lens, 0.3, splits=splits)
    wanted, wanted_lse = expected(q, keys, keys[..., :16], table, kv_lens, 0.3, None, None, None)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_without_keys(splits):
    pool = torch.full((2, 3, 4, 2, 16), float("nan"))
    table = torch.zeros(1, 2, dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int32)
    out, lse = paged_decode(torch.randn(1, 4, 16), *pool.unbind(0), table, none, 1.0, splits=splits)
    assert (lse == float("-inf")).all()
    assert (out == 0).all()
