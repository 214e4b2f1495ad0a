"""Test sampling: a seed gives the same tokens however the work is cut, and the right distribution over seeds.

.venv/bin/python -m pytest -q tests/e2e/test_engine_sampling.py
"""

import random
from dataclasses import replace

import engine_models as models
import numpy as np
import pytest
import torch
from engine_runs import TreeDrafter, check_idle, drafting, make_llm, paged, prompts_of, results, varied_params
from transformers import MistralConfig
from transformers.generation import logits_process as hf

from dovetail import LLM, SamplingParams
from dovetail.messages import FlushCacheMsg
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.scheduler import admission


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.save_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.12, eos_token_id=17)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return make_llm(checkpoint)


def many(count=14, seed=1):
    rng = random.Random(seed)
    prompts = prompts_of([rng.randrange(1, 50) for _ in range(count)], seed, shared=12)
    return prompts, [varied_params(rng) for _ in range(count)]


@pytest.fixture(scope="module")
def alone(llm):
    """Run each request by itself."""
    return results([llm.generate(prompt, p)[0] for prompt, p in zip(*many(), strict=True)])


CUTS = {
    "batch": paged(16),
    "page size 1": paged(1),
    "page size 64": paged(64),
    "chunks": paged(16, scheduler={"chunk_size": 7}),
    "unmixed": paged(16, scheduler={"chunk_size": 40, "mixed": False}),
    "few slots": paged(16, scheduler={"max_running": 3}),
    "retraction": paged(1, 220, scheduler={"chunk_size": 30}),
    "overlap": paged(16, scheduler={"overlap": True, "chunk_size": 23}),
    "overlap, retraction": paged(1, 220, scheduler={"overlap": True}),
    "no cache": paged(16, cache="none"),
    "ngram": paged(16, speculative="ngram"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_seed_repeats_however_the_work_is_cut(checkpoint, alone, cut, monkeypatch):
    if "retraction" in cut:
        monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    llm = make_llm(checkpoint, **CUTS[cut])
    prompts, params = many()
    assert results(llm.generate(prompts, params)) == alone
    order = list(range(len(prompts)))
    random.Random(cut).shuffle(order)
    again = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    assert results(again) == [alone[i] for i in order]
    assert ("retraction" in cut) == (llm.loop.stats().retractions > 0)
    check_idle(llm)


def test_adjacent_rows_with_filters_do_not_change_a_row_without(llm):
    """Filters sort the vocabulary; rows without filters must not change."""
    prompt = prompts_of([9])[0]
    plain = [SamplingParams(max_new_tokens=12, seed=seed) for seed in range(8)]
    expected = results(llm.generate([prompt] * 8, plain))
    for extra in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0}, {"repetition_penalty": 2.0}):
        others = [replace(p, **extra) for p in plain]
        mixed = llm.generate([prompt] * 16, [p for pair in zip(plain, others, strict=True) for p in pair])
        assert results(mixed[::2]) == expected


def test_outputs_of_one_request_differ_and_repeat(llm):
    params = SamplingParams(max_new_tokens=20, n=6, seed=9)
    prompt = prompts_of([10])[0]
    first, second = llm.generate(prompt, params), llm.generate(prompt, params)
    assert results(first) == results(second)
    assert len({tuple(o.token_ids) for o in first}) == 6
    assert first[0].token_ids == llm.generate(prompt, replace(params, n=1))[0].token_ids
    other = llm.generate(prompt, replace(params, seed=10))
    assert not {tuple(o.token_ids) for o in other} & {tuple(o.token_ids) for o in first}


def test_without_a_seed_outputs_differ(llm):
    outputs = llm.generate([prompts_of([10])[0]] * 2, SamplingParams(max_new_tokens=20))
    assert outputs[0].token_ids != outputs[1].token_ids


