"""Test that drafters that run a model change no text: greedy or sampled, cut in chunks, from the cache, aborted,
retracted.

.venv/bin/python -m pytest -q tests/e2e/test_engine_drafters.py
"""

import random
from dataclasses import replace

import drafter_checkpoints as checkpoints
import pytest
import torch
from engine_runs import Traffic, check_idle, make_llm, paged, prompts_of, results, varied_params
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.errors import ResolutionError
from dovetail.scheduler import admission

DRAFTERS = {
    "draft_model": {"kind": "draft_model", "chunk_size": 32},
    "eagle, chains": {"kind": "eagle", "topk": 1, "depth": 3},
    "eagle": {"kind": "eagle", "topk": 3, "depth": 4, "num_draft_tokens": 7},
    "eagle3": {"kind": "eagle3"},
    "eagle3_tree": {"kind": "eagle3_tree", "topk": 2, "depth": 3, "num_draft_tokens": 5},
}
CUTS = {
    "plain": paged(16),
    "chunks": paged(16, scheduler={"chunk_size": 7}),
    "pages of one": paged(1, scheduler={"chunk_size": 50}),
    "retraction": paged(1, 190, scheduler={"chunk_size": 30}),
    "overlap": paged(4, scheduler={"overlap": True}),
    "not mixed": paged(4, scheduler={"mixed": False, "chunk_size": 20}),
    "where it pays": paged(4, scheduler={"draft": "adaptive", "overlap": True}),
}


