"""Compare models that keep keys and values, windows or latents with transformers, through the whole engine. Pages that are
given back are filled with NaN. Models with states are compared in test_state_models.py.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_group_models.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import TreeDrafter, check_idle, drafting, make_llm, prompts_of
from group_models import MODELS, GroupReference, save

from dovetail import LLM, SamplingParams
from dovetail.engine.grouped import pools_of
from dovetail.llm import Output
from dovetail.scheduler import admission
from dovetail.scheduler.turns import TenantTurns

STEPS = 32
GREEDY = SamplingParams(max_new_tokens=STEPS, temperature=0, logprobs=0)
USUAL = ("gemma3n", "gpt_oss", "deepseek_v2")
NAMES = [pytest.param(name, marks=() if name in USUAL else pytest.mark.full) for name in MODELS]


class Model:
    """Hold a checkpoint and its reference."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.path = name, save(name, directory)
        self.reference = GroupReference(self.path)

    def engine(self, page_size: int = 4, num_pages: int = 400, **sections: Any) -> LLM:
        """Return an engine that fills what is given back with NaN, unless other processes hold it."""
        memory = {"page_size": page_size, "num_pages": num_pages}
        llm = make_llm(self.path, memory=memory, attention="torch_native", threads=1, **sections)
        return llm if "parallel" in sections else poison(llm)

    def check(self, outputs: list[Output]) -> list[Output]:
        """Assert that greedy outputs are those of transformers."""
        for output in outputs:
            self.reference.check(list(output.prompt_ids), list(output.token_ids), chosen(output))
        return outputs


def chosen(output: Output) -> torch.Tensor:
    """Return the log-probabilities of the tokens of an output."""
    return torch.tensor([entry.logprob for entry in output.logprobs])


def poison(llm: LLM) -> LLM:
    """Fill the pages of each cache group that are given back with NaN from now on."""
    executor: Any = llm.loop.executor
    pools, allocator = pools_of(executor.rank.engine.pool), llm.loop.scheduler.ledger.allocator
    free = allocator.free

    def freed(pages: Any) -> None:
        free(pages)
        for pool, own in zip(pools, pages, strict=True):
            pool.poison(own[own > 0].tolist())

    allocator.free = freed
    return llm


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    "chunk", [13, pytest.param(7, marks=pytest.mark.full), pytest.param(512, marks=pytest.mark.full)]
)
def test_chunks_mixed_steps_and_prefix_hits(model: Model, chunk: int) -> None:
    """Prompts enter in chunks of an odd size beside decode rows; the second time they are found in the cache."""
    llm = model.engine(scheduler={"chunk_size": chunk, "overlap": chunk != 7})
    prompts = prompts_of([3, 40, 21, 64, 1], shared=20)
    cold = model.check(llm.generate(prompts, GREEDY))
    check_idle(llm)
    warm = model.check(llm.generate(prompts, GREEDY))
    check_idle(llm)
    assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
    assert all(output.cached_tokens >= (len(prompt) - 1) // 4 * 4 for output, prompt in zip(warm, prompts, strict=True))
    llm.close()


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.full)])
def test_every_cached_length(model: Model, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose beginning is cached gives the bits of one that was computed in two pieces, whatever the length of the
    beginning. (Products of other numbers of rows may add up in another order, so that one piece may give other bits.)"""
    llm = model.engine(page_size=1)
    (prompt,), params = prompts_of([33], seed=3), replace(GREEDY, max_new_tokens=12)
    budgets: list[int] = []
    monkeypatch.setattr(admission, "LEAST_TOKENS", 0)
    monkeypatch.setattr(TenantTurns, "budget", lambda _: budgets.pop(0) if budgets else 512)
    (whole,) = model.check(llm.generate([prompt], params))
    for length in range(1, len(prompt), step):
        llm.loop.scheduler.flush_cache()
        budgets.append(length)
        (cold,) = llm.generate([prompt], params)
        llm.loop.scheduler.flush_cache()
        llm.generate([prompt[:length]], SamplingParams(max_new_tokens=1, temperature=0))
        (warm,) = llm.generate([prompt], params)
        assert (cold.cached_tokens, warm.cached_tokens, budgets) == (0, length, [])
        assert warm.token_ids == cold.token_ids == whole.token_ids
        assert chosen(warm).equal(chosen(cold)), f"other bits behind {length} cached tokens"
        assert (chosen(warm) - chosen(whole)).abs().max() <= 2e-5
    check_idle(llm)
    llm.close()


def test_retraction(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that have windows only need little memory, so that they get less."""
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    windows = model.name in ("mistral", "phi3")
    llm = model.engine(num_pages=40 if windows else 60, scheduler={"chunk_size": 16})
    prompts = prompts_of([3, 40, 21, 64, 50, 33], shared=20)
    for _ in range(2):
        model.check(llm.generate(prompts, SamplingParams(max_new_tokens=70, temperature=0, logprobs=0)))
        check_idle(llm)
    assert llm.loop.stats().retractions > 0 or windows
    llm.close()


@pytest.mark.parametrize("chain", [False, pytest.param(True, marks=pytest.mark.full)])
def test_drafts_accepted_and_rejected(model: Model, chain: bool) -> None:
    """Trees of drafts, or chains, of which some are right."""
    llm = model.engine(speculative="ngram", scheduler={"chunk_size": 24, "draft": "always"})
    prompts = prompts_of([9, 33, 50, 4], seed=6)
    drafter = TreeDrafter(chain=chain)
    drafter.learn(model.check(llm.generate(prompts, GREEDY)))
    with drafting(llm, drafter):
        outputs = model.check(llm.generate(prompts, GREEDY))
    counts = [(output.acceptance.drafted, output.acceptance.accepted) for output in outputs]
    drafted, accepted = map(sum, zip(*counts, strict=True))
    assert drafted > accepted > 0
    check_idle(llm)
    llm.close()


@pytest.mark.full
def test_two_ranks(model: Model) -> None:
    """Each rank keeps its share of the heads, or all of every latent."""
    llm = model.engine(parallel={"tp": 2}, speculative="ngram", scheduler={"chunk_size": 24, "draft": "always"})
    prompts = [prompt * 2 for prompt in prompts_of([3, 30, 17], shared=16)]
    try:
        model.check(llm.generate(prompts, GREEDY))
        assert all(output.cached_tokens > 0 for output in model.check(llm.generate(prompts, GREEDY)))
        assert llm.loop.stats().drafted_tokens > 0
        check_idle(llm)
    finally:
        llm.close()
