"""Test paged attention of one query per row, interpreted, against attention in float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_decode_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.triton import decode, pages
from dovetail.ops.triton.decode import (
    LARGE_TILE_RESIDENT,
    decode_splits,
    is_measured,
    long_splits,
    paged_decode,
    tiling,
    unit_of,
)

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


@pytest.mark.sample(5)
@pytest.mark.parametrize(("splits", "long"), [(1, False), (3, False), (8, False), (8, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "page"), [(4, 2, 16, 1), (6, 1, 24, 16), (2, 2, 128, 4)])
@pytest.mark.parametrize(
    ("window", "soft_cap", "with_sinks"), [(None, None, False), (9, None, True), (None, 2.0, False), (70, 3.0, True)]
)
def test_rows_of_many_lengths(splits, long, heads, kv_heads, size, page, window, soft_cap, with_sinks):
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
        q, keys, values, table, kv_lens, 0.3, splits=splits, long=long, window=window, soft_cap=soft_cap, sinks=sinks
    )
    keys, values = keys.nan_to_num(), values.nan_to_num()
    wanted, wanted_lse = expected(q, keys, values, table, kv_lens, 0.3, window, soft_cap, sinks)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)


def test_parts_that_are_no_multiples_of_a_block(monkeypatch):
    """Steps whose programs all run at the same time have equal parts, and not whole blocks of keys."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 60, 16, 1, 16).unbind(0)
    table, kv_lens = torch.randperm(60, dtype=torch.int32).view(3, 20), torch.tensor([310, 33, 97], dtype=torch.int32)
    q = torch.randn(3, 2, 16)
    monkeypatch.setattr(decode, "tiling", lambda *_, **__: decode.LARGE_TILE)
    assert unit_of(decode.LARGE_TILE, 3, 3 * 3, 132) == 32 < decode.LARGE_TILE.keys
    out, lse = paged_decode(q, keys, values, table, kv_lens, 0.3, splits=3)  # of 128, 32 and 64 keys
    wanted, wanted_lse = expected(q, keys, values, table, kv_lens, 0.3, None, None, None)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)


def test_units_of_parts():
    large, resident = decode.LARGE_TILE, 132 * LARGE_TILE_RESIDENT
    assert unit_of(large, 3, resident, 132) == 32
    assert unit_of(large, 3, resident + 1, 132) == unit_of(large, 2, resident, 132) == large.keys
    assert unit_of(decode.MIDDLE_TILE, 3, 8, 132) == decode.MIDDLE_TILE.keys


@pytest.mark.sample(3)
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


@pytest.mark.parametrize("pool", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("splits", "whole"), [(1, 256), (3, 8)], ids=["keys in one part", "keys in two"])
@pytest.mark.parametrize("unit", [1.0, 2.0**-60, 2.0**60])
def test_pools_of_8_bits(pool, splits, whole, unit, monkeypatch):
    """Products are in float16. Queries of any magnitude keep their bits, and so do values below the normal numbers of e4m3."""
    monkeypatch.setattr(pages, "WHOLE", whole)
    torch.manual_seed(0)
    tiny = torch.ones(24)
    tiny[::5] = 2.0**-12
    keys, values = (torch.randn(2, 24, 8, 2, 24) * 8 * tiny).to(pool).unbind(0)
    table, kv_lens = torch.randperm(24, dtype=torch.int32).view(3, 8), torch.tensor([1, 37, 64], dtype=torch.int32)
    q = torch.randn(3, 4, 24).bfloat16() * unit / 8
    out, lse = paged_decode(q, keys, values, table, kv_lens, 1 / unit, splits=splits)
    wanted, wanted_lse = expected(q, keys.double(), values.double(), table, kv_lens, 1 / unit, None, None, None)
    assert ((out.double() - wanted).abs() / (8 * tiny)).max() < 1e-2
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("size", "first"), [(25, 0), (26, 1), (24, 0)])
def test_values_of_8_bits_may_be_at_odd_places(size, first):
    """Then two neighbouring values are not one integer of 16 bits."""
    torch.manual_seed(0)
    keys = torch.randn(8, 4, 1, size).to(torch.float8_e4m3fn)
    values = keys[..., first : first + 12]
    table, kv_lens = torch.randperm(8, dtype=torch.int32).view(2, 4), torch.tensor([3, 16], dtype=torch.int32)
    q = torch.randn(2, 4, size).half()
    out, _ = paged_decode(q, keys, values, table, kv_lens, 0.2, splits=1)
    wanted, _ = expected(q, keys.double(), values.double(), table, kv_lens, 0.2, None, None, None)
    torch.testing.assert_close(out.double(), wanted, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_without_keys(splits):
    pool = torch.full((2, 3, 4, 2, 16), float("nan"))
    table = torch.zeros(1, 2, dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int32)
    out, lse = paged_decode(torch.randn(1, 4, 16), *pool.unbind(0), table, none, 1.0, splits=splits)
    assert (lse == float("-inf")).all()
    assert (out == 0).all()


@pytest.mark.parametrize("processors", [132, 108])
@pytest.mark.parametrize("kv_heads", [8, 4])
def test_parts_end_in_as_few_rounds_as_possible(processors, kv_heads):
    """Every program of a step reads the same number of keys. A step takes as many rounds of resident programs as are
    needed for all of them, and a round of shorter parts takes less time."""

    def time(rows, splits):
        return -(-rows * kv_heads * splits // (LARGE_TILE_RESIDENT * processors)) / splits

    for rows in range(1, 3 * processors // kv_heads + 1):
        tiles = rows * kv_heads
        found = decode_splits(rows, kv_heads, processors, True)
        if tiling(256, 256, tiles, processors).keys == 128:
            assert all(time(rows, found) <= time(rows, splits) for splits in (2, 3, max(2, 4 * processors // tiles)))
    splits = long_splits(kv_heads, processors)
    assert time(1, splits) == 1 / splits, "one round"
    assert time(1, splits + 1) > 1 / (splits + 1), "which is full"


def test_parts_of_steps_that_were_measured():
    assert [decode_splits(rows, 8, 132, True) for rows in (1, 8, 16, 32, 48, 64, 256)] == [32, 8, 3, 3, 2, 1, 1]
    assert decode_splits(32, 8, 132, False) == 2, "for keys of other sizes another number of programs is resident"
    sizes = [(128, 128, 2, 2), (128, 128, 2, 1), (64, 64, 2, 2), (64, 128, 2, 2), (128, 128, 4, 2)]
    assert [is_measured(*each) for each in sizes] == [True, True, False, False, False]
    assert tiling(256, 128, 256, 132).num_stages == 2, "keys of 64 and values of 128 numbers of 16 bits"


def test_tiles_of_steps_that_were_measured():
    """Each was the fastest of three for rows of equal lengths on an H200, or within 2 % of it; from 192 rows on, for rows of
    different lengths."""
    rows = (8, 16, 64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert [tiling(256, 256, 8 * n, 132).keys for n in rows] == [64, 128, 128, 64, 128, 32, 32, 64, 32, 32, 32]
    assert [tiling(128, 128, 8 * n, 132).keys for n in rows] == [64, 128, 128, 64, 64, 64, 64, 64, 32, 32, 32]
