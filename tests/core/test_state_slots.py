"""Test the slots of states against a pretended device (``pretended_states.py``), on which every mistake with slots, copies
and snapshots shows as a wrong hash.

.venv/bin/python -m pytest -q tests/core/test_state_slots.py
"""

import functools
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import pretended_states
from pretended import CONTEXT, VOCAB, next_token
from pretended_states import MODELS, STATELESS, WINDOW, Forced, Jumps, StateRun, build, layout_of, right_and_wrong

from dovetail.memory.arena import ArenaAllocator
from dovetail.scheduler import snapshots
from dovetail.types import DraftTree


def prompts_of(rng, stems):
    """Return a prompt that may begin as others do."""
    return rng.choice(stems)[: rng.randrange(61)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]


def least_slabs(model, page_size=4):
    """Return the least memory in which a request of the largest length runs."""
    groups = (MODELS | STATELESS)[model]
    columns = CONTEXT // page_size if any(group.paged for group in groups) else 1
    return next(slabs for slabs in range(1, 99) if layout_of(groups, slabs).columns >= columns)


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    """Make snapshots of short texts worth what those of long ones are."""
    monkeypatch.setattr(snapshots, "TAIL_TOKENS", 9)
    monkeypatch.setattr(snapshots, "LEAST_TOKENS", 12)
    monkeypatch.setattr(snapshots, "LEAST_SHARED", 5)


def history(
    seed, model, lag, requests=30, drafts=False, failures=0.0, cache="radix", jumps=False, state_chunk=0, pools=1
):
    """Run random requests, of which some are aborted, in little memory. With ``jumps``, some jump forward."""
    rng = random.Random(seed)
    limits = {"mixed": bool(seed % 2), "chunk_size": rng.choice([5, 9, 64]), "wait_for_prefix": rng.random() < 0.5}
    limits["pin_seconds"], limits["pin_pages"] = 3600.0, 20
    limits["state_snapshot_tokens"] = rng.choice([None, 8 if state_chunk else 1, 9])
    limits["state_chunk"] = state_chunk
    limits["shared_prefixes"] = not drafts and pools == 1
    if drafts:
        limits["draft_width"] = 3
    scheduler, device = build(model, least_slabs(model) + rng.choice([0, 2, 9]), cache=cache, pools=pools, **limits)
    if jumps:
        scheduler.constraints = Jumps(rng)
    propose = right_and_wrong(device, rng, 3) if drafts else None
    run = StateRun(scheduler, device, lag, propose, ahead=drafts, failures=failures, seed=seed)
    stems = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    for i in range(requests):
        prompt = prompts_of(rng, stems)
        if run.texts and rng.random() < 0.3:  # the next turn of a conversation
            prompt = [*rng.choice(list(run.texts.values())), *prompt[:9]][:80]
        hints = rng.choice([{}, {}, {"group": f"g{i // 3}", "group_size": 3}, {"session": f"s{i % 4}"}])
        run.add(f"r{i}", prompt, hints, max_new_tokens=rng.choice([0, 3, 18, 40]), ignore_eos=rng.random() < 0.7)
        if jumps and i % 2:
            scheduler.waiting[-1].matcher = Forced()
        for _ in range(rng.randrange(4)):
            run.step()
        while len(run.prompts) - len(run.ends) > 60:
            run.step()
        if rng.random() < 0.1:
            run.take(scheduler.abort(f"r{rng.randrange(i + 1)}", "changed my mind"))
    run.finish_requests()
    assert set(run.ends) == set(run.prompts)
    scheduler.flush_cache()
    scheduler.check_integrity()
    assert model in STATELESS or not (scheduler._snapshots._copied or scheduler._snapshots._saved)
    for allocator in (member.allocator for member in scheduler.ledger.members):
        assert not any(allocator.num_held), "slots or pages were lost"
        assert allocator.allocatable([0] * len((MODELS | STATELESS)[model]), 1) >= allocator.num_total
    return scheduler, device


@pytest.mark.parametrize("model", MODELS)
def test_random_histories(model):
    """At once and one step late, with steps that fail and forced tokens; with drafts that are accepted and rejected."""
    copies = hits = shared = 0
    for lag, drafts, jumps in ((False, False, True), (True, False, True), (False, True, False)):
        scheduler, device = history(7, model, lag, 20, drafts, failures=0.0 if drafts else 0.05, jumps=jumps)
        assert not jumps or scheduler.totals.jumped_tokens > 0
        copies += device.copies.sum()
        shared += device.shared
        hits += scheduler.totals.cached_tokens
    assert copies > 0
    assert (shared > 0) == any(group.paged for group in MODELS[model])
    assert hits > 0


@pytest.mark.parametrize("model", MODELS)
def test_random_histories_of_steps_that_keep_states_within_prompts(model):
    saves = hits = 0
    for seed, lag, drafts in ((7, False, False), (8, True, False), (9, False, True)):
        failures = 0.0 if drafts else 0.05
        scheduler, device = history(seed, model, lag, 20, drafts, failures, jumps=not drafts, state_chunk=8)
        saves += device.saves
        hits += scheduler.totals.cached_tokens
    assert saves > 0
    assert hits > 0


