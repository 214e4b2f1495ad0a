"""Test that pages which the windows of requests have left are given to others while the requests run, and that answers are
those of an engine that keeps all pages. Pages that are given back are filled with NaN.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_sliding_groups.py
"""

from __future__ import annotations

import json
import random
import shutil
from contextlib import contextmanager
from pathlib import Path

import engine_models as models
import numpy as np
import pytest
import torch
from engine_runs import Traffic, TreeDrafter, check_idle, drafting, make_llm, prompts_of, results, varied_params
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, MistralConfig

import dovetail
from dovetail import LLM, SamplingParams
from dovetail.engine.grouped import pools_of
from dovetail.interfaces.cache import GroupDescriptor
from dovetail.memory.arena import ArenaAllocator
from dovetail.sampling_params import GrammarKind, GrammarSpec, Pooling, PoolingKind

WINDOW, STEPS = 24, 90
MADE = {
    "alternating": (
        Gemma2Config,
        {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 24, "num_key_value_heads": 2}
        | {"tie_word_embeddings": False},  # tied, it would repeat one token
    ),
    "all": (MistralConfig, {"num_key_value_heads": 2}),
}
TINY = {
    "architectures": ["SmolLM3ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "no_rope_layers": [1] * 4,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        name: models.save(tmp_path_factory.mktemp(name), config, **settings, sliding_window=WINDOW)
        for name, (config, settings) in MADE.items()
    }


def poison(llm: LLM) -> LLM:
    """Fill the pages that are given back with NaN from now on."""
    ledger, pools = llm.loop.scheduler.ledger, pools_of(llm.loop.executor.rank.engine.pool)
    free = ledger.allocator.free

    def freed(pages):
        free(pages)
        for pool, own in zip(pools, pages, strict=True):
            index = torch.from_numpy(own[own > 0]).long()
            for layer in range(pool.group.num_layers):
                pool.keys(layer)[index] = float("nan")
                pool.values(layer)[index] = float("nan")

    ledger.allocator.free = freed
    return llm


@contextmanager
def keeping_all(monkeypatch: pytest.MonkeyPatch):
    """Let engines that are built here keep all pages."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "dovetail.loop.build._descriptors",
            lambda resolved, engine: (GroupDescriptor(),) * len(resolved.model_info.cache_groups),
        )
        yield


def held(llm: LLM) -> tuple[int, ...]:
    """Return the number of pages of each group that requests need now: those that the cache cannot evict."""
    ledger = llm.loop.scheduler.ledger
    return tuple(np.subtract(ledger.allocator.num_held, ledger.cache.evictable).tolist())


@pytest.mark.parametrize(
    ("name", "cache", "overlap"),
    [("alternating", "radix", True), ("alternating", "none", False), ("all", "radix", False), ("all", "none", True)],
)
def test_answers_of_a_tight_pool(checkpoints, name: str, cache: str, overlap: bool) -> None:
    """Prompts enter in chunks, hit the prefix cache in the second round, and requests are retracted, unless they all have
    only windows."""
    reference = models.Reference(checkpoints[name])
    memory = {"page_size": 4, "num_pages": 48}
    llm = make_llm(
        checkpoints[name], cache=cache, memory=memory, scheduler={"chunk_size": 16, "overlap": overlap}, threads=1
    )
    poison(llm)
    prompts = prompts_of([3, 40, 21, 64, 50, 33], shared=20)
    for _ in range(2):
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=STEPS, temperature=0))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.token_ids) == reference.greedy(tuple(prompt), STEPS)
        check_idle(llm)
    assert (llm.loop.stats().retractions > 0) == (name == "alternating")
    if cache == "radix":
        assert sum(output.cached_tokens for output in outputs) > 0
    llm.close()


@pytest.mark.parametrize("name", MADE)
def test_drafts_that_are_rejected(checkpoints, name: str) -> None:
    """Trees of random drafts, most of them wrong, while the windows move on."""
    reference = models.Reference(checkpoints[name])
    llm = poison(make_llm(checkpoints[name], memory={"page_size": 4, "num_pages": 200}, threads=1))
    prompts = prompts_of([9, 33, 50], seed=3)
    params = SamplingParams(max_new_tokens=60, temperature=0)
    drafter = TreeDrafter(chain=name == "all")
    drafter.learn(llm.generate(prompts, params))
    with drafting(llm, drafter):
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == reference.greedy(tuple(prompt), 60)
    assert llm.loop.stats().accepted_tokens > 0
    check_idle(llm)
    llm.close()


@pytest.mark.parametrize("name", MADE)
def test_a_running_request_holds_its_window(checkpoints, name: str) -> None:
    """Without a prefix cache, and in the cache as far as it is locked: at most the window, a quarter of it that has not
    been unlocked yet, the tokens that enter next, and pages that are not full."""
    for cache in ("none", "radix"):
        llm = make_llm(checkpoints[name], cache=cache, memory={"page_size": 4, "num_pages": 200}, threads=1)
        traffic = Traffic(llm)
        traffic.add("a", prompts_of([150])[0], SamplingParams(max_new_tokens=200, temperature=0, ignore_eos=True))
        most = 0
        while llm.loop.has_work:
            traffic.step()
            if len(traffic.tokens["a"]) > 1 and not traffic.ends:
                most = max(most, held(llm)[-1])
        assert 0 < most <= (WINDOW + WINDOW // 4) // 4 + 3
        check_idle(llm)
        llm.close()


def test_pages_of_a_session_are_cached_not_used(checkpoints) -> None:
    """A pin holds few pages of the sliding group, and all of the other one."""
    llm = make_llm(checkpoints["alternating"], memory={"page_size": 4, "num_pages": 100}, threads=1)
    llm.generate(prompts_of([60]), SamplingParams(max_new_tokens=4, temperature=0), session="s")
    assert llm.loop.stats().pages_pinned == 15
    check_idle(llm)
    llm.close()


def test_memory_of_windows_serves_full_attention(checkpoints) -> None:
    """More requests run than if all groups kept all pages. Windows take a part of the memory, which nothing divides."""
    llm = make_llm(
        checkpoints["alternating"], memory={"page_size": 4, "num_pages": 250}, scheduler={"max_running": 64}, threads=1
    )
    allocator = llm.loop.scheduler.ledger.allocator
    assert isinstance(allocator, ArenaAllocator)
    full, sliding = llm.loop.executor.describe()["cache_groups"]
    assert (full["kind"], full["window"], sliding["kind"], sliding["window"]) == ("full", None, "sliding", WINDOW)
    assert full["bytes_per_token"] == sliding["bytes_per_token"] == 2 * 2 * 24 * 4  # K and V, heads, head_dim, float32
    assert full["most_tokens"] >= 2 * 249 * 4, "each group alone could have the memory of both"
    params = SamplingParams(max_new_tokens=200, temperature=0, ignore_eos=True)
    traffic = Traffic(llm)
    for number in range(7):  # 7 requests of 300 tokens are 525 pages
        traffic.add(str(number), prompts_of([100], seed=number)[0], params)
    most = 0
    while llm.loop.has_work:
        traffic.step()
        most = max(most, held(llm)[0])
    assert most > 1.3 * 250
    check_idle(llm)
    llm.close()


def random_traffic(llm: LLM, count: int, seed: int = 0) -> dict[str, list[int]]:
    """Send requests of all kinds at random times, and abort some. Return the tokens of those that were not aborted."""
    rng, traffic, aborted = random.Random(seed), Traffic(llm), set()
    prefix = prompts_of([70], seed=9)[0]
    for number in range(count):
        tokens = prompts_of([rng.randrange(1, 60)], seed=number)[0]
        prompt = prefix[: rng.choice([0, 0, 12, 40, 70])] + tokens
        traffic.add(str(number), prompt, varied_params(rng, most=60), seed=number)
        for _ in range(rng.randrange(6)):
            traffic.step()
        if rng.random() < 0.15 and str(number) not in traffic.ends:
            traffic.abort(str(number))
            aborted.add(str(number))
    traffic.finish()
    check_idle(llm)
    return {rid: tokens for rid, tokens in traffic.tokens.items() if rid not in aborted}


@pytest.mark.parametrize("count", [40, pytest.param(1500, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MADE)
def test_random_traffic_loses_no_page(checkpoints, monkeypatch, name: str, count: int) -> None:
    """Sums of products of more or fewer rows are rounded differently, which changes about one sampled token in 40,000:
    two engines that keep all pages differ as much."""
    memory, scheduler = {"page_size": 4, "num_pages": 90}, {"chunk_size": 32, "max_running": 12}
    settings = {"scheduler": scheduler, "threads": 1}
    llm = poison(make_llm(checkpoints[name], memory=memory, **settings))
    found = random_traffic(llm, count)
    ledger = llm.loop.scheduler.ledger
    llm.loop.scheduler.flush_cache()
    assert not any(ledger.allocator.num_held), "pages are lost"
    assert ledger.allocator.num_free == ledger.allocator.num_total
    llm.close()
    with keeping_all(monkeypatch):
        every = make_llm(checkpoints[name], memory=memory | {"num_pages": 400}, **settings)
    wanted = random_traffic(every, count)
    assert sum(tokens != wanted.get(rid, tokens) for rid, tokens in found.items()) <= count // 200
    every.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return an engine whose windows give pages back, and one that keeps all pages, with a tokenizer: the embedded model,
    with windows."""
    directory = tmp_path_factory.mktemp("tiny")
    source = Path(dovetail.__file__).parent / "assets" / "tiny"
    shutil.copytree(source, directory, dirs_exist_ok=True)
    (directory / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | TINY))
    tensors = load_file(source / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if ".layers.4." not in name}, directory / "model.safetensors")
    settings = {
        "device": "cpu",
        "grammar": {"backend": "xgrammar", "jump_forward": True, "isolation": "thread"},
        "memory": {"page_size": 4, "num_pages": 300},
    }
    with pytest.MonkeyPatch.context() as monkeypatch, keeping_all(monkeypatch):
        every = LLM(str(directory), **settings)
    return poison(LLM(str(directory), **settings)), every


