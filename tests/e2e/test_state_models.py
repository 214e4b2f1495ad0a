"""Compare models with states with transformers, through the whole engine. States that are given back are filled with NaN.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_state_models.py
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import Traffic, TreeDrafter, check_idle, drafting, make_llm, prompts_of, results, varied_params
from state_models import MODELS, TOLERANCE, StateReference, engine_of, poison, save

from dovetail import LLM, SamplingParams
from dovetail.engine.grouped import pools_of, states_of
from dovetail.errors import ConfigError
from dovetail.llm import Output
from dovetail.memory.state_pool import bytes_per_slot
from dovetail.sampling_params import Pooling, PoolingKind
from dovetail.scheduler import admission

PAGE, STEPS = 4, 24
GREEDY = SamplingParams(max_new_tokens=STEPS, temperature=0, logprobs=0)


class Model:
    """Hold a checkpoint and its reference."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.path = name, save(name, directory)
        self.reference = StateReference(self.path)

    def engine(self, num_pages: int = 400, **sections: Any) -> LLM:
        """Return an engine that fills what is given back with NaN."""
        scheduler = {"max_running": 8, "chunk_size": 13} | sections.pop("scheduler", {})
        memory = {"page_size": PAGE, "num_pages": num_pages, "state_snapshot_tokens": PAGE} | sections.pop("memory", {})
        given = {"memory": memory, "scheduler": scheduler, "attention": "torch_native", "threads": 1}
        return poison(make_llm(self.path, **given | sections))

    def check(self, outputs: list[Output]) -> list[Output]:
        """Assert that greedy outputs are those of transformers."""
        for output in outputs:
            self.reference.check(list(output.prompt_ids), list(output.token_ids), chosen(output).tolist())
        return outputs


def chosen(output: Output) -> torch.Tensor:
    """Return the log-probabilities of the tokens of an output."""
    return torch.tensor([entry.logprob for entry in output.logprobs])


def gap(first: Output, second: Output) -> float:
    """Return the largest difference of two outputs' log-probabilities."""
    return float((chosen(first) - chosen(second)).abs().max())


NAMES = [pytest.param(name, marks=() if name == "qwen3_next" else pytest.mark.full) for name in MODELS]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.full)])
def test_chunks_mixed_steps_and_prefix_hits(model: Model, overlap: bool) -> None:
    """Prompts of odd lengths enter in chunks of odd sizes beside decode rows; the second round resumes from snapshots."""
    llm = model.engine(scheduler={"overlap": overlap})
    prompts = prompts_of([3, 40, 21, 1, 50, 33], shared=20)
    cold = model.check(llm.generate(prompts, GREEDY))
    check_idle(llm)
    warm = model.check(llm.generate(prompts, GREEDY))
    check_idle(llm)
    for before, after, prompt in zip(cold, warm, prompts, strict=True):
        assert after.token_ids == before.token_ids
        assert after.cached_tokens >= (len(prompt) - 1) // PAGE * PAGE - PAGE
        assert gap(before, after) <= 1e-5
    turns = [[*prompt, *output.token_ids, 5, 6, 7] for prompt, output in zip(prompts, warm, strict=True)]
    following = model.check(llm.generate(turns, GREEDY))
    assert all(output.cached_tokens > 0 for output in following)
    llm.close()


def test_states_are_kept_within_prompts(model: Model) -> None:
    """Prompts that enter in one step beside others leave snapshots, from which the same prompts and others resume."""
    llm = model.engine(1200, scheduler={"chunk_size": 512}, memory={"state_snapshot_tokens": 64})
    prompts = prompts_of([140, 200, 70], seed=4)
    cold = model.check(llm.generate(prompts, GREEDY))
    warm = model.check(llm.generate(prompts, GREEDY))
    for before, after, length in zip(cold, warm, (128, 192, 64), strict=True):
        assert after.cached_tokens >= length
        assert after.token_ids == before.token_ids
        assert gap(before, after) <= 1e-5
    parts = model.check(llm.generate([[*prompt[:130], 3, 4, 5] for prompt in prompts[:2]], GREEDY))
    assert [output.cached_tokens for output in parts] == [128, 128]
    check_idle(llm)
    llm.close()


@pytest.mark.full
def test_every_cached_length(model: Model) -> None:
    """Resume from every multiple of the page size: a prompt is cached up to there, and then asked for in full."""
    llm = model.engine()
    (prompt,) = prompts_of([45], seed=3)
    (cold,) = model.check(llm.generate([prompt], GREEDY))
    reached = set()
    for length in range(PAGE, len(prompt) - PAGE, PAGE):
        llm.loop.scheduler.flush_cache()
        llm.generate([prompt[: length + PAGE + 1]], SamplingParams(max_new_tokens=1, temperature=0))
        (warm,) = model.check(llm.generate([prompt], GREEDY))
        reached.add(warm.cached_tokens)
        assert warm.token_ids == cold.token_ids
        assert gap(cold, warm) <= 1e-5
    assert reached == set(range(PAGE, len(prompt) - PAGE, PAGE))
    check_idle(llm)
    llm.close()


