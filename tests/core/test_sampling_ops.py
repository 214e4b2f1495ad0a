"""Test sampling, masks, random numbers and verification against independent references.

.venv/bin/python -m pytest -q tests/core/test_sampling_ops.py
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from dovetail.engine.penalties import SlotText, TokenCounts, paths_of
from dovetail.engine.verify import accept
from dovetail.generation.expansion import derive_seed
from dovetail.ops.bitmask import apply_bitmask, bitmask_width
from dovetail.ops.random import uniform
from dovetail.ops.sampling import Filters, greedy, sample
from dovetail.types import DraftTree

VOCAB = 37


def column(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)[:, None]


def draw(logits, count, **settings):
    """Return ``count`` samples of one row of logits."""
    filters = Filters(
        temperature=column([settings.get("temperature", 1.0)], torch.float32),
        top_k=column([settings["top_k"]], torch.int64) if "top_k" in settings else None,
        top_p=column([settings["top_p"]]) if "top_p" in settings else None,
        min_p=column([settings["min_p"]]) if "min_p" in settings else None,
    )
    numbers = torch.from_numpy(uniform(np.full(count, 11), np.arange(count)))
    return torch.cat([sample(logits[None], filters, numbers[i : i + 1]) for i in range(count)])


def hf_probs(logits, settings):
    """Return the distribution that transformers' own warpers give."""
    scores = logits[None].double()
    if "temperature" in settings:
        scores = hf.TemperatureLogitsWarper(settings["temperature"])(None, scores)
    if "top_k" in settings:
        scores = hf.TopKLogitsWarper(settings["top_k"])(None, scores)
    if "top_p" in settings:
        scores = hf.TopPLogitsWarper(settings["top_p"])(None, scores)
    if "min_p" in settings:
        scores = hf.MinPLogitsWarper(settings["min_p"])(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_samples_follow_the_distribution_of_the_reference(settings):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    expected = hf_probs(logits, settings)
    count = 4000
    seen = torch.bincount(draw(logits, count, **settings), minlength=VOCAB).double()
    assert seen[expected == 0].sum() == 0
    keep = expected * count >= 5
    statistic = ((seen - expected * count) ** 2 / (expected * count))[keep].sum()
    degrees = int(keep.sum()) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 6


def test_rows_with_different_settings_do_not_disturb_each_other():
    logits = torch.randn(4, VOCAB)
    numbers = torch.rand(4, dtype=torch.float64)
    settings = [(0.0, VOCAB, 1.0, 0.0), (0.7, 3, 1.0, 0.0), (1.3, VOCAB, 0.5, 0.0), (1.0, VOCAB, 1.0, 0.3)]
    t, k, p, m = (list(c) for c in zip(*settings, strict=True))
    mixed = sample(
        logits,
        Filters(column(t, torch.float32), column(k, torch.int64), column(p), column(m), any_greedy=True),
        numbers,
    )
    for i in range(4):
        one = Filters(
            column([t[i]], torch.float32),
            column([k[i]], torch.int64),
            column([p[i]]),
            column([m[i]]),
            any_greedy=t[i] == 0,
        )
        assert sample(logits[i : i + 1], one, numbers[i : i + 1])[0] == mixed[i]
    assert mixed[0] == logits[0].argmax()


def test_a_forbidden_token_is_never_drawn_even_at_the_ends_of_the_interval():
    logits = torch.full((3, VOCAB), float("-inf"))
    logits[:, 20] = 0.0
    numbers = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(logits, Filters(column([1.0] * 3, torch.float32)), numbers).tolist() == [20] * 3


def test_uniform_numbers_depend_on_seed_and_counter_only():
    seeds, counters = np.arange(1000) % 7, np.arange(1000)
    numbers = uniform(seeds, counters)
    shuffle = np.random.default_rng(0).permutation(1000)
    assert (uniform(seeds[shuffle], counters[shuffle]) == numbers[shuffle]).all()
    assert len(np.unique(numbers)) == 1000
    assert ((numbers >= 0) & (numbers < 1)).all()
    large = uniform(np.full(20000, -5), np.arange(20000))
    assert abs(large.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(large[:-1], large[1:])[0, 1]) < 0.03


def test_derived_seeds_differ_and_the_first_is_the_seed_itself():
    assert derive_seed(5, 0) == 5
    assert len({derive_seed(5, i) for i in range(128)} | {derive_seed(6, i) for i in range(128)}) == 256


@pytest.mark.parametrize("vocab", [31, 32, 33, 100])
def test_bitmask_keeps_exactly_the_allowed_tokens(vocab):
    rng = np.random.default_rng(vocab)
    allowed = rng.random((3, vocab)) < 0.4
    packed = np.zeros((3, bitmask_width(vocab) * 32), np.uint8)
    packed[:, :vocab] = allowed
    words = np.packbits(packed, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(5, vocab)
    expected = logits.clone()
    rows = [4, 0, 2]
    for i, row in enumerate(rows):
        expected[row][~torch.from_numpy(allowed[i])] = float("-inf")
    apply_bitmask(logits, torch.from_numpy(words), torch.tensor(rows))
    assert torch.equal(logits, expected)


def test_penalties_match_their_definitions():
    prompt, output = [3, 5, 5, 9], [7, 7, 2, 5]
    logits = torch.randn(2, VOCAB)
    expected = hf.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[*prompt, *output]] * 2), logits.clone())
    expected[1] = logits[1]
    for token in set(output):
        expected[0, token] -= 0.5 + 0.3 * output.count(token)
    counts = TokenCounts(4, VOCAB, torch.device("cpu"))
    counts.recount([SlotText(3, np.array(prompt, np.int32), np.array(output[:3], np.int32))])
    counts.add(torch.tensor([3, 1]), torch.tensor([5, 5]))
    counts.apply(logits, torch.tensor([3, 1]), torch.tensor([[1.4, 0.5, 0.3], [1.0, 0, 0]]))
    torch.testing.assert_close(logits, expected)


