"""Test the scheduler against a pretended device (``pretended.py``), on which every mistake with pages shows as a wrong
token.

.venv/bin/python -m pytest -q tests/core/test_scheduler.py
"""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import ContextLengthError, QueueFullError, RequestError
from dovetail.messages import GenerateMsg, RequestFailed
from dovetail.sampling_params import SamplingParams
from dovetail.types import DraftTree, FinishKind

sys.path.insert(0, str(Path(__file__).parent))
from pretended import CONTEXT, EOS, VOCAB, Run, build, half_right, reqs_of


@pytest.mark.sample(5)
@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("cache", ["radix", "pairs", "triples", "none"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_in_little_memory(page_size, cache, lag, seed):
    rng = random.Random(seed)
    limits = {"mixed": bool(seed % 2), "chunk_size": rng.choice([3, 9, 64])}
    limits["wait_for_prefix"] = seed < 2 and cache != "none"
    limits["shared_prefixes"] = cache != "none"
    scheduler, device = build(page_size, 1 + 160 // page_size, cache, **limits)
    run = Run(scheduler, device, lag)
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    for i in range(40):
        prompt = rng.choice(stems)[: rng.randrange(41)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        run.add(f"r{i}", prompt, max_new_tokens=rng.randrange(1, 40), ignore_eos=rng.random() < 0.7)
        for _ in range(rng.randrange(3)):
            run.step()
        if rng.random() < 0.2:
            run.take(scheduler.abort(f"r{rng.randrange(i + 1)}", "changed my mind"))
    run.finish()
    assert set(run.ends) == set(run.prompts)
    for rid, kind in run.ends.items():
        if kind is FinishKind.STOP:
            assert run.texts[rid][-1] == EOS


@pytest.mark.sample(5)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("cache", ["radix", "pairs", "triples"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_in_little_memory(page_size, cache, seed, ahead):
    rng = random.Random(seed)
    scheduler, device = build(page_size, 1 + 160 // page_size, cache, draft_width=3, adapt_drafts=bool(seed % 2))
    run = Run(scheduler, device, drafts=half_right, ahead=ahead)
    for i in range(20):
        run.add(
            f"r{i}", [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))], max_new_tokens=rng.randrange(1, 40)
        )
        run.step()
    run.finish()
    totals = scheduler.totals
    assert 0 < totals.accepted_tokens < totals.drafted_tokens


@pytest.mark.parametrize("page_size", [1, 4])
def test_no_request_is_retracted_for_drafts(page_size):
    """Drafts become fewer as pages run out; a request is retracted only when there is no page left for the tokens
    themselves."""
    scheduler, device = build(page_size, 1 + 112 // page_size, "none", draft_width=3)
    limits = []

    def noted(batch):
        if not scheduler.totals.retractions:
            remains = [len(r.token_ids) - length - 2 for r, length in zip(batch.reqs, batch.prefix_lens, strict=True)]
            limits.extend(list(zip(batch.draft_limits.tolist(), remains, strict=True))[batch.num_extend :])
        return half_right(batch)

    run = Run(scheduler, device, drafts=noted, ahead=True)
    for i in range(2):
        run.add(f"r{i}", [i] * 20, max_new_tokens=60, ignore_eos=True)
    while not scheduler.totals.retractions:
        needed = sum(scheduler.ledger.pages_for(r.known_len) for r in scheduler.running)
        run.step()
    assert needed > 112 // page_size, "pages reserved for drafts would have sufficed"
    found = {limit for limit, remain in limits if remain > 8}
    assert 3 in found
    assert min(found) < 3
    run.finish()


CHAIN = np.arange(-1, 2, dtype=np.int32)[None]


def drafts_that_change(parents):
    """Make a chain by its class method, and overwrite its arrays afterwards."""
    tree = DraftTree.chains(np.array([[1, 2, 3]], np.int32), np.array([3], np.int32))
    tree.parents = parents
    return tree


@pytest.mark.parametrize("parents", [CHAIN.astype(np.float64), CHAIN * 0, CHAIN * 0 - 1, CHAIN + 5])
def test_the_parents_of_a_chain_do_not_share_the_drafters_memory(parents):
    """Penalties and grammars read them later, and must not depend on what a drafter has written since."""
    scheduler, device = build(draft_width=3)
    attached, attach = [], scheduler.attach
    scheduler.attach = lambda plan, drafts: attached.append(plan) or attach(plan, drafts)
    run = Run(scheduler, device, drafts=lambda batch: drafts_that_change(parents))
    run.add("r", [1, 2, 3], max_new_tokens=9, ignore_eos=True)
    run.step()
    run.step()
    assert attached[0].drafts.parents.tolist() == CHAIN.tolist()
    assert attached[0].drafts.parents.dtype == np.int32


@pytest.mark.parametrize("lens", [[3.0], [float("nan")], [2.5], ["3"]])
def test_draft_lens_that_are_no_integers_change_nothing(lens):
    scheduler, device = build(draft_width=3)
    run = Run(scheduler, device)
    run.add("r", [1, 2, 3], max_new_tokens=9, ignore_eos=True)
    run.step()
    plan = scheduler.schedule()
    (req,) = reqs_of(scheduler, plan)
    before = req.cached_len, req.device_len
    with pytest.raises((TypeError, ValueError)):
        scheduler.attach(plan, DraftTree(np.array([[1, 2, 3]], np.int32), CHAIN, np.array(lens)))
    assert (req.cached_len, req.device_len) == before
    assert plan.drafts is None


def test_a_drafter_cannot_write_to_its_limits():
    scheduler, device = build(draft_width=3)

    def drafts(batch):
        with pytest.raises(ValueError, match="read-only"):
            batch.draft_limits[0] -= 1
        return half_right(batch)

    run = Run(scheduler, device, drafts=drafts)
    run.add("r", [1, 2, 3], max_new_tokens=19, ignore_eos=True)
    for _ in range(4):
        run.step()


def lengths_in_order(drafts, draft_width):
    """Return the ids and lengths of the decode rows of each step, in their order, while four requests decode together."""
    scheduler, device = build(chunk_size=200, num_pages=200, draft_width=draft_width)
    run = Run(scheduler, device, drafts=drafts)
    for i, length in enumerate((20, 24, 10, 23)):
        run.add(f"r{i}", [i] * length, max_new_tokens=60, ignore_eos=True)
    run.step()
    seen = []
    while len(scheduler.decoding) == 4:
        rows = scheduler._rows.current().reqs
        seen.append(([r.rid for r in rows], [r.device_len for r in rows]))
        run.step()
    return seen


def test_decode_rows_stand_in_order_of_length():
    steps = lengths_in_order(None, 0)
    assert [rids for rids, _ in steps] == [["r1", "r3", "r0", "r2"]] * len(steps)


def test_drafts_do_not_change_the_order_of_rows():
    """With drafts one row becomes longer than another, but the sampler's state on the device depends on the order of
    the rows."""

    def for_one(batch):
        tree = half_right(batch)
        tree.lens[[req.uid != 2 for req in batch.reqs]] = 0
        return tree

    steps = lengths_in_order(for_one, 3)
    assert [rids for rids, _ in steps] == [["r1", "r3", "r0", "r2"]] * len(steps)
    assert any(lens != sorted(lens, reverse=True) for _, lens in steps), "no row has overtaken another"


def test_memory_pressure_retracts_and_every_request_still_finishes():
    scheduler, device = build(num_pages=32)
    run = Run(scheduler, device)
    for i in range(5):
        run.add(f"r{i}", [i] * 20, max_new_tokens=90, ignore_eos=True)
    run.finish()
    assert scheduler.totals.retractions > 0
    assert all(len(run.texts[f"r{i}"]) == 110 for i in range(5))


def test_the_oldest_request_is_never_retracted():
    scheduler, device = build(num_pages=32)
    run = Run(scheduler, device)
    for i in range(5):
        run.add(f"r{i}", [i] * 20, max_new_tokens=90, ignore_eos=True)
    first = scheduler.waiting[0]
    run.finish()
    assert first.num_retractions == 0


def test_a_shared_prefix_is_computed_once():
    scheduler, device = build()
    run = Run(scheduler, device)
    for i in range(4):
        run.add(f"r{i}", [*range(20, 40), i], max_new_tokens=2, ignore_eos=True)
    run.finish()
    assert scheduler.totals.cached_tokens == 3 * 20


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefix_computed_twice_is_kept_once(page_size, lag):
    scheduler, device = build(page_size, 60 * 4 // page_size, wait_for_prefix=False, chunk_size=64)
    run = Run(scheduler, device, lag)
    for rid in "abc":
        run.add(rid, range(20, 40), max_new_tokens=12, ignore_eos=True)
    run.step()
    for rid in "de":
        run.add(rid, range(5), max_new_tokens=30, ignore_eos=True)
    run.finish()
    assert scheduler.ledger.cache.total[0] <= (20 + 12 + 5 + 30) // page_size


def test_the_next_turn_finds_the_last_answer_too():
    scheduler, device = build(page_size=1)
    run = Run(scheduler, device)
    run.add("first", range(20, 40), max_new_tokens=10, ignore_eos=True)
    run.finish()
    run.add("second", [*run.texts["first"], 1, 2], max_new_tokens=1)
    run.finish()
    assert scheduler.totals.cached_tokens == 29


@pytest.mark.parametrize(("page_size", "cached"), [(1, 19), (4, 16)])
def test_where_the_next_token_counts_a_place_is_another_before_another_token(page_size, cached):
    """The twentieth token is cached before other tokens; with pages of four its page is cached, too."""
    scheduler, device = build(page_size, 200, "pairs")
    run = Run(scheduler, device)
    for i in range(4):
        run.add(f"r{i}", [*range(20, 40), i], max_new_tokens=2, ignore_eos=True)
        run.finish()
    assert [run.cached[f"r{i}"] for i in range(4)] == [0, cached, cached, cached]
    run.add("again", [*range(20, 40), 2, 3, 3], max_new_tokens=2, ignore_eos=True)
    run.finish()
    assert run.cached["again"] == 20


def test_namespaces_do_not_share():
    scheduler, device = build()
    run = Run(scheduler, device)
    for namespace in ("a", "b"):
        prompt = list(range(20, 40))
        run.prompts[namespace] = run.texts[namespace] = prompt
        scheduler.add(GenerateMsg(namespace, prompt, SamplingParams(max_new_tokens=1), 0, namespace))
    run.finish()
    assert scheduler.totals.cached_tokens == 0


def test_a_failed_step_ends_its_requests_and_frees_their_pages():
    scheduler, device = build()
    run = Run(scheduler, device)
    run.add("a", range(20), max_new_tokens=5)
    run.add("b", range(9), max_new_tokens=5)
    plan = scheduler.schedule()
    reqs = reqs_of(scheduler, plan)
    device.miss(plan)
    answers = scheduler.fail(plan, "out of luck")
    assert len(reqs) == 1, "the chunk is full"
    assert [(a.rid, a.status) for a in answers if isinstance(a, RequestFailed)] == [(r.rid, 500) for r in reqs]
    run.ends.update({a.rid: FinishKind.ERROR for a in answers})
    run.finish()


@pytest.mark.parametrize(
    ("prompt", "params", "error", "text"),
    [
        ([], {}, RequestError, "prompt is empty"),
        ([VOCAB], {}, RequestError, "token ids must be in"),
        ([-1], {}, RequestError, "token ids must be in"),
        ([1] * CONTEXT, {}, ContextLengthError, f"prompt has {CONTEXT} tokens"),
        ([1] * 100, {"max_new_tokens": 21}, ContextLengthError, "at most 20 new tokens fit"),
        (
            [1],
            {"logit_bias": {VOCAB: 1.0}},
            RequestError,
            "logit_bias has the token id .* outside of the model's vocabulary",
        ),
        ([1], {"stop": ("x",)}, RequestError, "tokenizer"),
    ],
)
def test_refused_requests_leave_nothing_behind(prompt, params, error, text):
    scheduler, _ = build()
    with pytest.raises(error, match=text):
        scheduler.add(GenerateMsg("r", prompt, SamplingParams(**params), 0))
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_queue_bound_and_repeated_ids():
    scheduler, _ = build(max_waiting=1)
    scheduler.add(GenerateMsg("a", [1], SamplingParams(), 0))
    with pytest.raises(RequestError, match="already in use"):
        scheduler.add(GenerateMsg("a", [1], SamplingParams(), 0))
    with pytest.raises(QueueFullError, match=r"scheduler\.max_waiting"):
        scheduler.add(GenerateMsg("b", [1], SamplingParams(), 0))


@pytest.mark.parametrize(
    "bad",
    [
        {"min_new_tokens": 1, "max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"n": 0},
        {"seed": 1.5},
        {"top_k": -2},
        {"min_new_tokens": 5, "max_new_tokens": 2},
        {"logprobs": True},
    ],
)
def test_sampling_params_say_what_is_allowed(bad):
    with pytest.raises(RequestError, match=r"is .*; allowed: "):
        SamplingParams(**bad)