@pytest.mark.parametrize(
    "params", [{"temperature": 1e-30}, {"temperature": 1e-5}, {"top_k": 1}, {"top_p": 1e-9}], ids=str
)
def test_the_ends_of_the_ranges_are_greedy(llm, params):
    prompts = prompts_of([9, 12])
    greedy = llm.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0))
    assert results(llm.generate(prompts, SamplingParams(max_new_tokens=12, seed=1, **params))) == results(greedy)


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 100.0},
        {"repetition_penalty": 100.0},
        {"repetition_penalty": 0.01, "temperature": 2e-5},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_extreme_parameters_leave_adjacent_rows_alone(llm, extreme):
    prompts = prompts_of([9, 12])
    calm = SamplingParams(max_new_tokens=12, temperature=0)
    expected = results(llm.generate(prompts[:1], calm))
    outputs = llm.generate(prompts, [calm, SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True, **extreme)])
    assert results(outputs[:1]) == expected
    assert len(outputs[1].token_ids) == 12


# -- distribution ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return LLM("tiny", device="cpu", grammar={"isolation": "thread"})


@pytest.fixture(scope="module")
def next_logits(tiny):
    """Return the logits of the token after the prompt, read from the log-probabilities of transformers' own model."""
    prompt = tiny.tokenizer.encode("The capital of")
    return prompt, models.Reference(tiny.resolved.model_dir).logprobs(prompt)[-1].double()


def warped(logits, settings):
    scores = logits[None]
    warpers = {
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    for name, value in settings.items():
        scores = warpers[name](value)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 2.5},
        {"temperature": 2.0, "top_k": 12},
        {"temperature": 2.0, "top_p": 0.8},
        {"temperature": 2.0, "min_p": 0.02},
        {"temperature": 3.0, "top_k": 400, "top_p": 0.9, "min_p": 0.001},
    ],
    ids=str,
)
def test_the_distribution_over_seeds_is_the_references(tiny, next_logits, settings):
    prompt, logits = next_logits
    expected = warped(logits, settings)
    count = 128 * 8
    params = [SamplingParams(max_new_tokens=1, n=128, seed=seed, **settings) for seed in range(8)]
    tokens = torch.tensor([o.token_ids[0] for o in tiny.generate([prompt] * 8, params)])
    seen = torch.bincount(tokens, minlength=len(expected)).double()
    assert seen[expected == 0].sum() == 0
    often = expected * count >= 8
    pairs = [(seen[often], expected[often] * count)]
    pairs.append((seen[~often].sum()[None], (expected[~often].sum() * count)[None]))
    got, wanted = (torch.cat(column) for column in zip(*pairs, strict=True))
    statistic = ((got - wanted) ** 2 / wanted.clamp(min=1e-9))[wanted > 1].sum()
    degrees = max(int((wanted > 1).sum()) - 1, 1)
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5 + 6


# -- drafts ----------------------------------------------------------------------------------------------------------

DRAFTERS = {
    "random trees": {"right": 0.0},
    "half right trees": {"right": 0.5},
    "bushy": {"right": 0.8, "width": 15},
    "right chains": {"right": 1.0, "chain": True},
    "one draft": {"right": 0.7, "width": 1},
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_draft_trees_change_nothing(checkpoint, alone, kind, page_size):
    llm = make_llm(checkpoint, **paged(page_size, scheduler={"chunk_size": 31}))
    prompts, params = many()
    drafter = TreeDrafter(**DRAFTERS[kind])
    drafter.learn(llm.generate(prompts, params))
    for seed in range(2):
        drafter.rng = np.random.default_rng(seed)
        with drafting(llm, drafter):
            assert results(llm.generate(prompts, params)) == alone
    stats = llm.loop.stats()
    assert llm.loop.drafter_errors == 0
    assert stats.drafted_tokens > 50
    if drafter.right:
        assert stats.accepted_tokens > stats.drafted_tokens * drafter.right / 8
    check_idle(llm)


def test_draft_trees_in_little_memory(checkpoint, alone, monkeypatch):
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    llm = make_llm(checkpoint, **paged(1, 220, scheduler={"chunk_size": 31}))
    prompts, params = many()
    drafter = TreeDrafter(right=0.7)
    drafter.learn(llm.generate(prompts, params))
    with drafting(llm, drafter):
        assert results(llm.generate(prompts, params)) == alone
    assert llm.loop.stats().retractions > 0
    assert len(drafter.departed) >= len(prompts), "ended and retracted requests are forgotten"
    check_idle(llm)


def test_kv_of_accepted_trees_is_right_afterwards(checkpoint):
    """The text made with drafts is cached; its continuation must be as if the text had been computed in one piece."""
    llm, cold = make_llm(checkpoint, **paged(1)), make_llm(checkpoint, **paged(1, cache="none"))
    prompts = prompts_of([20, 7, 33], seed=5)
    params = SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True)
    drafter = TreeDrafter(right=0.8)
    drafter.learn(llm.generate(prompts, params))
    llm.loop.handle(FlushCacheMsg("flush"))
    llm.loop.step()
    with drafting(llm, drafter):
        outputs = llm.generate(prompts, params)
    longer = [o.prompt_ids + o.token_ids for o in outputs]
    ask = SamplingParams(max_new_tokens=10, temperature=0, logprobs=5, ignore_eos=True)
    for one, other in zip(llm.generate(longer, ask), cold.generate(longer, ask), strict=True):
        assert one.cached_tokens == len(one.prompt_ids) - 1
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-4