def test_penalties_along_drafts():
    counts = TokenCounts(2, VOCAB, torch.device("cpu"))
    counts.recount([SlotText(1, np.array([1], np.int32), np.array([2, 3, 3], np.int32))])
    drafts = DraftTree(np.array([[6, 6, 2, 99]]), np.array([[-1, 0, 0, 99]]), np.array([3]))
    expected = torch.zeros(5, VOCAB)
    for row, seen in enumerate([None, [2, 3, 3], [2, 3, 3, 6], [2, 3, 3, 6, 6], [2, 3, 3, 6, 2]]):
        for token in seen or []:
            expected[row, token] -= 1
    for _ in range(2):  # drafts are not counted for good
        logits = torch.zeros(5, VOCAB)
        rows = torch.tensor([[1.0, 0, 0], *[[1.0, 0, 1.0]] * 4])
        counts.apply(logits, torch.tensor([0, 1, 1, 1, 1]), rows, paths_of([1], [0], drafts))
        assert torch.equal(logits, expected)


@given(st.data())
def test_counts_are_those_of_the_texts(data: st.DataObject):
    """Count slots anew, add sampled tokens and accepted drafts, in any order, and compare with the texts themselves."""
    vocab, slots = 9, 4
    counts = TokenCounts(slots, vocab, torch.device("cpu"))
    ids = st.lists(st.integers(0, vocab - 1), max_size=5)
    texts: dict[int, tuple[list[int], list[int]]] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        chosen = data.draw(st.lists(st.integers(0, slots - 1), unique=True))
        index, kind = torch.tensor(chosen, dtype=torch.int64), data.draw(st.sampled_from(["recount", "add", "accept"]))
        if kind == "recount":
            fresh = {slot: (data.draw(ids), data.draw(ids)) for slot in chosen}
            texts |= fresh
            counts.recount([SlotText(s, *(np.array(t, np.int32) for t in text)) for s, text in fresh.items()])
            continue
        width = 1 if kind == "add" else 3
        tokens = np.array(
            [data.draw(st.lists(st.integers(0, vocab - 1), min_size=width, max_size=width)) for _ in chosen]
        )
        tokens = tokens.reshape(len(chosen), width).astype(np.int64)
        lens = [1 if kind == "add" else data.draw(st.integers(1, 3)) for _ in chosen]
        if kind == "add":
            counts.add(index, torch.from_numpy(tokens)[:, 0])
            with counts.paused():
                counts.add(index, torch.from_numpy(tokens)[:, 0])
        else:
            counts.add_accepted(index, torch.from_numpy(tokens), torch.tensor(lens, dtype=torch.int64))
        for slot, row, count in zip(chosen, tokens.tolist(), lens, strict=True):
            if slot in texts:
                texts[slot][1].extend(row[:count])
    for slot, (prompt, output) in texts.items():
        expected = [2 * output.count(t) + (t in prompt) for t in range(vocab)]
        assert counts.table[slot].tolist() == expected


def walk(sampled, drafts, parents, count):
    """Apply the rule of ``accept`` to one row, in plain Python."""
    tokens, node = [sampled[0]], -1
    while True:
        child = next((j for j in range(count) if parents[j] == node and drafts[j] == tokens[-1]), None)
        if child is None:
            return tokens
        node = child
        tokens.append(sampled[node + 1])


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_accept_equals_the_walk_in_plain_python(tree):
    rng = np.random.default_rng(5)
    for _ in range(200):
        rows, width = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        drafts = rng.integers(0, 3, (rows, width))
        parents = np.stack([[rng.integers(-1, j) if tree and j else j - 1 for j in range(width)] for _ in range(rows)])
        lens = rng.integers(0, width + 1, rows)
        sampled = rng.integers(0, 3, (rows, width + 1))
        indptr = np.append(0, np.cumsum(1 + lens))
        flat = np.concatenate([own[: 1 + count] for own, count in zip(sampled, lens, strict=True)])
        *given, of_trees = (torch.from_numpy(a.astype(np.int64)) for a in (flat, indptr, drafts, parents))
        accepted = accept(*given, of_trees if tree else None)
        for r in range(rows):
            expected = walk(sampled[r].tolist(), drafts[r], parents[r], lens[r])
            assert accepted.tokens[r, : accepted.lens[r]].tolist() == expected
            assert accepted.tokens[r, -1] == expected[-1]
            assert sampled[r, accepted.nodes[r]].tolist() == accepted.tokens[r].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_best(dtype):
    logits = torch.randn(40, 1000).to(dtype)  # bfloat16 has ties of its own
    logits[3, [700, 20, 500]] = 9.0
    logits[4, 5:] = float("-inf")
    best = logits.float().amax(-1, keepdim=True)
    first = [row.index(True) for row in (logits.float() == best).tolist()]
    got = greedy(logits)
    assert got.dtype is torch.int64
    assert got.tolist() == first
    assert greedy(logits[:0]).shape == (0,)
