"""Test that greedy tokens equal those of transformers, however the work is cut into steps.

.venv/bin/python -m pytest -q tests/e2e/test_engine_parity.py
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dovetail import LLM, SamplingParams
from dovetail.messages import AbortMsg, GenerateMsg, TokenOutput

_spec = importlib.util.spec_from_file_location("engine_models", Path(__file__).parent / "engine_models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

STEPS = 64
GREEDY = SamplingParams(max_new_tokens=STEPS, temperature=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(checkpoint):
    return models.Reference(checkpoint)


def prompts_of(lengths, seed=0, shared=0):
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, models.VOCAB, shared).tolist()
    return [prefix + rng.integers(0, models.VOCAB, n).tolist() for n in lengths]


def make_llm(checkpoint, **sections):
    memory = {"page_size": 16, "num_pages": 200} | sections.pop("memory", {})
    return LLM(str(checkpoint), memory=memory, grammar="none", device="cpu", **sections)


def check(llm, reference, prompts, rounds=1):
    for _ in range(rounds):
        outputs = llm.generate(prompts, GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == reference.greedy(tuple(prompt), STEPS)
    llm.loop.scheduler.check_integrity()
    assert llm.loop.stats().pages_used == 0
    assert not llm.loop.has_work


@pytest.mark.sample(4)  # each size once
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_page_and_chunk_sizes_with_mixed_batches(checkpoint, reference, page_size, chunk_size):
    pages = 3200 // page_size
    llm = make_llm(
        checkpoint, memory={"page_size": page_size, "num_pages": pages}, scheduler={"chunk_size": chunk_size}
    )
    check(llm, reference, prompts_of([1, 5, 17, 40, 64, 33]), rounds=2)


@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_shared_prefixes(checkpoint, reference, cache, page_size):
    llm = make_llm(checkpoint, memory={"page_size": page_size, "num_pages": 3200 // page_size}, cache=cache)
    prompts = prompts_of([3, 9, 20], shared=50)
    check(llm, reference, prompts, rounds=2)
    hit = llm.generate(prompts, GREEDY)[0].cached_tokens
    expected = (len(prompts[0]) - 1) // page_size * page_size
    assert hit == (expected if cache == "radix" else 0)


def test_a_prefix_being_computed_is_waited_for_not_computed_again(checkpoint, reference):
    llm = make_llm(checkpoint, scheduler={"chunk_size": 32})
    prompts = prompts_of([4, 5, 6, 7], shared=96)
    outputs = llm.generate(prompts, GREEDY)
    assert [o.cached_tokens for o in outputs] == [0, 96, 96, 96]
    check(llm, reference, prompts)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_forced_retraction_loses_nothing(checkpoint, reference, overlap, page_size):
    pages = 1 + 256 // page_size
    llm = make_llm(checkpoint, memory={"page_size": page_size, "num_pages": pages}, scheduler={"overlap": overlap})
    prompts = prompts_of([30, 45, 20, 60, 10, 50, 33, 7], seed=4)
    check(llm, reference, prompts)
    assert llm.loop.stats().retractions > 0


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk_size", [7, 2048])
def test_overlap_gives_the_same_tokens(checkpoint, reference, page_size, chunk_size):
    llm = make_llm(
        checkpoint,
        memory={"page_size": page_size, "num_pages": 3200 // page_size},
        scheduler={"overlap": True, "chunk_size": chunk_size},
    )
    assert llm.loop.overlap
    check(llm, reference, prompts_of([1, 5, 17, 40, 64, 33]), rounds=2)


def test_unmixed_batches(checkpoint, reference):
    check(make_llm(checkpoint, scheduler={"mixed": False, "chunk_size": 16}), reference, prompts_of([40, 3, 64]))


def test_few_slots(checkpoint, reference):
    check(make_llm(checkpoint, scheduler={"max_running": 2}), reference, prompts_of([9, 4, 64, 1, 30]))


@pytest.mark.parametrize("overlap", [False, True])
def test_n_outputs_share_the_prompt(checkpoint, reference, overlap):
    llm = make_llm(checkpoint, scheduler={"overlap": overlap})
    prompt = prompts_of([70])[0]
    outputs = llm.generate(prompt, SamplingParams(max_new_tokens=STEPS, temperature=0, n=4))
    assert len(outputs) == 4
    for output in outputs:
        assert output.token_ids == reference.greedy(tuple(prompt), STEPS)
    assert [o.cached_tokens for o in outputs] == [0, 64, 64, 64]
    assert llm.loop.stats().pages_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_aborting_adjacent_rows_changes_nothing(checkpoint, reference, overlap):
    llm = make_llm(checkpoint, scheduler={"overlap": overlap, "chunk_size": 16})
    prompts = prompts_of([40, 12, 33, 50, 8], seed=9)
    for i, prompt in enumerate(prompts):
        llm.loop.handle(GenerateMsg(f"r{i}", prompt, GREEDY, seed=0))
    tokens, ends, step = {f"r{i}": [] for i in range(5)}, {}, 0
    while llm.loop.has_work:
        step += 1
        if step in (2, 5, 20):
            llm.loop.handle(AbortMsg({2: "r3", 5: "r0", 20: "r4"}[step]))
        for answer in llm.loop.step():
            assert isinstance(answer, TokenOutput)
            tokens[answer.rid] += answer.token_ids
            if answer.finish is not None:
                assert answer.rid not in ends
                ends[answer.rid] = answer.finish.kind
    assert ends == {"r0": "abort", "r3": "abort", "r4": "abort", "r1": "length", "r2": "length"}
    for i, prompt in enumerate(prompts):
        expected = reference.greedy(tuple(prompt), STEPS)
        assert tokens[f"r{i}"] == expected[: len(tokens[f"r{i}"])]
    llm.loop.scheduler.check_integrity()
    assert llm.loop.stats().pages_used == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_ngram_drafts_change_nothing(checkpoint, reference, page_size):
    llm = make_llm(checkpoint, memory={"page_size": page_size, "num_pages": 3200 // page_size}, speculative="ngram")
    prompts = [p * 4 for p in prompts_of([9, 13, 21, 5])]
    check(llm, reference, prompts, rounds=2)
    assert llm.loop.stats().drafted_tokens > 0


def test_ngram_drafts_with_retraction_and_chunks(checkpoint, reference):
    llm = make_llm(
        checkpoint, memory={"page_size": 1, "num_pages": 300}, speculative="ngram", scheduler={"chunk_size": 11}
    )
    check(llm, reference, [p * 3 for p in prompts_of([9, 13, 21, 5, 30])])
    assert llm.loop.stats().retractions > 0


ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0}
ARCHITECTURES = {
    "llama3": (LlamaConfig, {"rope_parameters": ROPE | {"original_max_position_embeddings": 64}}),
    "mistral": (MistralConfig, {"sliding_window": 24, "head_dim": 32}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_through_the_whole_engine(tmp_path, name):
    config, settings = ARCHITECTURES[name]
    directory = models.save(tmp_path, config, **settings)
    reference, prompts = models.Reference(directory), prompts_of([3, 40, 21, 64, 70])
    check(make_llm(directory, scheduler={"chunk_size": 16}), reference, prompts, rounds=2)
    tight = make_llm(directory, memory={"page_size": 1, "num_pages": 300}, speculative="ngram")
    check(tight, reference, [p * 2 for p in prompts], rounds=1)
    assert tight.loop.stats().retractions > 0 or "sliding_window" in settings  # windows need less memory