JOBS = {
    "several outputs": SamplingParams(n=3, max_new_tokens=50, seed=5),
    "embeddings": SamplingParams(max_new_tokens=0, pooling=Pooling(PoolingKind.MEAN)),
    "log-probabilities of prompts": SamplingParams(max_new_tokens=40, prompt_logprobs=2, logprobs=1, seed=1),
    "jump-forward": SamplingParams(
        max_new_tokens=90,
        temperature=0,
        grammar=GrammarSpec(
            GrammarKind.REGEX, "(yes, of course|no, of course not), my friend number [0-9]+ of the alphabet"
        ),
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_other_kinds_of_requests(pair, job: str) -> None:
    """Twice each, so that the second time finds prefixes in the cache."""
    texts = [f"Bella is a level {n} wizard with 55 hp. She carries a staff and a map. " * 3 for n in range(4)]
    params = JOBS[job]
    for _ in range(2):
        found, wanted = (llm.generate(texts, params) for llm in pair)
        assert results(found) == results(wanted)
        if params.pooling is not None:
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one.pooled, other.pooled, rtol=1e-5, atol=1e-6)
        for llm in pair:
            check_idle(llm)


def test_outputs_say_what_each_group_had_in_the_prefix_cache(checkpoints) -> None:
    prompt = list(range(3, 60))
    with make_llm(checkpoints["alternating"]) as llm:
        (first,), (again,), (other,) = (
            llm.generate([each], SamplingParams(max_new_tokens=1)) for each in (prompt, prompt, [2, *prompt])
        )
        stats = llm.loop.stats()
    assert first.cached_groups == other.cached_groups == (0, 0)
    assert again.cached_tokens > 0
    assert again.cached_groups == (again.cached_tokens, again.cached_tokens)
    assert stats.group_cached_tokens == [again.cached_tokens] * 2
