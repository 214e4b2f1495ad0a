"""Sampling, masks and penalties on CUDA against the torch reference in float64, on the vocabularies of real models.

Run on a GPU machine: python -m pytest tests/gpu/test_sampling_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.bitmask import apply_bitmask, bitmask_width
from dovetail.ops.logprobs import chosen_and_top
from dovetail.ops.penalties import apply_penalties, count_tokens
from dovetail.ops.sampling import Filters, greedy, sample, sample_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCABS = [128256, 151936, 50257]
SETTINGS = {  # (temperature, top_k, top_p, min_p) of rows, cycled; top_k 0: off
    "plain": [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (2.0, 0, 1.0, 0.0)],
    "top_k": [(1.0, 50, 1.0, 0.0), (0.7, 1, 1.0, 0.0), (1.0, 400, 1.0, 0.0), (1.0, 20000, 1.0, 0.0)],
    "top_p": [(1.0, 0, 0.95, 0.0), (0.6, 0, 0.5, 0.0), (1.0, 0, 1e-9, 0.0), (1.5, 0, 0.999, 0.0)],
    "min_p": [(1.0, 0, 1.0, 0.1), (0.6, 0, 1.0, 0.001), (1.0, 0, 1.0, 1.0), (1.5, 0, 1.0, 0.0)],
    "all": [(0.6, 50, 0.9, 0.05), (1.0, 5000, 0.8, 0.0), (0.0, 7, 0.3, 0.2), (1.3, 0, 0.9, 0.0001), (1.0, 0, 1.0, 0.0)],
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_filters(n: int, vocab: int, name: str) -> Filters:
    rows = [SETTINGS[name][i % len(SETTINGS[name])] for i in range(n)]
    t, k, p, m = (torch.tensor(c, device="cuda", dtype=torch.float64)[:, None] for c in zip(*rows, strict=True))
    k = torch.where(k == 0, vocab, k).long()
    off = {"top_k": name in ("top_k", "all"), "top_p": name in ("top_p", "all"), "min_p": name in ("min_p", "all")}
    columns = {key: value for key, value in zip(off, (k, p, m), strict=True) if off[key]}
    return Filters(t.float(), **columns, any_greedy=True)


def assert_like_reference(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor, got: torch.Tensor) -> None:
    """Check that tokens are equal nearly everywhere, and otherwise between those that the reference draws at 0.00002 to either side.

    Weights are float32: among 100,000 tokens of like probability a row in ten may draw an adjacent token, or keep one token
    more or less within top-p, because the probability of a token is about that size.
    """
    exact, low, high = (
        sample_reference(logits.double(), filters, (uniform + shift).clamp(0, 1 - 2**-53)) for shift in (0, -2e-5, 2e-5)
    )
    right = (got >= low) & (got <= high)
    assert (got == exact).double().mean() > 0.8 or len(got) < 20
    assert right.all(), f"rows {(~right).nonzero()[:, 0].tolist()}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("n", [1, 3, 256])
def test_greedy_takes_the_first_of_the_best(n: int, vocab: int, dtype: torch.dtype):
    logits = torch.randn(n, vocab, device="cuda").to(dtype)
    logits[0, [vocab - 1, vocab // 2, vocab // 3]] = 9.0
    assert greedy(logits).tolist() == logits.float().cpu().numpy().argmax(-1).tolist()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("dtype", "vocab"), list(zip(DTYPES, VOCABS, strict=True)), ids=str)
@pytest.mark.parametrize("n", [1, 3, 256])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_draws_equal_the_reference(n: int, vocab: int, dtype: torch.dtype, name: str, spread: float):
    logits = (torch.randn(n, vocab, device="cuda") * spread).to(dtype)
    logits[n // 2, torch.rand(vocab, device="cuda") < 0.99] = float("-inf")
    filters = make_filters(n, vocab, name)
    for _ in range(3):
        uniform = torch.rand(n, dtype=torch.float64, device="cuda")
        assert_like_reference(logits, filters, uniform, sample(logits, filters, uniform))


@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_graph_reads_what_its_buffers_hold_when_it_is_replayed(name: str):
    n, vocab = 64, 128256
    logits = torch.empty(n, vocab, device="cuda", dtype=torch.bfloat16).normal_()
    uniform = torch.rand(n, dtype=torch.float64, device="cuda")
    filters = make_filters(n, vocab, name)
    out = torch.empty(n, dtype=torch.int64, device="cuda")
    sample(logits, filters, uniform, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, filters, uniform, out)
        best = greedy(logits)
    for _ in range(3):
        logits.normal_(std=3)
        uniform.uniform_()
        filters.temperature.copy_(filters.temperature.roll(1, 0))
        out.fill_(-1)
        graph.replay()
        assert_like_reference(logits, filters, uniform, out)
        assert torch.equal(best, logits.float().argmax(-1))


def test_a_row_draws_the_same_whatever_is_beside_it():
    logits = torch.randn(64, 128256, device="cuda", dtype=torch.bfloat16)
    uniform = torch.rand(64, dtype=torch.float64, device="cuda")
    for name in SETTINGS:
        filters = make_filters(64, 128256, name)
        together = sample(logits, filters, uniform)
        columns = {key: getattr(filters, key) for key in ("temperature", "top_k", "top_p", "min_p")}
        for i in range(0, 64, 7):
            alone = Filters(**{key: c if c is None else c[i : i + 1] for key, c in columns.items()}, any_greedy=True)
            assert sample(logits[i : i + 1], alone, uniform[i : i + 1]) == together[i]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_many_draws_follow_the_distribution(top_p: float):
    vocab, rows = 1000, 20000
    logits = torch.randn(1, vocab, device="cuda") * 2
    filters = Filters(
        torch.full((rows, 1), 0.8, device="cuda"),
        top_p=torch.full((rows, 1), top_p, device="cuda", dtype=torch.float64),
    )
    drawn = sample(
        logits.expand(rows, vocab).contiguous(), filters, torch.rand(rows, dtype=torch.float64, device="cuda")
    )
    probs, order = (logits[0].double() / 0.8).softmax(-1).sort(descending=True)
    if top_p < 1:
        probs[probs.cumsum(0) - probs >= top_p] = 0
    expected = torch.zeros_like(probs).scatter_(0, order, probs / probs.sum()) * rows
    seen = torch.bincount(drawn, minlength=vocab).double()
    assert seen[expected == 0].sum() == 0
    keep = expected >= 5
    statistic = ((seen - expected).square() / expected)[keep].sum().item()
    degrees = int(keep.sum()) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 6


def test_what_is_no_number_still_gives_a_token():
    logits = torch.randn(5, 128256, device="cuda", dtype=torch.bfloat16)
    logits[0], logits[1, 17], logits[2], logits[3, 99] = float("nan"), float("nan"), float("-inf"), float("inf")
    uniform = torch.rand(5, dtype=torch.float64, device="cuda")
    for name in SETTINGS:
        got = sample(logits, make_filters(5, 128256, name), uniform)
        assert ((got >= 0) & (got < 128256)).all()
        assert got[3] == 99
    assert ((greedy(logits) >= 0) & (greedy(logits) < 128256)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_masks_touch_the_forbidden_tokens_of_their_rows_alone(vocab: int, dtype: torch.dtype):
    words = torch.randint(-(2**31), 2**31, (4, bitmask_width(vocab)), device="cuda").int()
    logits = torch.randn(6, vocab, device="cuda").to(dtype)
    rows = torch.tensor([4, 0, 2, 5])
    expected = logits.cpu()
    apply_bitmask(expected, words.cpu(), rows)
    apply_bitmask(logits, words, rows.cuda())
    assert torch.equal(logits.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_penalties_follow_their_formula(vocab: int, dtype: torch.dtype):
    torch.manual_seed(vocab)
    logits = (torch.randn(4, vocab, device="cuda") * 4).to(dtype)
    in_prompt = torch.rand(4, vocab, device="cuda") < 0.01
    counts = torch.where(torch.rand(4, vocab, device="cuda") < 0.01, 3, 0)
    table = torch.full((6, vocab), -99, dtype=torch.int32, device="cuda")
    slots = torch.tensor([5, 2, 0, 1], device="cuda")
    table[slots] = (2 * counts + in_prompt).int()
    settings = torch.tensor([[1.4, 0.5, 0.0], [1.0, 0.0, 0.3], [0.7, 0.1, 0.2], [1.0, 0.0, 0.0]], device="cuda")
    x, (r, p, f) = logits.double(), settings.double()[:, :, None].unbind(1)
    expected = (
        torch.where(in_prompt | (counts > 0), torch.where(x > 0, x / r, x * r), x) - (counts > 0) * p - counts * f
    )
    out = torch.full((4, vocab), float("nan"), device="cuda")
    apply_penalties(logits, table, slots, settings, out)
    assert torch.equal(out[3], logits[3].float())
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    tokens = torch.randint(0, vocab, (4,), device="cuda")
    before = table.clone()
    count_tokens(table, slots, tokens, torch.tensor([2], dtype=torch.int32, device="cuda"))
    before[slots, tokens] += 2
    assert torch.equal(table, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("top", [1, 5, 20])
def test_log_probabilities_are_those_of_a_softmax(vocab: int, dtype: torch.dtype, top: int):
    torch.manual_seed(vocab)
    logits = (torch.randn(5, vocab, device="cuda") * 4).to(dtype)
    logits[1, top:] = float("-inf")
    logits[2] = 1.0
    tokens = torch.randint(0, top, (5,), device="cuda")
    chosen, best = torch.full((5,), float("nan"), device="cuda"), torch.full((5, top), float("nan"), device="cuda")
    ids = torch.full((5, top), -1, device="cuda")
    chosen_and_top(logits, tokens, chosen, best, ids)
    exact = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(chosen.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(best.double(), exact.topk(top).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(best.double(), exact.gather(1, ids), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == top for row in ids.tolist())
