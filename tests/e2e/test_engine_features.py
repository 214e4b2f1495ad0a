"""Test log-probabilities, penalties, stops and lengths of outputs against transformers and hand-written loops.

.venv/bin/python -m pytest -q tests/e2e/test_engine_features.py
"""

import gc
import weakref

import engine_models as models
import pytest
import torch
from engine_runs import TreeDrafter, check_idle, drafting, make_llm, paged, prompts_of
from transformers.generation import logits_process as hf

from dovetail import LLM, SamplingParams
from dovetail.errors import RequestError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.save_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=160)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return models.Reference(checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return make_llm(checkpoint)


@pytest.fixture(scope="module")
def tiny():
    return LLM("tiny", device="cpu")


# -- log-probabilities -----------------------------------------------------------------------------------------------


def check_entry(entry, token, row, top):
    assert entry.token_id == token
    assert abs(entry.logprob - row[token]) < 1e-4
    assert len(entry.top) == top
    best = row.topk(top).values
    for (other, logprob), value in zip(entry.top, best, strict=True):
        assert abs(logprob - value) < 1e-4
        assert abs(row[other] - value) < 1e-4
    assert len({other for other, _ in entry.top}) == top


def check_logprobs(reference, output, top, prompt_top):
    text = [*output.prompt_ids, *output.token_ids]
    rows = reference.logprobs(text)
    assert len(output.logprobs) == len(output.token_ids)
    for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        check_entry(entry, token, rows[len(output.prompt_ids) - 1 + i], top)
    if prompt_top is None:
        assert output.prompt_logprobs is None
        return
    assert len(output.prompt_logprobs) == len(output.prompt_ids)
    first, *others = output.prompt_logprobs
    assert (first.token_id, first.logprob, first.top) == (text[0], None, ())
    for i, entry in enumerate(others):
        check_entry(entry, text[i + 1], rows[i], prompt_top)


CUTS = {
    "plain": paged(16),
    "chunks": paged(16, scheduler={"chunk_size": 7}),
    "retraction": paged(1, 170, scheduler={"chunk_size": 30}),
    "overlap": paged(16, scheduler={"overlap": True, "chunk_size": 7}),
    "overlap, retraction": paged(1, 170, scheduler={"overlap": True}),
    "drafts": paged(16, speculative="ngram", scheduler={"chunk_size": 19}),
}


@pytest.mark.parametrize("cut", CUTS)
def test_logprobs_are_those_of_the_model_itself(checkpoint, reference, cut):
    """Temperature, penalties and biases change the choice of tokens, not these numbers."""
    llm = make_llm(checkpoint, **CUTS[cut])
    prompts = [[*p, *p] for p in prompts_of([1, 9, 17, 30, 6], seed=2, shared=10)] + [[3]]
    shaped = {"temperature": 1.3, "repetition_penalty": 1.2, "logit_bias": {4: 5.0}, "min_new_tokens": 3}
    params = [
        SamplingParams(max_new_tokens=40, seed=i, logprobs=i % 4, prompt_logprobs=(None, 0, 2)[i % 3], **extra)
        for i, extra in enumerate([{}, shaped, {"temperature": 0}, shaped, {"temperature": 0}, {}])
    ]
    for _ in range(2):  # the second time from the prefix cache
        for p, output in zip(params, llm.generate(prompts, params), strict=True):
            check_logprobs(reference, output, p.logprobs, p.prompt_logprobs)
    stats = llm.loop.stats()
    assert stats.cached_tokens > 0
    assert ("retraction" in cut) == (stats.retractions > 0)
    assert (cut == "drafts") == (stats.drafted_tokens > 0)
    check_idle(llm)


@pytest.mark.parametrize("cut", CUTS)
def test_logprobs_of_several_outputs(checkpoint, reference, cut):
    llm = make_llm(checkpoint, **CUTS[cut])
    params = SamplingParams(max_new_tokens=20, n=4, seed=5, logprobs=2, prompt_logprobs=1, temperature=0.8)
    outputs = llm.generate(prompts_of([50]), params)
    assert len(outputs) == 4
    for output in outputs:
        check_logprobs(reference, output, 2, 1)


@pytest.mark.parametrize("cut", CUTS)
def test_logprobs_of_the_end_of_a_prompt_leave_its_beginning_to_the_cache(checkpoint, reference, cut):
    llm = make_llm(checkpoint, **CUTS[cut])
    prompts = prompts_of([70, 66, 64, 65, 64], seed=4, shared=64)
    params = [
        SamplingParams(max_new_tokens=3 * (i % 2), temperature=0, prompt_logprobs=1, prompt_logprobs_start=start)
        for i, start in enumerate([50, 64, 1, 65, 200])
    ]
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        for p, output in zip(params, outputs, strict=True):
            text, start = output.prompt_ids, p.prompt_logprobs_start
            rows = reference.logprobs(text)
            assert [e.token_id for e in output.prompt_logprobs] == text[start:]
            for i, entry in enumerate(output.prompt_logprobs):
                check_entry(entry, text[start + i], rows[start + i - 1], 1)
    cached = [output.cached_tokens for output in outputs]
    page = llm.loop.scheduler.ledger.page_size
    assert cached[:4] == [49 // page * page, 63 // page * page, 0, 64 // page * page]


def test_a_prompt_of_one_token_has_its_logprobs_entry_too(llm):
    output = llm.generate([9], SamplingParams(max_new_tokens=1, prompt_logprobs=3))[0]
    assert [(e.token_id, e.logprob) for e in output.prompt_logprobs] == [(9, None)]


def test_more_top_logprobs_than_others_ask_for(llm):
    params = [SamplingParams(max_new_tokens=4, temperature=0, logprobs=k) for k in (0, 100, None, 5)]
    outputs = llm.generate(prompts_of([5, 5, 5, 5]), params)
    assert [[len(e.top) for e in o.logprobs] for o in outputs] == [[0] * 4, [100] * 4, [], [5] * 4]


# -- penalties -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def hf_greedy(reference, prompt, count, processors):
    ids = torch.tensor([prompt])
    for _ in range(count):
        scores = reference.model(ids).logits[:, -1]
        for process in processors:
            scores = process(ids, scores)
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(prompt) :].tolist()


def counted(prompt_len, presence, frequency):
    """Apply presence and frequency penalties as the OpenAI API defines them: they count the output alone."""

    def process(ids, scores):
        counts = torch.bincount(ids[0, prompt_len:], minlength=scores.shape[1])
        return scores - presence * (counts > 0) - frequency * counts

    return process


@pytest.mark.parametrize("speculative", ["none", "ngram"])
@pytest.mark.parametrize("chunk_size", [7, 2048])
def test_penalties_equal_the_references_step_by_step(checkpoint, reference, chunk_size, speculative):
    llm = make_llm(checkpoint, scheduler={"chunk_size": chunk_size}, speculative=speculative)
    prompts = [p * 2 for p in prompts_of([9, 20, 14, 6])]
    bias = {3: 4.0, 77: -100.0}
    cases = [
        ({"repetition_penalty": 1.5}, [hf.RepetitionPenaltyLogitsProcessor(1.5)]),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.7}, [counted(40, 1.5, 0.7)]),
        ({"frequency_penalty": -2.0}, [counted(28, 0.0, -2.0)]),
        (
            {"logit_bias": bias, "repetition_penalty": 0.8, "presence_penalty": -1.0},
            [
                hf.SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()}),
                hf.RepetitionPenaltyLogitsProcessor(0.8),
                counted(12, -1.0, 0.0),
            ],
        ),
    ]
    params = [SamplingParams(max_new_tokens=40, temperature=0, **given) for given, _ in cases]
    for prompt, output, (_, processors) in zip(prompts, llm.generate(prompts, params), cases, strict=True):
        assert output.token_ids == hf_greedy(reference, prompt, 40, processors)