@pytest.mark.parametrize("model", MODELS)
def test_random_histories_in_several_pools(model):
    """With data-parallel attention: each request has its states, its snapshots and its pages in one pool."""
    saves = hits = 0
    for seed, pools, lag, drafts, chunk in ((7, 2, False, False, 8), (8, 3, True, False, 0), (9, 2, False, True, 8)):
        failures = 0.0 if drafts else 0.05
        scheduler, device = history(
            seed, model, lag, 20, drafts, failures, jumps=not drafts, state_chunk=chunk, pools=pools
        )
        assert (device.copies > 0).all()
        saves += device.saves
        hits += scheduler.totals.cached_tokens
    assert saves > 0
    assert hits > 0


@pytest.mark.full
@pytest.mark.parametrize("lag", [False, True], ids=["at-once", "one-step-late"])
@pytest.mark.parametrize("cache", ["radix", "pairs", "none"])
@pytest.mark.parametrize("model", MODELS)
def test_many_random_histories(model, cache, lag):
    for seed in range(5):
        drafts = not lag and seed % 3 == 0
        failures = 0.0 if drafts else 0.05 * (seed % 2)
        history(seed, model, lag, 40, drafts, failures, cache, jumps=not drafts and seed > 2)
        history(seed, model, lag, 40, drafts, failures, cache, jumps=not drafts and seed > 2, state_chunk=8)
        history(seed, model, lag, 40, drafts, failures, cache, jumps=not drafts and seed > 2, state_chunk=8, pools=2)


@pytest.mark.parametrize("model", STATELESS)
def test_random_histories_without_states(model):
    for lag, drafts in ((False, False), (True, False), (False, True)):
        _, device = history(5, model, lag, 20, drafts, failures=0.0 if drafts else 0.05)
        assert (device.shared > 0) == (not drafts)


@pytest.mark.parametrize("model", ["sliding", "pages and windows", "window", "all"])
def test_the_shortest_row_has_the_pages_that_rows_of_a_group_see(model, monkeypatch):
    """Windows are long enough that rows see what they share for a while, and short enough that rows leave it."""
    wide = replace(WINDOW, window=25)
    known = STATELESS if model in STATELESS else MODELS
    monkeypatch.setitem(known, model, tuple(wide if group is WINDOW else group for group in known[model]))
    devices = [history(seed, model, lag, 40, failures=0.05)[1] for seed, lag in ((11, False), (12, True), (13, False))]
    assert sum(device.shared for device in devices) > 0
    assert sum(device.shared_windows for device in devices) > 0


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["pages", "sliding", "latents", "states", "pages and windows", "all"])
def test_pages_that_are_taken_and_given_back_100_000_times_lose_no_byte(model, monkeypatch):
    """Requests come, are aborted, retracted and fail, beside drafts that are accepted and rejected, in memory for few of them."""
    count = 0

    def counting(name):
        own = getattr(ArenaAllocator, name)

        def counted(*args):
            nonlocal count
            count += 1
            return own(*args)

        monkeypatch.setattr(ArenaAllocator, name, counted)

    for name in ("alloc", "alloc_slots", "free"):
        counting(name)
    seed = 0
    while count < 100_000:
        drafts = seed % 3 == 2
        history(seed, model, seed % 3 == 1, 120, drafts, failures=0.0 if drafts else 0.05)
        seed += 1


def alone(prompt, new, steps=None, **limits):
    """Run one request, for a number of steps or to its end."""
    scheduler, device = build("full", 60, max_running=1, chunk_size=200, **limits)
    run = StateRun(scheduler, device)
    run.add("a", prompt, max_new_tokens=new, ignore_eos=True)
    for _ in range(steps or 0):
        run.step()
    if steps is None:
        run.finish_requests()
    return scheduler, device, run


def matched(scheduler, tokens):
    return scheduler.ledger.cache.match(np.array(tokens, np.int32)).length


def test_the_next_turn_resumes_near_the_end_of_the_answer():
    for new in range(20, 40):
        scheduler, _, run = alone(list(range(10)), new)
        assert matched(scheduler, run.texts["a"]) >= len(run.texts["a"]) - 9 - 4, new


def test_a_request_that_ends_at_a_full_page_gives_its_own_slot():
    """Its working slot holds the state of a whole prompt that is not generated from: no copy is needed."""
    scheduler, device, _ = alone(list(range(24)), 0, pin_pages=0)
    assert matched(scheduler, range(24)) == 24
    device.copies = 0
    scheduler, device, _ = alone(list(range(11)), 0)
    assert device.copies == 1
    assert matched(scheduler, range(11)) == 8


