"""Test hundreds of requests of every sort in little memory, aborted at random: each ends once, and nothing is lost.

.venv/bin/python -m pytest -q tests/e2e/test_engine_traffic.py
"""

import random
from dataclasses import replace

import engine_models as models
import pytest
from engine_runs import Traffic, TreeDrafter, check_idle, drafting, make_llm, paged, prompts_of, varied_params

from dovetail.messages import AbortAllMsg, FlushCacheMsg, StatsRequestMsg
from dovetail.scheduler import admission


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.save_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.12, eos_token_id=17)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return what each request generates when memory holds all of them, in other batches."""
    llm, jobs = make_llm(checkpoint, **paged(16, 20000)), list(jobs_of(80))
    outputs = llm.generate([p for p, _ in jobs], [p for _, p in jobs])
    return [o.token_ids for o in outputs]


def jobs_of(count):
    rng = random.Random(5)
    stems = prompts_of([40, 40, 40], seed=6)
    for i in range(count):
        prompt = rng.choice(stems)[: rng.choice([0, 12, 40])] + prompts_of([rng.randrange(1, 40)], seed=100 + i)[0]
        yield prompt, varied_params(rng)


def check_answers(traffic, expected, aborted):
    for i, tokens in enumerate(expected):
        rid = f"r{i}"
        if traffic.kind(rid) == "abort":
            assert rid in aborted
            assert tokens[: len(traffic.tokens[rid])] == traffic.tokens[rid]
        else:
            assert traffic.tokens[rid] == tokens


@pytest.mark.parametrize(
    ("seed", "overlap", "drafts", "page_size", "cache"),
    [
        (0, False, False, 1, "radix"),
        (1, True, False, 1, "radix"),
        (2, True, False, 4, "radix"),
        (3, True, False, 4, "none"),
        (4, False, True, 4, "radix"),
        (5, False, True, 1, "none"),
        (6, True, True, 1, "radix"),
        (7, True, True, 4, "none"),
    ],
)
def test_random_traffic(checkpoint, expected, monkeypatch, seed, overlap, drafts, page_size, cache):
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    rng = random.Random(seed)
    scheduler = {"overlap": overlap, "chunk_size": rng.choice([11, 50, 200]), "max_running": 12, "mixed": seed % 2 == 0}
    llm = make_llm(checkpoint, **paged(page_size, 260, scheduler=scheduler, cache=cache))
    traffic, aborted = Traffic(llm), set()
    if overlap:
        monkeypatch.setattr(llm.loop.adaptive_drafting, "should_draft", lambda rows: rng.random() < 0.6)
    with drafting(llm, TreeDrafter(width=4, seed=seed) if drafts else None):
        for i, (prompt, params) in enumerate(jobs_of(len(expected))):
            traffic.add(f"r{i}", prompt, replace(params, seed=None), seed=params.seed)
            for _ in range(rng.choice([0, 0, 1, 3])):
                traffic.step()
            if rng.random() < 0.25:
                aborted.add(victim := f"r{rng.randrange(i + 1)}")
                traffic.abort(victim)
            if i % 40 == 0:
                llm.loop.scheduler.check_integrity()
        traffic.finish()
    check_answers(traffic, expected, aborted)
    stats = llm.loop.stats()
    assert stats.retractions > 0
    assert any(kind == "abort" for kind in map(traffic.kind, traffic.ends))
    assert not drafts or stats.drafted_tokens > 0
    check_idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_all_in_the_middle(checkpoint, overlap):
    llm = make_llm(checkpoint, **paged(4, 260, scheduler={"overlap": overlap, "chunk_size": 30}))
    for steps in range(8):
        traffic = Traffic(llm)
        for i, (prompt, params) in enumerate(jobs_of(10)):
            traffic.add(f"{steps}-{i}", prompt, params)
        for _ in range(steps):
            traffic.step()
        llm.loop.handle(AbortAllMsg())
        traffic.finish(bound=3)
        check_idle(llm)


def test_commands_are_answered_while_requests_run(checkpoint):
    llm = make_llm(checkpoint)
    traffic = Traffic(llm)
    traffic.add("a", [1, 2, 3])
    llm.loop.step()
    llm.loop.handle(FlushCacheMsg("early"))
    llm.loop.handle(StatsRequestMsg("stats"))
    refused, stats = (a for a in llm.loop.step() if not hasattr(a, "rid"))
    assert (refused.ok, stats.running, stats.call_id) == (False, 1, "stats")
    assert stats.pages_used > 0
    llm.loop.handle(AbortAllMsg())
    llm.loop.step()
    llm.loop.handle(FlushCacheMsg("late"))
    (flushed,) = llm.loop.step()
    assert flushed.ok
    assert llm.loop.stats().pages_cached == 0
    check_idle(llm)