def test_repetition_penalty_equals_generate_of_transformers(llm, reference):
    prompt = prompts_of([12], seed=3)[0]
    ours = llm.generate(prompt, SamplingParams(max_new_tokens=30, temperature=0, repetition_penalty=1.3))[0]
    theirs = reference.model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, repetition_penalty=1.3, pad_token_id=0
    )
    assert ours.token_ids == theirs[0, 12:].tolist()


# -- stops and lengths -----------------------------------------------------------------------------------------------

STORY = "The quick brown"


def story(tiny, **params):
    return tiny.generate(STORY, SamplingParams(**({"max_new_tokens": 30, "temperature": 0} | params)))[0]


def test_a_stop_string_is_found_at_every_place_of_the_text(tiny):
    """The stop strings are all substrings of 1 to 6 characters; most begin or end inside a token."""
    text = story(tiny, ignore_eos=True).text
    stops = sorted({text[i : i + n] for i in range(0, len(text) - 6, 5) for n in (1, 2, 6)})
    params = SamplingParams(max_new_tokens=30, temperature=0, ignore_eos=True)
    several = [SamplingParams(**{**vars_of(params), "stop": (s,), "include_stop": k}) for s in stops for k in (0, 1)]
    outputs = tiny.generate([STORY] * len(several), several)
    for p, output in zip(several, outputs, strict=True):
        stop = p.stop[0]
        end = text.index(stop) + (len(stop) if p.include_stop else 0)
        assert output.text == text[:end]
        assert output.finish.matched == stop
        whole = tiny.tokenizer.decode(output.token_ids)
        assert stop in whole
        assert stop not in tiny.tokenizer.decode(output.token_ids[:-1])
    check_idle(tiny)


