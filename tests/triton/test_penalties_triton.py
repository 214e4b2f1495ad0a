"""Test the kernels of penalties, token counts and log-probabilities, interpreted on the CPU, and the torch paths beside
them, against numpy in float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_penalties_triton.py
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ops import logprobs as logprobs_in_torch
from dovetail.ops import penalties as penalties_in_torch
from dovetail.ops.triton import logprobs as logprobs_kernel
from dovetail.ops.triton import penalties as penalties_kernel
from dovetail.ops.triton import sampling

PENALTIES = [penalties_in_torch, penalties_kernel]
LOGPROBS = [logprobs_in_torch, logprobs_kernel]
SLOTS = 5
UNDEFINED = -77  # entries of slots that must not be read


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 256)
    monkeypatch.setattr(penalties_kernel, "BLOCK", 128)


def by_definition(logits: np.ndarray, prompt: set[int], output: list[int], penalties: tuple[float, ...]) -> np.ndarray:
    """Return the penalised logits of one row, token by token in float64."""
    repetition, presence, frequency = penalties
    row = logits.astype(np.float64)
    for token in prompt | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= presence + output.count(token) * frequency
    return row


@pytest.mark.parametrize("ops", PENALTIES, ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_penalties_of_counted_tokens_follow_their_definition(ops: ModuleType, dtype: torch.dtype, data: st.DataObject):
    vocab = data.draw(st.sampled_from([7, 300]))
    token = st.integers(0, vocab - 1)
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    texts = [(data.draw(st.sets(token, max_size=6)), data.draw(st.lists(token, max_size=12))) for _ in slots]
    some = st.floats(-2, 2, width=16)
    rows = [data.draw(st.tuples(st.sampled_from([1.0, 0.5, 1.3, 9.0]), some, some)) for _ in slots]
    table = torch.full((SLOTS, vocab), UNDEFINED, dtype=torch.int32)
    for slot, (prompt, _) in zip(slots, texts, strict=True):
        table[slot] = 0
        table[slot, list(prompt)] = penalties_in_torch.IN_PROMPT
    pairs = [(slot, t) for slot, (_, output) in zip(slots, texts, strict=True) for t in output]
    added = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    amount = torch.tensor([penalties_in_torch.IN_OUTPUT], dtype=torch.int32)
    ops.count_tokens(table, added[:, 0].contiguous(), added[:, 1].contiguous(), amount)
    ops.count_tokens(table, torch.tensor(slots), torch.zeros(len(slots), dtype=torch.int64), amount * 0)

    wide = (torch.randn(len(slots), vocab + 3) * 4).to(dtype)
    logits, out = wide[:, :vocab], torch.full((len(slots), vocab), float("nan"))
    given_settings = torch.tensor(rows)
    got = ops.apply_penalties(logits, table, torch.tensor(slots), given_settings, out)
    assert got is out
    for row, (prompt, output) in enumerate(texts):
        expected = by_definition(logits[row].double().numpy(), prompt, output, tuple(given_settings[row].tolist()))
        np.testing.assert_allclose(out[row].double().numpy(), expected, rtol=1e-5, atol=1e-5)
    same = logits.float().clone()
    assert ops.apply_penalties(same, table, torch.tensor(slots), given_settings, same) is same
    assert torch.equal(same, out)


@pytest.mark.parametrize("ops", PENALTIES, ids=["torch", "triton"])
def test_rows_without_penalties_are_copied_and_their_counts_not_read(ops: ModuleType):
    logits, table = torch.randn(3, 300).half(), torch.full((3, 300), UNDEFINED, dtype=torch.int32)
    table[1] = 2
    rows = torch.tensor([[1.0, 0, 0], [1.0, 0, 0.5], [1.0, 0, 0]])
    out = ops.apply_penalties(logits, table, torch.tensor([0, 1, 2]), rows, torch.empty(3, 300))
    assert torch.equal(out[[0, 2]], logits.float()[[0, 2]])
    assert torch.equal(out[1], logits[1].float() - 0.5)


@pytest.mark.parametrize("ops", PENALTIES, ids=["torch", "triton"])
def test_each_token_has_its_own_amount(ops: ModuleType):
    table = torch.zeros(3, 40, dtype=torch.int32)
    slots, tokens = torch.tensor([1, 1, 2, 1]), torch.tensor([7, 7, 39, 8])
    ops.count_tokens(table, slots, tokens, torch.tensor([2, 2, 0, 4], dtype=torch.int32))
    expected = torch.zeros_like(table)
    expected[1, 7], expected[1, 8] = 4, 4
    assert torch.equal(table, expected)


@pytest.mark.parametrize("ops", LOGPROBS, ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "top"), [(1, 1), (20, 20), (300, 1), (300, 20), (2049, 5)])
def test_log_probabilities_are_those_of_a_softmax_in_float64(ops: ModuleType, dtype: torch.dtype, vocab: int, top: int):
    torch.manual_seed(vocab)
    wide = (torch.randn(6, vocab + 5) * 4).to(dtype)
    logits = wide[:, :vocab]
    logits[1] = torch.randn(vocab).mul(1.5).round()  # many equal values
    logits[2, top:] = float("-inf")
    logits[3] = -3.0
    logits[4] *= 100
    tokens = torch.randint(0, min(vocab, top), (6,))
    chosen, best = torch.full((6,), float("nan")), torch.full((6, top), float("nan"))
    ids = torch.full((6, top), -1)
    ops.chosen_and_top(logits, tokens, chosen, best, ids)
    exact = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(chosen.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(best.double(), exact.topk(top).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(best.double(), exact.gather(1, ids), rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == top for row in ids.tolist())
    ops.chosen_and_top(logits[:0], tokens[:0], chosen[:0], best[:0], ids[:0])
