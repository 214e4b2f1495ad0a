"""Test sampling and mask kernels, interpreted on the CPU, against the torch references.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_sampling_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.ops.bitmask import apply_bitmask, bitmask_width
from dovetail.ops.sampling import Filters, sample_reference
from dovetail.ops.triton import bitmask as mask_kernel
from dovetail.ops.triton import sampling as kernels

DTYPES = [torch.float32, torch.float16]
OFF = (0, 1.0, 0.0)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several blocks, and fewer candidates than tokens, in small vocabularies."""
    monkeypatch.setattr(kernels, "BLOCK", 256)
    monkeypatch.setattr(kernels, "SLOTS", 16)


def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


def make_filters(vocab: int, temperatures: list[float], settings: list[tuple[int, float, float]] | None) -> Filters:
    """Return filters for settings (top_k, top_p, min_p), top_k 0: off."""
    temperature = column(temperatures, torch.float32)
    greedy = 0.0 in temperatures
    if settings is None:
        return Filters(temperature, any_greedy=greedy)
    top_k, top_p, min_p = zip(*settings, strict=True)
    return Filters(
        temperature,
        column([k or vocab for k in top_k], torch.int64),
        column(list(top_p), torch.float64),
        column(list(min_p), torch.float64),
        greedy,
    )


def draw(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(logits),), -7)
    got = kernels.sample(logits, filters.temperature, filters.top_k, filters.top_p, filters.min_p, uniform, out=out)
    assert got is out
    return out


def assert_like_reference(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor) -> None:
    """Check that tokens are equal, or those that the reference draws a millionth to either side."""
    got = draw(logits, filters, uniform)
    exact = [
        sample_reference(logits.double(), filters, (uniform + shift).clamp(0, 1 - 2**-53)) for shift in (0, -1e-6, 1e-6)
    ]
    assert ((got == exact[0]) | (got == exact[1]) | (got == exact[2])).all(), (got, exact)


def numbers(n: int) -> torch.Tensor:
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 300, 2049])
def test_greedy_takes_the_first_of_the_best(dtype: torch.dtype, vocab: int):
    torch.manual_seed(vocab)
    logits = torch.randn(5, vocab).to(dtype)
    logits[1, [vocab // 2, vocab - 1, vocab // 3]] = 9.0
    logits[2] = float("-inf")
    logits[3, : vocab - 1] = float("-inf")
    logits[4] = -3.0
    assert kernels.greedy(logits).tolist() == logits.double().numpy().argmax(-1).tolist()
    assert kernels.greedy(logits[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 300, 600])
def test_unfiltered_rows_equal_the_reference(dtype: torch.dtype, vocab: int):
    torch.manual_seed(vocab)
    logits = (torch.randn(5, vocab) * 3).to(dtype)
    for temperatures in ([1.0] * 5, [0.0, 0.3, 1.0, 2.5, 0.0], [1e-6, 1e-2, 100.0, 1e6, 1.0]):
        assert_like_reference(logits, make_filters(vocab, temperatures, None), numbers(5))
    ends = torch.tensor([0.0, 1 - 2.0**-53, 0.5, 1e-12, 0.0], dtype=torch.float64)
    assert_like_reference(logits, make_filters(vocab, [1.0] * 5, None), ends)


MIXED = [
    [(5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2), (40, 0.7, 0.01), OFF],
    [(1, 1.0, 0.0), (0, 1e-9, 0.0), (0, 1.0, 1.0), (200, 0.95, 0.0), (200, 1.0, 0.001)],
    [(0, 0.999, 0.0), (299, 1.0, 0.0), (0, 0.0, 0.0), (60, 0.9, 0.5), (250, 0.3, 0.0)],
]


@pytest.mark.parametrize("settings", MIXED, ids=range(3))
@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 300), (torch.float16, 600)], ids=str)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_filtered_rows_equal_the_reference(
    dtype: torch.dtype, vocab: int, spread: float, settings: list[tuple[int, float, float]]
):
    torch.manual_seed(vocab)
    logits = (torch.randn(5, vocab) * spread).to(dtype)
    assert_like_reference(logits, make_filters(vocab, [1.0, 0.6, 1.3, 0.8, 1.0], settings), numbers(5))