def vars_of(params):
    return {name: getattr(params, name) for name in params.__slots__}


def test_the_stop_string_that_ends_first_counts(tiny):
    text = story(tiny, ignore_eos=True).text
    for stops in [(text[8:20], text[9:12], text[30:32]), (text[5:9], text[6:9]), (text[20:23], text[18:30])]:
        end, length = min((text.index(stop) + len(stop), -len(stop)) for stop in stops)
        assert story(tiny, ignore_eos=True, stop=stops).text == text[: end + length]


def test_stop_strings_inside_a_run_of_accepted_drafts(tiny):
    params = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    whole = story(tiny, **params)
    stops = sorted({whole.text[i : i + 3] for i in range(2, len(whole.text) - 3, 4)})
    several = [SamplingParams(**params, stop=(stop,)) for stop in stops]
    several += [SamplingParams(**params, stop_token_ids=(token,)) for token in whole.token_ids[::4]]
    expected = tiny.generate([STORY] * len(several), several)
    drafter = TreeDrafter(right=0.9, vocab=4096)
    drafter.learn([whole])
    accepted = tiny.loop.stats().accepted_tokens
    with drafting(tiny, drafter):
        outputs = tiny.generate([STORY] * len(several), several)
    assert tiny.loop.stats().accepted_tokens - accepted > 100
    for one, other in zip(expected, outputs, strict=True):
        assert (one.text, one.token_ids, one.finish) == (other.text, other.token_ids, other.finish)
        assert len(other.logprobs) == len(other.token_ids)
    check_idle(tiny)


def test_stop_token_ids(tiny):
    ids = story(tiny, ignore_eos=True).token_ids
    stopped = story(tiny, ignore_eos=True, stop_token_ids=(ids[6], ids[9]))
    end = min(ids.index(ids[6]), ids.index(ids[9]))
    assert (stopped.token_ids, stopped.finish.matched) == (ids[: end + 1], ids[end])
    assert stopped.text == tiny.tokenizer.decode(ids[:end])
    kept = story(tiny, ignore_eos=True, stop_token_ids=(ids[6], ids[9]), include_stop=True)
    assert kept.text == tiny.tokenizer.decode(ids[: end + 1])