def test_drafts_that_are_all_accepted_stop_at_a_page_for_the_tail():
    """Steps of 4 tokens would never begin at a page of 4 tokens if the first one does not."""

    def perfect(batch):
        tokens = np.zeros((len(batch.reqs), 3), np.int32)
        lens = np.zeros(len(batch.reqs), np.int32)
        for row, req in enumerate(batch.reqs):
            lens[row] = 0 if row < batch.num_extend else batch.draft_limits[row]
            text = req.token_ids[: int(batch.prefix_lens[row]) + 1].tolist()
            for i in range(int(lens[row])):
                text.append(next_token(text))
                tokens[row, i] = text[-1]
        return DraftTree.chains(tokens, lens)

    scheduler, device = build("full", 60, max_running=1, draft_width=3)
    run = StateRun(scheduler, device, drafts=perfect)
    run.add("a", list(range(9)), max_new_tokens=62, ignore_eos=True)
    run.finish_requests()
    assert scheduler.totals.accepted_tokens == scheduler.totals.drafted_tokens
    assert matched(scheduler, run.texts["a"]) >= 71 - 9 - 4


def test_a_tail_whose_copy_failed_is_not_offered():
    """The step that replaces the tail fails after the one before has ended the request: what is in the slot is unknown."""
    _, _, run = alone(list(range(9)), 40)
    text, failed = run.texts["a"], 0
    for stop in dict.fromkeys(text[25:]):
        scheduler, device = build("full", 60, max_running=1, chunk_size=200)
        run = StateRun(scheduler, device, lag=True)
        run.add("a", range(9), max_new_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
        while "a" not in run.ends:
            launched = run.launched[1] if run.launched and run.launched[0] is not None else None
            run.failures = float(launched is not None and launched.token_ids[:, 0].tolist() == [stop])
            failed += run.failures > 0
            run.step()
        run.failures = 0.0
        run.add("b", [*text[:49], 1, 2], max_new_tokens=3, ignore_eos=True)
        run.finish_requests()
    assert failed > 9


def test_members_of_a_group_resume_from_one_snapshot():
    """Prompts that arrive together wait for the snapshot of the first; each computes what it does not share."""
    scheduler, device = build("full", 60, max_running=8, chunk_size=64)
    run = StateRun(scheduler, device)
    for i in range(5):
        run.add(f"n{i}", range(30), {"group": "n", "group_size": 5}, max_new_tokens=6, ignore_eos=True)
    for i in range(3):
        run.add(f"q{i}", [*[3] * 21, 5 + i, 9], max_new_tokens=6, ignore_eos=True)
    run.finish_requests()
    assert [run.cached[f"n{i}"] for i in range(5)] == [0] + [28] * 4
    assert [run.cached[f"q{i}"] for i in range(3)] == [0, 20, 20]


def test_a_request_that_runs_alone_needs_no_other_memory(monkeypatch):
    """The least memory holds a request of the largest length, also when its cached prefix takes a slot of its own."""
    monkeypatch.setattr(pretended_states, "SLOTS", 1)
    for model in MODELS:
        scheduler, device = build(model, least_slabs(model), max_running=1, chunk_size=200)
        run = StateRun(scheduler, device)
        run.add("prefix", range(40), max_new_tokens=0)
        run.finish_requests()
        assert matched(scheduler, range(40)) == 40
        for number in range(3):
            run.add(f"{number}", [*range(40), number, *[5] * 60], max_new_tokens=CONTEXT - 101, ignore_eos=True)
            run.finish_requests()
        assert len(run.texts["2"]) == CONTEXT


def test_points_of_prompts():
    """Prompts of a few tokens are not cut; long ones are cut at the end and in the middle; at junctions instead of there."""
    points = functools.partial(snapshots.choose_points, page_size=16)
    with pytest.MonkeyPatch.context() as patch:
        for name, count in (("TAIL_TOKENS", 128), ("LEAST_TOKENS", 512), ("LEAST_SHARED", 64)):
            patch.setattr(snapshots, name, count)
        assert points(0, 0, 400) == []
        assert points(0, 0, 400, expected=True) == [400]
        assert points(0, 0, 48, expected=True) == []
        assert points(0, 0, 1008) == [1008]
        assert points(0, 0, 1696) == [848, 1696]
        assert points(0, 96, 384) == [96]
        assert points(848, 1488, 1696) == [1488]
        assert points(848, 1488, 4096) == [1488, 4096]
        assert points(1424, 1488, 1696) == []
        assert points(1024, 1152, 1504) == [], "the tail of the turn before is not a junction"
        assert points(0, 0, 4096, every=1000) == [1008, 2016, 3024, 4032]
        assert points(2016, 2500 // 16 * 16, 4096, every=1000) == [2496, 3024, 4032]
        within = functools.partial(points, unit=64)
        assert within(0, 0, 1008) == [960]
        assert within(0, 0, 8176) == [4032, 8128]
        assert within(16, 0, 8176) == [16 + 4032, 16 + 8128]
        assert within(0, 96, 1696) == [96, 1696], "after a junction, states are kept from there on"
        assert within(0, 4096, 1696) == [1664], "what is known further on is no junction"
        assert within(0, 0, 400, expected=True) == [384]
        assert within(0, 0, 4096, every=1000) == [1024, 2048, 3072, 4096]
        assert within(0, 0, 48, every=16) == [16, 32]