@pytest.mark.parametrize("shift", [0, 2])
def test_of_equal_logits_the_first_stay(shift: int):
    logits = torch.randn(5, 500).mul(1.5).round()  # about ten different values, zeros of both signs among them
    logits[4] = 0.0
    settings = [(37, 1.0, 0.0), (0, 0.4, 0.0), (111, 0.63, 0.0), (300, 0.97, 0.1), (7, 0.9, 0.0)]
    uniform = torch.tensor([0.0, 0.31, 0.77, 1 - 2.0**-53, 0.5], dtype=torch.float64).roll(shift)
    for order in (settings, settings[::-1]):
        assert_like_reference(logits, make_filters(500, [0.7] * 5, order), uniform)


@pytest.mark.parametrize("settings", [None, MIXED[0], MIXED[1]], ids=["none", "mixed", "extreme"])
def test_masked_logits_and_greedy_rows_beside_others(settings: list[tuple[int, float, float]] | None):
    logits = torch.randn(5, 700)
    logits[0, torch.arange(700) != 433] = float("-inf")
    logits[1, 10:] = float("-inf")
    logits[3, ::2] = float("-inf")
    filters = make_filters(700, [1.0, 0.5, 0.0, 2.0, 0.0], settings)
    assert_like_reference(logits, filters, numbers(5))
    assert draw(logits, filters, numbers(5))[0] == 433


@pytest.mark.parametrize("settings", [None, MIXED[0]], ids=["none", "mixed"])
@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e3, 1e6])
def test_extreme_temperatures(settings: list[tuple[int, float, float]] | None, temperature: float):
    logits = torch.randn(5, 600) * 20
    assert_like_reference(logits, make_filters(600, [temperature] * 5, settings), numbers(5))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("settings", [None, MIXED[0], MIXED[1]], ids=["none", "mixed", "extreme"])
def test_what_is_no_number_still_gives_a_token(settings: list[tuple[int, float, float]] | None):
    logits = torch.randn(5, 300)
    logits[0] = float("nan")
    logits[1, 17] = float("nan")
    logits[2] = float("-inf")
    logits[3, 99] = float("inf")
    got = draw(logits, make_filters(300, [1.0] * 5, settings), numbers(5))
    assert ((got >= 0) & (got < 300)).all()
    assert got[1] != 17
    assert got[3] == 99
    assert ((kernels.greedy(logits) >= 0) & (kernels.greedy(logits) < 300)).all()


def test_rows_may_lie_apart_and_settings_be_views():
    wide = torch.randn(4, 900)
    logits = wide[:, :700]
    table = torch.tensor([[0.8, 0.5], [1.0, 0.9], [0.0, 1.0], [1.2, 0.2]], dtype=torch.float64)
    temperature = table[:, :1].float()
    got = kernels.sample(logits, temperature, None, table[:, 1:], None, numbers(4))
    filters = Filters(temperature, top_p=table[:, 1:], any_greedy=True)
    assert got.tolist() == sample_reference(logits.double(), filters, numbers(4)).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [31, 64, 2100])
def test_masks_touch_the_forbidden_tokens_of_their_rows_alone(dtype: torch.dtype, vocab: int):
    generator = torch.Generator().manual_seed(vocab)
    words = torch.randint(-(2**31), 2**31, (4, bitmask_width(vocab) + 1), generator=generator).int()[:, :-1]
    words[0], words[1] = 0, -1
    wide = torch.randn(6, vocab + 3, generator=generator).to(dtype)
    rows = torch.tensor([4, 0, 2, 5])
    expected = wide.clone()
    apply_bitmask(expected[:, :vocab], words, rows)
    mask_kernel.apply_bitmask(wide[:, :vocab], words, rows)
    mask_kernel.apply_bitmask(wide[:, :vocab], words[:0], rows[:0])
    assert torch.equal(wide, expected)
    assert (wide[4, :vocab] == float("-inf")).all()
