"""Test the compiled CPU kernels against float64 references.

.venv/bin/python -m pytest -q tests/core/test_cpu_kernels.py
"""

import math

import numpy as np
import pytest
import torch

from dovetail.ops.cpu import library as building
from dovetail.ops.cpu.kernels import PagedKV, kernels
from dovetail.ops.mxfp4 import dequantize

pytestmark = pytest.mark.skipif(
    building.library().handle is None, reason=f"no compiled kernels: {building.library().text}"
)

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


def close(got, expected, dtype):
    got, bound = got.double(), TOLERANCES[dtype]
    assert ((got - expected).abs() <= bound * (1 + expected.abs())).all(), (got - expected).abs().max()


@each_dtype
@pytest.mark.parametrize("size", [1, 7, 64, 300])
@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(dtype, size, rows, add):
    x, residual = (torch.randn(rows, size).to(dtype) for _ in range(2))
    weight = torch.rand(size).to(dtype)
    total = (x + residual) if add else x.clone()
    given = x.clone()
    got = kernels(dtype).rms_norm(given, weight, 1e-5, residual if add else None)
    wide = total.double()
    assert given.equal(total)
    close(got, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), dtype)


@each_dtype
def test_rms_norm_of_heads_within_wider_rows(dtype):
    heads = torch.randn(9, 6, 16).to(dtype)[:, :4]
    weight = torch.rand(4, 16).to(dtype)
    kept = heads.clone()
    got = kernels(dtype).rms_norm(heads, weight, 1e-6)
    wide = kept.double()
    assert heads.equal(kept)
    close(got, wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double(), dtype)


@each_dtype
@pytest.mark.parametrize("size", [2, 16, 64, 96])
@pytest.mark.parametrize("tokens", [1, 70])
def test_rotary(dtype, size, tokens):
    x = torch.randn(tokens, 7, size).to(dtype)[:, :5]
    angles = torch.randn(tokens, 1, size // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    first, second = x.double().chunk(2, -1)
    expected = x.double() * cos.double() + torch.cat((second, first), -1) * sin.double()
    close(kernels(dtype).rotary(x, cos, sin), expected, dtype)


def test_rotary_of_one_head_takes_any_view():
    """The stride of a dimension of one entry has no meaning: a part of the only token's row has that of the row."""
    part, angles = torch.randn(1, 24)[:, None, 16:], torch.randn(1, 1, 8)
    assert part.stride(1) == 24
    rotary = kernels(torch.float32).rotary
    assert rotary(part, angles, angles).equal(rotary(part.clone(), angles, angles))


@each_dtype
@pytest.mark.parametrize("width", [1, 40, 704])
def test_silu_mul_over_the_whole_range_of_exponents(dtype, width):
    x = torch.randn(33, 2 * width).to(dtype)
    x[0, :width] = torch.linspace(-200, 200, width)
    gate, up = x.double().chunk(2, 1)
    close(kernels(dtype).silu_mul(x), torch.nn.functional.silu(gate) * up, dtype)


@each_dtype
def test_gelu_tanh_mul_over_the_whole_range_of_exponents(dtype):
    x = torch.randn(33, 1408).to(dtype)
    x[0, :704] = torch.linspace(-200, 200, 704)
    gate, up = x.double().chunk(2, 1)
    close(kernels(dtype).gelu_tanh_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up, dtype)


@each_dtype
def test_a_norm_may_have_a_weight_of_more_bits(dtype):
    x, weight = torch.randn(9, 64).to(dtype), 1 + torch.rand(64) * 1e-3  # in bfloat16 they would all be 1
    exact = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-5)
    got = kernels(dtype).rms_norm(x, weight, 1e-5)
    close(got, exact, dtype)
    assert dtype is torch.float32 or not got.equal(kernels(dtype).rms_norm(x, weight.to(dtype), 1e-5))


def test_not_a_number_stays_one():
    for dtype in TOLERANCES:
        x = torch.ones(2, 8).to(dtype)
        x[1, 3] = float("nan")
        assert kernels(dtype).silu_mul(x)[1].isnan().any()
        assert kernels(dtype).rms_norm(x, torch.ones(8, dtype=dtype), 1e-5)[1].isnan().all()
        assert not kernels(dtype).rms_norm(x, torch.ones(8, dtype=dtype), 1e-5)[0].isnan().any()


def test_bfloat16_is_rounded_to_nearest_even():
    x = torch.randn(400, 64)
    x[0, :6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.3e38, -0.0, 1e-40, float("inf")])
    ones = torch.full_like(x, 1e30)  # in float32, silu is the identity at these values
    got = kernels(torch.bfloat16).silu_mul(torch.cat((ones, torch.ones_like(x)), 1).bfloat16())
    assert got.equal(ones.bfloat16())
    add = kernels(torch.bfloat16).rms_norm  # the sum is written back, rounded once
    a, b = x.bfloat16(), torch.randn(400, 64).bfloat16()
    total = a.clone()
    add(total, torch.ones(64).bfloat16(), 1e-5, b)
    assert total.equal(a + b)


