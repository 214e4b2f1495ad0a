"""Test data-parallel attention with models that keep states (two ranks, gloo, on the CPU): each rank has the states of its own
requests, and tokens are those of one rank, however the work is cut into steps, with snapshots of states, and with drafts.

.venv/bin/python -m pytest -q tests/e2e/test_data_attention_states.py
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_runs import check_idle, check_with_aborts, make_llm, prompts_of, results, varied_params
from state_drafter_checkpoints import with_mtp
from state_models import save

from dovetail import LLM, SamplingParams
from dovetail.scheduler import admission, snapshots

MTP = {"kind": "mtp", "num_draft_tokens": 3}
LONG = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)
CHUNKS: dict[str, Any] = {"scheduler": {"chunk_size": 7, "max_running": 8}}
FEW: dict[str, Any] = {"scheduler": {"chunk_size": 40, "max_running": 8, "overlap": True}, "memory": {"num_pages": 100}}
# steps keep states within prompts, after every 64 tokens
WITHIN: dict[str, Any] = {
    "scheduler": {"chunk_size": 150, "max_running": 8},
    "memory": {"state_snapshot_tokens": 64},
}


def engine(path: Path, ranks: int, **sections: Any) -> LLM:
    scheduler = {"draft": "always"} | sections.pop("scheduler", {})
    memory = {"page_size": 4, "num_pages": 400, "state_snapshot_tokens": 4} | sections.pop("memory", {})
    given = {"parallel": {"tp": 2, "attention": "data"}} if ranks == 2 else {}
    return make_llm(path, threads=1, memory=memory, scheduler=scheduler, **given, **sections)


def jobs(count: int, seed: int, longest: int = 25) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts, half of which share a prefix, and parameters: every other row is greedy and long, others are of every sort."""
    rng = random.Random(seed)
    lengths = [rng.randrange(1, longest) for _ in range(count)]
    prompts = prompts_of(lengths[: count // 2], seed) + prompts_of(lengths[count // 2 :], seed + 1, shared=21)
    return prompts, [varied_params(rng, most=40) if row % 2 else LONG for row in range(count)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the checkpoint of a model."""
    made: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name.replace(" ", "_")) / "model"
            if name == "qwen3_next, mtp":
                with_mtp(made[name])
            else:
                save(name, made[name])
        return made[name]

    return model


CASES = [
    ("qwen3_next, mtp", MTP, FEW),
    ("kimi_linear", "none", CHUNKS),
    pytest.param("kimi_linear", "none", WITHIN, marks=pytest.mark.full),
    pytest.param("kimi_linear", "ngram", CHUNKS, marks=pytest.mark.full),
    pytest.param("qwen3_next, mtp", MTP, CHUNKS, marks=pytest.mark.full),
    pytest.param("jamba", "ngram", CHUNKS, marks=pytest.mark.full),
    pytest.param("granite_hybrid", "none", CHUNKS, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "speculative", "sections"), CASES)
def test_two_ranks_generate_what_one_does(
    models: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    speculative: Any,
    sections: dict[str, Any],
) -> None:
    """First there is one request, so that the other rank has no rows. The second round of the same requests resumes at snapshots."""
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    pack, saved = snapshots._packed_saves, list[Any]()
    monkeypatch.setattr(snapshots, "_packed_saves", lambda saves: saved.append(saves) or pack(saves))
    one, two = engine(models(name), 1), engine(models(name), 2, speculative=speculative, **sections)
    allocators: list[Any] = (
        [member.allocator for member in two.loop.scheduler.ledger.members] if sections is FEW else []
    )
    try:
        # 26 pages and five slots are left
        kept: list[Any] = [own.alloc(own.allocatable([0, 0], 5) - 26) for own in allocators]
        for seed, count in ((0, 1), (1, 9), (1, 9)):
            prompts, params = jobs(count, seed, longest=200 if sections is WITHIN else 25)
            assert results(two.generate(prompts, params)) == results(one.generate(prompts, params))
        for own, pages in zip(allocators, kept, strict=True):
            own.free([pages[0], pages[0][:0]])
        check_idle(two)
        stats = two.loop.stats()
        assert stats.drafter_errors == 0
        assert stats.cached_tokens > 0
        assert bool(saved) == (sections is WITHIN)
        assert (stats.accepted_tokens > 0) == (speculative != "none")
        assert (stats.retractions > 0) == (sections is FEW)
    finally:
        two.close()
        one.close()


def test_requests_that_come_and_are_aborted(models: Callable[[str], Path]) -> None:
    """They end once, with a beginning of what one rank generates alone, and both ranks keep some of them."""
    prompts, params = jobs(12, seed=3)
    one = engine(models("kimi_linear"), 1)
    alone = [output.token_ids for output in one.generate(prompts, params)]
    one.close()
    two = engine(models("kimi_linear"), 2, scheduler={"chunk_size": 11, "max_running": 8})
    try:
        assert check_with_aborts(two, prompts, params, alone, 0.3) == {0, 1}
    finally:
        two.close()