def question(llm):
    text = llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    return llm.tokenizer.encode(text, add_special_tokens=False)


def test_ignore_eos_goes_on(tiny):
    prompt = question(tiny)
    params = {"max_new_tokens": 40, "temperature": 0}
    ended = tiny.generate(prompt, SamplingParams(**params))[0]
    assert ended.finish.kind == "stop"
    assert ended.finish.matched == ended.token_ids[-1]
    on = tiny.generate(prompt, SamplingParams(**params, ignore_eos=True))[0]
    assert (on.finish.kind, len(on.token_ids)) == ("length", 40)
    assert on.token_ids[: len(ended.token_ids)] == ended.token_ids


@pytest.mark.parametrize("speculative", ["none", "ngram"])
def test_min_new_tokens_forbids_every_way_to_stop(speculative):
    tiny = LLM("tiny", device="cpu", speculative=speculative)
    prompt = question(tiny)
    free = tiny.generate(prompt, SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True))[0]
    eos = set(tiny.tokenizer.eos_token_ids)
    for low in (5, 12, 20):
        output = tiny.generate(prompt, SamplingParams(max_new_tokens=40, temperature=0, min_new_tokens=low))[0]
        assert len(output.token_ids) > low
        assert not eos & set(output.token_ids[:low])
    stops = ("a", "e", free.text[3:6])
    params = SamplingParams(max_new_tokens=40, temperature=0, min_new_tokens=6, stop=stops, ignore_eos=True)
    output = tiny.generate(prompt, params)[0]
    assert len(output.token_ids) >= 6
    assert output.finish.matched in stops
    before, last = (tiny.tokenizer.decode(output.token_ids[:n]) for n in (5, len(output.token_ids)))
    assert output.text.startswith(before), "stop strings of the first five tokens are text"
    assert last.startswith(output.text + output.finish.matched)


@pytest.mark.parametrize(("overlap", "speculative"), [(False, "none"), (True, "none"), (False, "ngram")])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_edge_of_the_context(checkpoint, reference, page_size, speculative, overlap):
    scheduler = {"overlap": overlap, "chunk_size": 50}
    llm = make_llm(checkpoint, **paged(page_size, 640, scheduler=scheduler, speculative=speculative))
    context = llm.loop.executor.rank.engine.context_len
    assert context == 160
    prompts = [[*p, *p][:n] for p, n in zip(prompts_of([80, 80, 80]), (159, 158, 130), strict=True)]
    for output, prompt in zip(llm.generate(prompts, SamplingParams(temperature=0)), prompts, strict=True):
        assert len(prompt) + len(output.token_ids) == context
        assert output.finish.kind == "length"
        assert output.token_ids == reference.greedy(tuple(prompt), context - len(prompt))
    exact = SamplingParams(temperature=0, max_new_tokens=30, min_new_tokens=30)
    assert len(llm.generate(prompts[2], exact)[0].token_ids) == 30
    with pytest.raises(RequestError, match="at most 30 new tokens fit"):
        llm.generate(prompts[2], SamplingParams(max_new_tokens=31))
    with pytest.raises(RequestError, match="the prompt has 160 tokens"):
        llm.generate(prompts[0] + [1])
    check_idle(llm)


@pytest.mark.parametrize("closed", [True, False])
def test_an_engine_that_is_dropped_is_freed(closed):
    """Its pool must be freed when it is closed, or at the latest when the next engine is built."""
    llm = LLM("tiny", grammar="none", memory={"num_pages": 64})
    llm.generate([1, 2, 3], SamplingParams(max_new_tokens=3))
    engine = weakref.ref(llm.loop.executor.rank.engine)
    if closed:
        llm.close()
    del llm
    gc.collect()
    if not closed:
        LLM("tiny", grammar="none", memory={"num_pages": 64}).close()
    assert engine() is None