@each_dtype
@pytest.mark.parametrize("tokens", [1, 3, 500])
def test_store(dtype, tokens):
    k, v = (torch.randn(tokens, 9, 16).to(dtype)[:, i : i + 2] for i in (0, 4))
    keys, values = (poisoned(800, 2, 16, dtype=dtype) for _ in range(2))
    places = torch.randperm(800)[:tokens]
    kernels(dtype).store(k, v, keys, values, places)
    assert keys[places].equal(k)
    assert values[places].equal(v)
    assert int(keys.isnan().all(-1).all(-1).sum()) == 800 - tokens


PRODUCTS = [(1, 1), (3, 32), (4, 31), (5, 64), (7, 5), (33, 31), (64, 300), (2400, 512), (130, 96), (257, 705)]


@each_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), PRODUCTS)
@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 19])
def test_product(dtype, bias, rows, width, inputs):
    weight, x = torch.randn(rows, width).to(dtype), torch.randn(inputs, width).to(dtype)
    shift = torch.randn(rows).to(dtype) if bias else None
    exact = x.double() @ weight.double().t() + (shift.double() if bias else 0)
    got = kernels(dtype).product(x, weight, shift)
    assert got.dtype is dtype
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= TOLERANCES[dtype] * (math.sqrt(width) + exact.abs())).all()


@each_dtype
@pytest.mark.parametrize(("rows", "width"), PRODUCTS)
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype, rows, width):
    weight, x, shift = (torch.randn(*shape).to(dtype) for shape in ((rows, width), (19, width), (rows,)))
    alone = torch.cat([kernels(dtype).product(row[None], weight, shift) for row in x])
    for inputs in range(1, 20):
        assert kernels(dtype).product(x[:inputs], weight, shift).equal(alone[:inputs])
        assert kernels(dtype).product(x[-inputs:], weight, shift).equal(alone[-inputs:])


@each_dtype
def test_the_order_of_a_weights_rows_changes_nothing_in_their_products(dtype):
    weight, x = torch.randn(23, 300).to(dtype), torch.randn(5, 300).to(dtype)
    order = torch.randperm(23)
    whole = kernels(dtype).product(x, weight)
    assert kernels(dtype).product(x, weight[order]).equal(whole[:, order])


def test_a_product_refuses_what_is_not_contiguous():
    weight, x = torch.randn(8, 64), torch.randn(4, 64)
    for given in ((x, weight.t().contiguous().t()), (torch.randn(64, 4).t(), weight), (x[:, ::2], weight[:, :32])):
        with pytest.raises(AssertionError):
            kernels(torch.float32).product(*given)


def reference(q, keys, values, window, scale, soft_cap, sinks):
    """Compute one query ``[heads, d]`` over ``keys, values [n, kv_heads, d]`` in float64."""
    if window:
        keys, values = keys[-window:], values[-window:]
    folds = q.shape[0] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(folds, 1) for x in (keys, values))
    scores = torch.einsum("hd,nhd->hn", q.double(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if sinks is not None:
        weights = torch.softmax(torch.cat((scores, sinks.double()[:, None]), 1), 1)[:, :-1]
    else:
        weights = torch.softmax(scores, 1)
    return torch.einsum("hn,nhd->hd", weights, values)


@each_dtype
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (6, 1, 128), (3, 3, 40), (16, 2, 16)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks"), [(None, None, False), (5, None, False), (None, 2.0, False), (70, 3.0, True)]
)
def test_attention_reads_pages_and_nothing_else(dtype, heads, kv_heads, size, page_size, window, soft_cap, sinks):
    lens, queries = [1, 17, 130, 64, 200], [1, 3, 1, 64, 5]
    pages = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(pages) + 5).int()
    table = torch.full((len(lens), max(pages) + 3), 2**30, dtype=torch.int32)
    keys, values = (poisoned(sum(pages) + 5, page_size, kv_heads, size, dtype=dtype) for _ in range(2))
    rows, start = [], 0
    for row, (count, n) in enumerate(zip(pages, lens, strict=True)):
        mine = order[start : start + count]
        start += count
        table[row, :count] = mine
        k, v = (torch.randn(count * page_size, kv_heads, size).to(dtype) for _ in range(2))
        k[n:], v[n:] = float("nan"), float("nan")
        keys[mine.long()], values[mine.long()] = (x.view(count, page_size, kv_heads, size) for x in (k, v))
        rows.append((k[:n], v[:n]))
    q = torch.randn(sum(queries) + 2, heads, size).to(dtype)
    out = poisoned(*q.shape, dtype=dtype)
    sink = torch.randn(heads) if sinks else None
    spans, first = [], 1  # the first and the last token belong to no row
    for row, count in enumerate(queries):
        spans.append((row, first, count, lens[row] - count))
        first += count
    scale = 1 / math.sqrt(size)
    kernels(dtype).attend(
        q,
        PagedKV(keys, values, table),
        np.array(spans[::-1], np.int64),
        out,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sink,
    )
    assert out[0].isnan().all()
    assert out[-1].isnan().all()
    for row, place, count, position in spans:
        for i in range(count):
            k, v = (x[: position + i + 1] for x in rows[row])
            expected = reference(q[place + i], k, v, window, scale, soft_cap, sink)
            close(out[place + i], expected, dtype)


