"""Test that outputs with the drafters mtp and dflash are those without: greedy and sampled, however the work is cut
into steps.

.venv/bin/python -m pytest -q tests/e2e/test_engine_mtp_dflash.py
"""

import random
from dataclasses import replace

import engine_models as models
import mtp_dflash_checkpoints as checkpoints
import pytest
from engine_runs import VOCAB, Traffic, check_idle, make_llm, paged, prompts_of, results, varied_params
from safetensors.torch import load_file, save_file

from dovetail import SamplingParams
from dovetail.scheduler import admission
from dovetail.types import FinishKind

GENERATED = 5
"""The number of tokens that the target generates: drafts of random weights are right now and then."""


def save_target(directory, layers):
    """Save a model with ``layers`` that predict further tokens, and a DFlash drafter in its folder."""
    models.save_llama(directory, head_dim=16)
    saved = load_file(directory / "model.safetensors")
    saved["lm_head.weight"][GENERATED:] = 0
    saved["lm_head.weight"][:GENERATED] *= 4
    save_file(saved, directory / "model.safetensors")
    checkpoints.add_mtp(directory, layers)
    checkpoints.save_dflash(directory / "dflash", hidden=64, head_dim=16, mask=VOCAB - 1)
    return directory


DRAFTERS = {
    "mtp": (1, {"kind": "mtp", "num_draft_tokens": 4}),
    "mtp, three layers": (3, {"kind": "mtp"}),
    "dflash": (1, {"kind": "dflash"}),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request, tmp_path_factory):
    """Return a checkpoint and the drafter that is to be used with it."""
    layers, speculative = DRAFTERS[request.param]
    return save_target(tmp_path_factory.mktemp("target"), layers), speculative


def with_drafter(drafter, **sections):
    checkpoint, speculative = drafter
    scheduler = {"draft": "always"} | sections.pop("scheduler", {})
    return make_llm(checkpoint, speculative=speculative, scheduler=scheduler, **sections)


CUTS = {
    "plain": paged(16),
    "pages of one token": paged(1),
    "chunks": paged(16, scheduler={"chunk_size": 7}),
    "chunks of one": paged(8, scheduler={"chunk_size": 1}),
    "overlap": paged(16, scheduler={"overlap": True, "chunk_size": 7}),
    "no mixed steps": paged(4, scheduler={"mixed": False}),
    "retraction": paged(1, 120, scheduler={"chunk_size": 30}),
    "retraction of pages": paged(8, 136, scheduler={"overlap": True}),
    "no prefix cache": paged(16, cache="none"),
}


def requests():
    rng = random.Random(1)
    prompts = [*prompts_of([1, 9, 17, 30, 6, 40], seed=2, shared=14), [3], [5, 7]]
    params = [varied_params(rng, most=32) for _ in prompts]
    params[0] = params[3] = params[6] = SamplingParams(max_new_tokens=36, temperature=0)
    return prompts, params


@pytest.fixture(scope="module")
def expected(drafter):
    """Return what the target generates without drafts."""
    return results(make_llm(drafter[0]).generate(*requests()))


@pytest.mark.sample(2)
@pytest.mark.parametrize("cut", CUTS)
def test_outputs_are_those_without_drafts(drafter, expected, cut, monkeypatch):
    if "retraction" in cut:
        monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    llm = with_drafter(drafter, **CUTS[cut])
    for _ in range(2):  # the second time from the prefix cache
        assert results(llm.generate(*requests())) == expected
    stats = llm.loop.stats()
    assert llm.loop.drafter_errors == 0
    assert stats.drafted_tokens > stats.accepted_tokens > 20
    assert ("retraction" in cut) == (stats.retractions > 0)
    assert (cut == "no prefix cache") == (stats.cached_tokens == 0)
    check_idle(llm)


def test_several_outputs_and_requests_without_drafts(drafter):
    prompts = prompts_of([20, 3], seed=4)
    many = SamplingParams(max_new_tokens=24, n=4, seed=5, temperature=0.8)
    without = replace(many, speculative=False)
    expected = results(make_llm(drafter[0]).generate(prompts, many))
    llm = with_drafter(drafter)
    assert results(llm.generate(prompts, without)) == expected
    assert llm.loop.stats().drafted_tokens == 0
    assert results(llm.generate(prompts, [many, without])) == expected
    assert llm.loop.stats().drafted_tokens > 0
    check_idle(llm)


def test_requests_that_are_aborted_leave_nothing_behind(drafter):
    rng = random.Random(3)
    llm = with_drafter(drafter, **paged(4, 400, scheduler={"chunk_size": 9}))
    inner = llm.loop.executor.rank.drafter
    for turn in range(3):
        traffic = Traffic(llm)
        prompts = prompts_of([rng.randrange(1, 60) for _ in range(12)], seed=turn, shared=8)
        for index, prompt in enumerate(prompts):
            traffic.add(
                f"r{index}", prompt, SamplingParams(max_new_tokens=30, temperature=rng.choice([0, 1])), seed=index
            )
            traffic.step()
            if index % 3 == 2:
                traffic.abort(f"r{rng.randrange(index)}")
        traffic.finish()
        assert FinishKind.ABORT in {traffic.kind(rid) for rid in traffic.tokens}
    assert llm.loop.drafter_errors == 0
    assert not inner._observed
    check_idle(llm)


def test_drafts_that_are_asked_for_now_and_then_change_nothing(drafter):
    """Requests of which the drafter has missed a step are not drafted for; later ones are."""
    prompts = prompts_of([12, 25, 5], seed=6)
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=2)
    expected = results(make_llm(drafter[0]).generate(prompts, params))
    llm = with_drafter(drafter, scheduler={"draft": "adaptive"})
    rng = random.Random(0)
    llm.loop.adaptive_drafting.should_draft = lambda rows: rng.random() < 0.6
    assert results(llm.generate(prompts, params)) == expected
    llm.loop.adaptive_drafting.should_draft = lambda rows: True
    before = llm.loop.stats().drafted_tokens
    assert results(llm.generate(prompts, params)) == expected
    assert llm.loop.stats().drafted_tokens > before
    assert llm.loop.drafter_errors == 0
    check_idle(llm)


def test_bfloat16(drafter):
    """Rounding differs between steps of one token and of several, so texts may differ; nothing breaks."""
    llm = with_drafter(drafter, model={"dtype": "bfloat16"})
    outputs = llm.generate(prompts_of([12, 40], seed=1), SamplingParams(max_new_tokens=60, temperature=0))
    assert [len(output.token_ids) for output in outputs] == [60, 60]
    assert all(0 <= token < VOCAB for output in outputs for token in output.token_ids)
    assert llm.loop.drafter_errors == 0
    assert llm.loop.stats().accepted_tokens > 0
    check_idle(llm)
