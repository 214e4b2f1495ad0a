"""Test which tokens of a committed step drafters read, against a plain loop over the rows.

Run: python -m pytest -q tests/plugins/test_draft_steps.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.sampling_params import SamplingParams
from dovetail.types import AdmittedRequest, Batch, Committed, ForwardOutput, PageUpdates, StepPlan
from dovetail_speculative.steps import committed_tokens

WIDTH = 4


def make_step(seed: int, *, verifies: bool, num_extend: int, rows: int) -> tuple[Batch, ForwardOutput, Committed]:
    """Return a committed step. Some rows were aborted before they got a token, and some prompts end in a later step."""
    rng, none = np.random.default_rng(seed), np.zeros(0, np.int32)
    starts = rng.integers(0, 40, rows).astype(np.int32)
    starts[num_extend:] += 1
    extends = np.full(rows, 1 + WIDTH if verifies else 1, np.int32)
    extends[:num_extend] = rng.integers(1, 9, num_extend)
    samples = np.arange(rows) >= num_extend
    samples[:num_extend] = rng.random(num_extend) < 0.5
    known = starts + 1 + (rng.integers(1, 2 + WIDTH, rows) if verifies else 1)
    prompts = starts[:num_extend] + extends[:num_extend]
    known[:num_extend] = prompts + np.where(samples[:num_extend], 1, rng.integers(1, 9, num_extend))
    ended = rng.random(rows) < 0.3
    known = np.where(ended & (rng.random(rows) < 0.5), starts + (np.arange(rows) >= num_extend), known)
    reqs = [
        AdmittedRequest(row, row, SamplingParams(), 0, 1, rng.integers(0, 99, 64).astype(np.int32), 1)
        for row in range(rows)
    ]
    plan = StepPlan(
        1,
        num_extend,
        rng.permutation(rows).astype(np.int32),
        starts,
        extends,
        samples,
        PageUpdates(none, none, none[None]),
        prompts.astype(np.int32),
    )
    paths = [[0, *sorted(rng.permutation(WIDTH)[: WIDTH - 1] + 1), WIDTH] for _ in range(int(samples.sum()))]
    nodes = torch.tensor(paths, dtype=torch.int64).view(-1, 1 + WIDTH) if verifies else None
    output = ForwardOutput(torch.zeros(len(paths), 1, dtype=torch.int64), nodes=nodes)
    return Batch.of(plan, reqs), output, Committed(known.astype(np.int32), ended)


@pytest.mark.parametrize("seed", range(60))
def test_the_tokens_are_those_that_a_loop_finds(seed: int):
    rng = np.random.default_rng(1000 + seed)
    rows = int(rng.integers(1, 9))
    num_extend = int(rng.integers(0, rows + 1)) if seed % 2 else 0
    batch, output, committed = make_step(seed, verifies=seed % 3 > 0, num_extend=num_extend, rows=rows)
    expected, first, sampled = [], 0, 0
    for row in range(rows):
        start, entered = int(batch.prefix_lens[row]), int(batch.extend_lens[row])
        places = list(range(entered))
        if row >= num_extend and output.nodes is not None:
            places = output.nodes[sampled].tolist()
        text = batch.reqs[row].token_ids[: committed.known_lens[row]].tolist()
        read = [
            (start + i, first + place, text[start + i + 1])
            for i, place in enumerate(places)
            if start + i + 1 < len(text)
        ]
        if read:
            expected.append((row, read))
        first, sampled = first + entered, sampled + int(batch.samples[row])
    new = committed_tokens(batch, output, committed)
    if new is None:
        assert not expected
        return
    found, at = [], 0
    for row, start, count in zip(new.rows.tolist(), new.starts.tolist(), new.counts.tolist(), strict=True):
        tokens = zip(
            range(start, start + count), new.index[at : at + count], new.next_ids[at : at + count], strict=True
        )
        found.append((row, [(place, int(index), int(token)) for place, index, token in tokens]))
        at += count
    assert found == expected
    assert at == len(new.index) == len(new.next_ids)
    assert {array.dtype for array in (new.rows, new.starts, new.counts)} == {np.dtype(np.int32)}
    assert {array.dtype for array in (new.index, new.next_ids)} == {np.dtype(np.int64)}