@pytest.mark.parametrize("page_size", [1, 16])
def test_draft_trees_inside_a_sliding_window(tmp_path, page_size):
    directory = models.save(tmp_path, MistralConfig, sliding_window=13, head_dim=16)
    llm, reference = make_llm(directory, **paged(page_size, scheduler={"chunk_size": 9})), models.Reference(directory)
    prompts = prompts_of([4, 30, 12], seed=3)
    params = SamplingParams(max_new_tokens=40, temperature=0)
    drafter = TreeDrafter(right=0.8)
    drafter.learn(llm.generate(prompts, params))
    with drafting(llm, drafter):
        for output, prompt in zip(llm.generate(prompts, params), prompts, strict=True):
            assert output.token_ids == reference.greedy(tuple(prompt), 40)
    assert llm.loop.stats().accepted_tokens > 20


SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}}}'
GRAMMARS = [
    GrammarSpec(GrammarKind.JSON_SCHEMA, SCHEMA),
    GrammarSpec(GrammarKind.REGEX, r"[a-f]{3,8}(-[0-9]{2}){1,4}"),
    GrammarSpec(GrammarKind.EBNF, 'root ::= item (", " item)*\nitem ::= "red" | "blue" | [0-9]+'),
]


@pytest.mark.parametrize("right", [0.3, 0.9])
def test_draft_trees_change_nothing_for_grammars_stops_and_penalties(tiny, right):
    common = {"max_new_tokens": 30, "logprobs": 1}
    cases = [
        *({"grammar": grammar, "temperature": 1.4} for grammar in GRAMMARS),
        *({"grammar": grammar, "temperature": 1.0, "min_new_tokens": 6, "top_p": 0.9} for grammar in GRAMMARS),
        {"stop": ("the", ". "), "temperature": 0.9, "ignore_eos": True},
        {"stop": ("e",), "include_stop": True, "min_new_tokens": 4, "ignore_eos": True},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "ignore_eos": True},
        {"logit_bias": {300: 4.0, 29: -100.0}, "min_new_tokens": 8, "top_k": 30},
        {"temperature": 0, "ignore_eos": True},
    ]
    params = [SamplingParams(**common, **case, seed=seed) for case in cases for seed in (1, 2)]
    prompts = [f"{i % 3} List of colours, names and numbers: " for i in range(len(params))]
    expected = tiny.generate(prompts, params)
    drafter = TreeDrafter(width=9, right=right, vocab=4096)
    drafter.learn(expected)
    accepted = tiny.loop.stats().accepted_tokens
    with drafting(tiny, drafter):
        outputs = tiny.generate(prompts, params)
    assert results(outputs) == results(expected)
    assert tiny.loop.stats().accepted_tokens - accepted > 20
    assert tiny.loop.drafter_errors == 0
    check_idle(tiny)