def with_drafts(sections, speculative):
    scheduler = {"draft": "always"} | sections.get("scheduler", {})
    return sections | {"speculative": speculative, "scheduler": scheduler}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Save a target, random heads for it, and a smaller model that sometimes agrees with it."""
    directory = checkpoints.save_target(tmp_path_factory.mktemp("drafters") / "target", eos_token_id=17)
    checkpoints.save_eagle(directory / "eagle")
    checkpoints.save_eagle3(directory / "eagle3")
    checkpoints.save_target(directory / "draft_model", num_hidden_layers=6)  # the first layers of the target
    return directory


def varied_jobs(count):
    rng = random.Random(3)
    prompts = prompts_of([rng.randrange(1, 60) for _ in range(count)], seed=4, shared=20)
    return prompts, [varied_params(rng) for _ in range(count)]


def jobs():
    """Return requests of every sort at once, and then greedy ones alone, whose prompts are cached."""
    prompts, params = varied_jobs(12)
    several = SamplingParams(max_new_tokens=20, n=3, seed=5, temperature=0.9)
    greedy = SamplingParams(max_new_tokens=30, temperature=0, ignore_eos=True)
    return (prompts + prompts[:2], [*params, several, several]), (prompts[:8], greedy)


@pytest.fixture(scope="module")
def expected(target):
    llm = make_llm(target, **paged(16, 20000))
    return [results(llm.generate(*job)) for job in jobs()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_are_those_without_a_drafter(target, expected, monkeypatch, name, cut):
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    llm = make_llm(target, **with_drafts(CUTS[cut], DRAFTERS[name]))
    for job, texts in zip(jobs(), expected, strict=True):
        assert results(llm.generate(*job)) == texts
    stats = llm.loop.stats()
    assert llm.loop.drafter_errors == 0
    assert stats.drafted_tokens > (0 if cut == "where it pays" else 200)
    assert stats.cached_tokens > 0
    assert (cut == "retraction") == (stats.retractions > 0)
    check_idle(llm)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["eagle", "eagle3_tree"])
def test_unlikely_drafts_are_not_verified(target, expected, name):
    """Fewer drafts are verified, and the texts are the same."""
    counted = []
    for least in (0, 0.02, 0.05):
        sections = paged(4, scheduler={"min_draft_probability": least})
        llm = make_llm(target, **with_drafts(sections, DRAFTERS[name]))
        for job, texts in zip(jobs(), expected, strict=True):
            assert results(llm.generate(*job)) == texts
        assert llm.loop.drafter_errors == 0
        stats = llm.loop.stats()
        counted.append(stats.drafted_tokens)
        check_idle(llm)
    assert counted[0] > counted[1] > counted[2]


def test_likely_drafts_are_right_more_often():
    """The embedded model and its head lose hardly a token in each step, with half of the drafts."""
    prompts = [
        f"Sort these words: {words}." for words in ("pear, fig, apple", "cat, dog, ant, bee", "red, blue, green")
    ]
    found = []
    for least in (0, 0.05):
        scheduler = {"draft": "always", "min_draft_probability": least}
        llm = LLM("tiny", device="cpu", threads=1, grammar="none", speculative="eagle3_tree", scheduler=scheduler)
        outputs = [
            llm.chat([{"role": "user", "content": prompt}], SamplingParams(temperature=0)).text for prompt in prompts
        ]
        stats = llm.loop.stats()
        found.append(
            (outputs, stats.accepted_tokens / stats.verify_steps, stats.accepted_tokens / stats.drafted_tokens)
        )
        llm.close()
    (texts, length, rate), (same, likely_length, likely_rate) = found
    assert same == texts
    assert likely_rate > 1.4 * rate
    assert likely_length > 0.9 * length


def test_chains_of_tree_drafters_refuse_a_least_probability(target):
    sections = paged(4, scheduler={"min_draft_probability": 0.1})
    with pytest.raises(ResolutionError, match=r"speculative\.topk is 1.*set speculative\.topk to 2 or more"):
        make_llm(target, **with_drafts(sections, DRAFTERS["eagle, chains"]))


def test_some_drafts_are_accepted_and_some_are_not(target):
    """Otherwise the tests in this file would prove little."""
    for name, most in (("draft_model", 0.95), ("eagle", 0.5), ("eagle3_tree", 0.5)):
        llm = make_llm(target, **with_drafts(paged(16), DRAFTERS[name]))
        llm.generate(
            prompts_of([3, 20, 30, 7, 12, 41]), SamplingParams(max_new_tokens=75, temperature=0, ignore_eos=True)
        )
        stats = llm.loop.stats()
        assert 0 < stats.accepted_tokens < most * stats.drafted_tokens


@pytest.fixture(scope="module")
def said_alone(target):
    prompts, params = varied_jobs(32)
    return [o.token_ids for o in make_llm(target, **paged(16, 20000)).generate(prompts, params)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DRAFTERS)
def test_random_traffic(target, said_alone, monkeypatch, name):
    """Requests of every sort run in little memory, are aborted at random, and some have no drafts: each ends once, and
    nothing is lost."""
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    prompts, params = varied_jobs(32)
    rng = random.Random(name)
    scheduler = {"chunk_size": rng.choice([11, 50]), "max_running": 8}
    llm = make_llm(target, **with_drafts(paged(4, 200, scheduler=scheduler), DRAFTERS[name]))
    traffic, aborted = Traffic(llm), set()
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        own = replace(own, seed=None, speculative=rng.random() < 0.8)
        traffic.add(f"r{i}", prompt, own, seed=params[i].seed)
        for _ in range(rng.choice([0, 0, 1, 3])):
            traffic.step()
        if rng.random() < 0.2:
            aborted.add(victim := f"r{rng.randrange(i + 1)}")
            traffic.abort(victim)
    traffic.finish()
    for i, tokens in enumerate(said_alone):
        said = traffic.tokens[f"r{i}"]
        if traffic.kind(f"r{i}") == "abort":
            assert f"r{i}" in aborted
            assert said == tokens[: len(said)]
        else:
            assert said == tokens
    stats = llm.loop.stats()
    assert llm.loop.drafter_errors == 0
    assert stats.retractions > 0
    assert stats.drafted_tokens > 0
    check_idle(llm)


# -- drafters that are always right ----------------------------------------------------------------------------------


def rate(llm, **params):
    llm.generate(prompts_of([3, 20, 70]), SamplingParams(max_new_tokens=60, ignore_eos=True, **params))
    stats = llm.loop.stats()
    assert stats.drafted_tokens > 50
    check_idle(llm)
    return stats.accepted_tokens / stats.drafted_tokens


@pytest.mark.parametrize("cut", ["plain", "chunks", "pages of one"])
def test_the_target_as_its_own_draft_model_is_always_right(target, cut):
    own = {"kind": "draft_model", "path": str(target), "num_draft_tokens": 5}
    assert rate(make_llm(target, **with_drafts(CUTS[cut], own)), temperature=0) > 0.95


def test_the_embedded_model_as_its_own_draft_model_is_always_right():
    own = {"kind": "draft_model", "path": "tiny"}
    assert rate(make_llm("tiny", **with_drafts(paged(16), own)), temperature=0) > 0.95


@pytest.fixture(scope="module")
def memoryless(tmp_path_factory):
    """Save a target whose next token depends on the last one alone, and an EAGLE head that knows it: the head's layers
    add nothing, and it returns the embedding that it receives."""
    directory = checkpoints.save_target(tmp_path_factory.mktemp("memoryless") / "target", eos_token_id=None)
    checkpoints.save_eagle(directory / "eagle")
    for folder in (directory, directory / "eagle"):
        tensors = load_file(folder / "model.safetensors")
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight", "fc.bias")):
                tensors[name] = torch.zeros_like(tensors[name])
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"])
            embedding = tensors["model.embed_tokens.weight"]
        else:
            size = embedding.shape[1]
            tensors["embed_tokens.weight"] = embedding.clone()
            tensors["fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
        save_file(tensors, folder / "model.safetensors")
    return directory


@pytest.mark.parametrize("cut", ["plain", "chunks", "pages of one"])
def test_a_head_that_knows_its_target_is_always_right(memoryless, cut):
    chains = {"kind": "eagle", "topk": 1, "depth": 4}
    assert rate(make_llm(memoryless, **with_drafts(CUTS[cut], chains)), temperature=0) > 0.95


def test_a_tree_of_a_head_that_knows_its_target_has_the_text_in_it(memoryless):
    """Every step brings as many tokens as the tree is deep, and one more."""
    trees = {"kind": "eagle", "topk": 3, "depth": 4, "num_draft_tokens": 21}
    llm = make_llm(memoryless, **with_drafts(paged(16), trees))
    llm.generate(prompts_of([20]), SamplingParams(max_new_tokens=51, temperature=0, ignore_eos=True))
    assert llm.loop.stats().accepted_tokens >= 35, "four of five tokens, but for the end"