def test_little_memory_and_retraction(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are retracted, or wait for slots, and start again from snapshots.

    Slots and pages share the memory, so that five requests run in the beginning whatever the size of a slot is: they are
    short, and there is memory for five slots and 60 pages. They need more than 70 pages before the first of them ends.
    Later it depends on the size of a slot whether a request is retracted or waits until a slot is free.
    """
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    llm = model.engine(num_pages=100, scheduler={"max_running": 5})
    prompts = prompts_of([9, 14, 11, 10, 13, 40, 31, 26], seed=4, shared=8)
    allocator: Any = llm.loop.scheduler.ledger.allocator
    has_pages = bool(pools_of(engine_of(llm).pool))
    if has_pages:
        allocator.alloc(allocator.allocatable([0, 0], 5) - 60)  # the test keeps them
    for _ in range(2):
        model.check(llm.generate(prompts, replace(GREEDY, max_new_tokens=50)))
    assert llm.loop.stats().retractions > 0 or not has_pages
    llm.close()


def test_snapshots_move_between_engines(model: Model) -> None:
    """Pages and a snapshot that one engine has exported give another one the answer of the first, bit for bit, as if it had
    computed them."""
    first, second = model.engine(), model.engine()
    (prompt,) = prompts_of([45], seed=3)
    first.generate([prompt], GREEDY)
    (expected,) = first.generate([prompt], GREEDY)
    second.generate([prompt], replace(GREEDY, max_new_tokens=1))
    places = []
    for llm in (first, second):
        match = llm.loop.scheduler.ledger.cache.match(np.array(prompt[:-1], np.int32))
        assert match.states is not None
        places.append((match.length, match.pages.tolist(), match.states.tolist()))
    (length, *ours), (same, *theirs) = places
    assert length == same > 0
    pools = [(pools_of(engine_of(llm).pool), states_of(engine_of(llm).pool)) for llm in (first, second)]
    for source, target, own, other in zip(pools[0][0], pools[1][0], ours[0], theirs[0], strict=True):
        target.poison(other)
        target.import_pages(source.export_pages(own), other)
    for source, target, slot, other in zip(pools[0][1], pools[1][1], ours[1], theirs[1], strict=True):
        target.fill(float("nan"), [other])
        target.import_slots(source.export_slots([slot]), [other])
    (again,) = model.check(second.generate([prompt], GREEDY))
    assert again.cached_tokens == length
    assert again.token_ids == expected.token_ids
    assert gap(again, expected) == 0
    for llm in (first, second):
        llm.close()


@pytest.mark.full
def test_several_outputs_of_a_prompt(model: Model) -> None:
    """Outputs of one prompt share its states by a snapshot, and then have their own."""
    llm = model.engine()
    params = SamplingParams(max_new_tokens=STEPS, temperature=0.8, n=4, seed=3, logprobs=0)
    prompts = prompts_of([37, 6], seed=5)
    outputs = llm.generate(prompts, params)
    assert len({tuple(output.token_ids) for output in outputs}) > 2
    for output in outputs:
        expected = model.reference.logprobs([*output.prompt_ids, *output.token_ids])[len(output.prompt_ids) - 1 : -1]
        right = expected[torch.arange(STEPS), torch.tensor(output.token_ids)]
        assert (chosen(output) - right).abs().max() <= TOLERANCE
    check_idle(llm)
    llm.close()


@pytest.mark.parametrize("drafter", ["random", pytest.param("ngram", marks=pytest.mark.full)])
def test_drafts_accepted_and_rejected(model: Model, drafter: str) -> None:
    prompts = prompts_of([9, 33, 50, 4], seed=6)
    prompts[1] = prompts[1][:11] * 3
    llm = model.engine(speculative="ngram")
    outputs = model.check(llm.generate(prompts, GREEDY))
    if drafter == "ngram":  # drafts what it answered before
        outputs = model.check(llm.generate(prompts, GREEDY))
    else:
        chains = TreeDrafter(chain=True)
        chains.learn(outputs)
        with drafting(llm, chains):
            outputs = model.check(llm.generate(prompts, GREEDY))
    counts = [(output.acceptance.drafted, output.acceptance.accepted) for output in outputs]
    drafted, accepted = map(sum, zip(*counts, strict=True))
    assert drafted >= accepted > 0
    assert drafted > accepted or drafter == "ngram"
    check_idle(llm)
    llm.close()


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("qwen3_5", "nemotron_h")])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    """Each rank keeps its share of the states; the ranks copy the same slots."""
    model = Model(name, tmp_path)
    given = {"attention": "torch_native", "threads": 1, "speculative": "ngram", "parallel": {"tp": 2}}
    memory = {"page_size": PAGE, "num_pages": 300, "state_snapshot_tokens": PAGE}
    llm = make_llm(model.path, memory=memory, scheduler={"max_running": 6, "chunk_size": 13}, **given)
    prompts = prompts_of([3, 40, 21, 33], shared=20)
    outputs: list[Output] = []
    for _ in range(2):
        outputs = model.check(llm.generate(prompts, GREEDY))
    assert all(output.cached_tokens > 0 for output in outputs)
    assert sum(output.acceptance.accepted for output in outputs) > 0
    check_idle(llm)
    llm.close()


@pytest.mark.full
def test_requests_of_every_sort(model: Model) -> None:
    """With and without overlap, and in other chunks: the same outputs."""
    found = []
    for overlap in (True, False):
        llm = model.engine(scheduler={"overlap": overlap, "chunk_size": 13 if overlap else 64})
        rng = random.Random(5)
        params = [replace(varied_params(rng), prompt_logprobs=None, logprobs=None) for _ in range(6)]
        found.append(results(llm.generate(prompts_of([9, 33, 1, 18, 40, 25], seed=7), params)))
        check_idle(llm)
        llm.close()
    assert found[0] == found[1]


@pytest.mark.full
def test_aborted_requests_leave_nothing(model: Model) -> None:
    llm = model.engine()
    traffic = Traffic(llm)
    for number, prompt in enumerate(prompts_of([30, 41, 9, 55, 17], seed=8, shared=12)):
        traffic.add(str(number), prompt, GREEDY)
    for number in range(12):
        traffic.step()
        if number in (2, 5, 9):
            traffic.abort(str(number % 4))
    traffic.finish()
    check_idle(llm)
    outputs = model.check(llm.generate(prompts_of([30, 41, 9, 55, 17], seed=8, shared=12), GREEDY))
    assert any(output.cached_tokens > 0 for output in outputs)
    llm.close()


def test_memory_is_reported(model: Model) -> None:
    llm = model.engine()
    engine = engine_of(llm)
    group, state = engine.cache_groups[-1], engine.info.cache_groups[-1]
    assert group["kind"] == "state"
    assert group["bytes_per_snapshot"] == bytes_per_slot(state, torch.float32)
    assert group["most_snapshots"] >= 2 * 8, "each row has a slot, and one for a snapshot"
    llm.close()


def test_states_in_bfloat16(model: Model) -> None:
    """With states in bfloat16 log-probabilities are near those of transformers in float32, with a prefix hit too. A model whose
    states are all copies of inputs is refused."""
    memory = {"state_dtype": "bfloat16"}
    if model.name == "lfm2":
        with pytest.raises(ConfigError, match=r"memory.state_dtype is bfloat16, and Lfm2ForCausalLM keeps no states"):
            model.engine(memory=memory)
        return
    llm = model.engine(memory=memory)
    own = states_of(engine_of(llm).pool)[0].group
    assert {state.dtype for state in own.states} == {"bfloat16", None}
    assert engine_of(llm).cache_groups[-1]["bytes_per_snapshot"] == bytes_per_slot(own, torch.float32)
    cold = llm.generate(prompts_of([40, 33], shared=20), GREEDY)
    (warm,) = llm.generate([cold[0].prompt_ids], GREEDY)
    assert warm.cached_tokens > 0
    for output in (*cold, warm):
        text, begin = [*output.prompt_ids, *output.token_ids], len(output.prompt_ids)
        expected = model.reference.logprobs(text)[begin - 1 : -1][torch.arange(STEPS), torch.tensor(text[begin:])]
        assert 0 < (expected - chosen(output)).abs().mean() < 0.1
    llm.close()


@pytest.mark.full
def test_pooled_prompts(model: Model) -> None:
    """The mean of hidden states does not depend on chunks, nor on what is cached."""
    params = SamplingParams(max_new_tokens=0, pooling=Pooling(PoolingKind.MEAN))
    found = []
    for chunk in (13, 64):
        llm = model.engine(scheduler={"chunk_size": chunk})
        outputs = llm.generate(prompts_of([9, 40, 23], seed=9), params)
        found.append([torch.tensor(output.pooled) for output in outputs])
        llm.close()
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=2e-4)