def test_a_row_does_not_depend_on_the_others():
    keys, values = (torch.randn(40, 16, 2, 64) for _ in range(2))
    table = torch.randperm(40)[:30].int().view(3, 10)
    q = torch.randn(3, 4, 64)
    kv, spans = PagedKV(keys, values, table), np.array([(0, 0, 1, 150), (1, 1, 1, 3), (2, 2, 1, 77)], np.int64)
    together, alone = torch.empty_like(q), torch.empty_like(q)
    kernels(torch.float32).attend(q, kv, spans, together, scale=0.1)
    for i in range(3):
        kernels(torch.float32).attend(q, kv, spans[i : i + 1].copy(), alone, scale=0.1)
    assert together.equal(alone)


def test_no_kernels_for_other_dtypes():
    assert kernels(torch.float16) is None
    assert kernels(torch.float64) is None


def test_without_a_compiler_the_reason_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = building.library.__wrapped__()
    assert found.handle is None
    assert "g++" in found.text
    assert "install" in found.text


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    fake = tmp_path / "g++"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo fake 1 && exit 0\necho "no such flag" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = building.library.__wrapped__()
    assert found.handle is None
    assert "no such flag" in found.text
    assert not list((tmp_path / "cache" / "dovetail").glob("*.so"))


def test_it_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert building.library.__wrapped__().handle is not None
    (file,) = (tmp_path / "dovetail").glob("*.so")
    before = file.stat().st_mtime_ns
    assert building.library.__wrapped__().handle is not None
    assert file.stat().st_mtime_ns == before


@each_dtype
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (7, 96), (130, 288)])
def test_products_of_mxfp4_codes(dtype, rows, width):
    """All codes and scales that have numbers in the dtype; a row does not depend on the others."""
    codes = torch.randint(256, (rows, width // 2), dtype=torch.uint8)
    wide = torch.arange(width // 32 * rows).view(width // 32, rows) % 250 + 3
    ours = kernels(dtype)
    assert ours.mxfp4_weight(codes, wide.to(torch.uint8)).equal(dequantize(codes, wide.to(torch.uint8), dtype))
    scale = torch.randint(115, 125, (width // 32, rows), dtype=torch.uint8)
    weight, bias = dequantize(codes, scale, torch.float64), torch.randn(rows).to(dtype)
    x = torch.randn(9, width).to(dtype)
    whole = ours.mxfp4_product(x, codes, scale, bias)
    close(whole, x.double() @ weight.T + bias.double(), dtype)
    for m in (1, 4):
        assert ours.mxfp4_product(x[:m], codes, scale, bias).equal(whole[:m])
    assert ours.mxfp4_product(x[:0], codes, scale).shape == (0, rows)


@each_dtype
def test_the_number_of_threads_changes_no_bit(dtype, set_threads):
    """The engine changes it while it runs (``engine.adaptive_threads``)."""
    ours, heads = kernels(dtype), torch.randn(70, 8, 64).to(dtype)
    keys, values = (torch.randn(40, 16, 4, 64).to(dtype) for _ in range(2))
    kv = PagedKV(keys, values, torch.randperm(40).int().view(4, 10))
    spans = np.array([(0, 0, 1, 159), (1, 1, 1, 70), (2, 2, 4, 100), (3, 6, 64, 0)], np.int64)
    x, weight, bias = torch.randn(9, 576).to(dtype), torch.randn(1000, 576).to(dtype), torch.randn(1000).to(dtype)
    codes = torch.randint(256, (1000, 288), dtype=torch.uint8)
    scale = torch.randint(115, 125, (18, 1000), dtype=torch.uint8)
    wide, angles = torch.randn(70, 2 * 1024).to(dtype), torch.randn(70, 1, 64).to(dtype)

    def attend(count):
        out = torch.zeros_like(heads)
        ours.attend(heads, kv, spans[:count], out, scale=0.1)
        return out

    def results():
        return [
            *(attend(count) for count in (1, 2, 3, 4)),
            *(ours.product(x[:m], weight, bias) for m in (1, 4, 9)),
            ours.mxfp4_product(x, codes, scale, bias),
            ours.mxfp4_weight(codes, scale),
            ours.rms_norm(wide.clone(), wide[0].contiguous(), 1e-5),
            ours.rotary(heads, angles, angles),
            ours.silu_mul(wide),
            ours.gelu_tanh_mul(wide),
        ]

    found = []
    for threads in (1, 2, 3, 5):
        set_threads(threads)
        found.append(results())
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
