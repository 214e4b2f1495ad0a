"""Test drafters with keys and values of their own beside layers with states: outputs are those without drafts, however the
work is cut into steps. Pages and states that are given back are filled with NaN.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_state_drafters.py
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine_runs import check_idle, make_llm, prompts_of, results, varied_params
from state_drafter_checkpoints import DRAFTERS
from state_models import engine_of, poison, save

from dovetail import LLM, SamplingParams
from dovetail.engine.draft_pages import DraftPages
from dovetail.errors import ResolutionError
from dovetail.scheduler import admission
from dovetail.testing.drafter import text_of

NAMES = [pytest.param(name, marks=() if name in ("draft_model", "mtp") else pytest.mark.full) for name in DRAFTERS]
CUTS: dict[str, dict[str, Any]] = {
    "chunks": {"scheduler": {"chunk_size": 7}},
    "retraction": {"scheduler": {"chunk_size": 100, "overlap": True, "max_running": 5}, "memory": {"num_pages": 100}},
    "pages of one": {"scheduler": {"overlap": True}, "memory": {"page_size": 1, "num_pages": 1600}},
    "not mixed": {"scheduler": {"mixed": False, "chunk_size": 20}, "memory": {"page_size": 16, "num_pages": 100}},
    "no prefix cache": {"cache": "none"},
    "where it pays": {"scheduler": {"draft": "adaptive", "overlap": True}},
    "two ranks": {"parallel": {"tp": 2}},
}
CUT_NAMES = [pytest.param(cut, marks=() if cut in ("chunks", "retraction") else pytest.mark.full) for cut in CUTS]


@pytest.fixture(scope="module", params=NAMES)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint and the drafter that is to be used with it."""
    build, speculative = DRAFTERS[request.param]
    build(directory := tmp_path_factory.mktemp("target") / "model")
    return directory, speculative


def engine(path: Path, speculative: dict[str, Any] | str, **sections: Any) -> LLM:
    scheduler = {"max_running": 8, "draft": "always"} | sections.pop("scheduler", {})
    memory = {"page_size": 4, "num_pages": 400, "state_snapshot_tokens": 4} | sections.pop("memory", {})
    given = {"attention": "torch_native", "threads": 1, "speculative": speculative}
    llm = make_llm(path, memory=memory, scheduler=scheduler, **given, **sections)
    return llm if "parallel" in sections else poison(llm)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(1)
    prompts = [*prompts_of([9, 14, 11, 10, 13, 40, 31, 26], seed=2, shared=8), [3]]
    params = [varied_params(rng, most=40) for _ in prompts]
    params[:5] = [SamplingParams(max_new_tokens=50, temperature=0)] * 5  # as in test_state_models
    return prompts, params


@pytest.fixture(scope="module")
def expected(drafter: tuple[Path, dict[str, Any]]) -> list[Any]:
    """Return what the target generates without drafts."""
    with engine(drafter[0], "none") as llm:
        return results(llm.generate(*requests()))


@pytest.mark.parametrize("cut", CUT_NAMES)
def test_outputs_are_those_without_drafts(
    drafter: tuple[Path, dict[str, Any]], expected: list[Any], cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    llm = engine(*drafter, **{name: dict(own) if isinstance(own, dict) else own for name, own in CUTS[cut].items()})
    allocator: Any = llm.loop.scheduler.ledger.allocator
    kept = None
    if cut == "retraction":
        kept = allocator.alloc(allocator.allocatable([0, 0], 5) - 60)  # 60 pages and five slots are left
    for _ in range(2):  # the second time from the prefix cache
        assert results(llm.generate(*requests())) == expected
    stats = llm.loop.stats()
    assert llm.loop.drafter_errors == 0
    assert cut == "where it pays" or stats.drafted_tokens > stats.accepted_tokens > 20
    assert (cut == "retraction") == (stats.retractions > 0)
    assert (cut == "no prefix cache") == (stats.cached_tokens == 0)
    if kept is not None:
        allocator.free([kept[0], kept[0][:0]])
    check_idle(llm)
    llm.close()


def drafted(llm: LLM) -> dict[tuple[int, ...], list[int]]:
    """Return all drafts, by the text behind which they were made."""
    found: dict[tuple[int, ...], list[int]] = {}
    own: Any = llm.loop.executor
    propose = own.rank.drafter.propose

    def noted(batch: Any) -> Any:
        tree = propose(batch)
        if tree is not None:
            for row, (ids, count) in enumerate(zip(tree.token_ids, tree.lens, strict=True)):
                found[tuple(text_of(batch, row))] = ids[:count].tolist()
        return tree

    own.rank.drafter.propose = noted
    stem, *_ = prompts_of([35], seed=5)
    for shared, more in ((35, 3), (34, 5), (32, 7), (33, 9)):
        prompt = [*stem[:shared], more, *prompts_of([4], seed=more)[0]]
        llm.generate([prompt], SamplingParams(max_new_tokens=9, temperature=0, ignore_eos=True))
    assert llm.loop.drafter_errors == 0
    return found


def test_drafts_behind_a_cached_prefix_are_those_behind_one_that_was_read(
    drafter: tuple[Path, dict[str, Any]],
) -> None:
    made = []
    for cache in ("radix", "none"):
        llm = engine(*drafter, cache=cache)
        made.append(drafted(llm))
        assert (llm.loop.stats().cached_tokens > 0) == (cache == "radix")
        check_idle(llm)
        llm.close()
    assert made[0] == made[1]
    assert len(made[0]) > 8


def test_draft_caches_have_a_page_for_each_page_of_the_target(drafter: tuple[Path, dict[str, Any]]) -> None:
    """Their memory is counted, and their numbers have no gaps."""
    llm, plain = engine(*drafter), engine(drafter[0], "none")
    budget, pages = engine_of(llm).budget, DraftPages.in_arena(engine_of(llm).budget.arena)
    caches = engine_of(llm)._draft_runtime._caches
    stores = [own for cache in caches for own in (getattr(cache._pool, "members", None) or (cache._pool,))]
    assert all(store.num_pages == pages.num_pages for store in stores)
    held = sum(part.nbytes for store in stores for part in store._parts)
    assert budget.pool == budget.arena.num_slabs * budget.arena.slab_bytes + held
    assert engine_of(plain).budget.pool < budget.pool
    allocator: Any = llm.loop.scheduler.ledger.allocator
    taken = allocator.alloc(budget.num_pages - 20)[0]
    numbers = pages.of(taken)
    assert len(set(numbers.tolist())) == len(taken)
    assert numbers.min() > 0
    assert numbers.max() < pages.num_pages
    for each in (llm, plain):
        each.close()


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "dflash"])
def test_a_model_of_states_alone_has_no_pages_for_a_drafter(kind: str, tmp_path: Path) -> None:
    save("mamba2", tmp_path)
    with pytest.raises(ResolutionError, match=r"needs kv\.draft_cache; the kv offers kv\.rollback, kv\.state_rollback"):
        engine(tmp_path, kind)
