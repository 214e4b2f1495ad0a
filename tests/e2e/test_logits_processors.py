"""Test logits processors in engines: with and without overlap, drafts, retraction, and in ranks of their own, against
the processor of transformers.

Run: python -m pytest -q tests/e2e/test_logits_processors.py
"""

from __future__ import annotations

import dataclasses

import engine_models as models
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from dovetail import LLM, RequestError, SamplingParams
from dovetail.config.checkpoint import EMBEDDED
from dovetail.errors import EngineError
from dovetail_logits.no_repeat_ngram import NoRepeatNgram

ENGINES = {
    "plain": {},
    "overlap, retraction": {
        "scheduler": {"overlap": True, "chunk_size": 8},
        "memory": {"num_pages": 140, "page_size": 1},
        "model": {"context_len": 120},
    },
    "drafts": {"speculative": "ngram", "scheduler": {"draft": "always"}},
    "workers, overlap": {"executor": "workers", "scheduler": {"overlap": True}},
}
PROMPTS = ["Once upon a time there was a", "the the the dog the the the dog the the", "one two three one two"]
GREEDY = {"max_new_tokens": 60, "temperature": 0.0, "ignore_eos": True}


def ngrams(size: int) -> dict[str, object]:
    return {"name": "no_repeat_ngram", "no_repeat_ngram_size": size}


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES)
def llm(request: pytest.FixtureRequest):
    sections = {**request.param, "model": {"dtype": "float32", **request.param.get("model", {})}}
    made = LLM("tiny", device="cpu", grammar="none", reasoning_parser="none", **sections)
    yield made
    made.loop.scheduler.check_integrity()
    made.close()


@pytest.fixture(scope="module")
def reference():
    return models.Reference(EMBEDDED["tiny"])


def test_outputs_are_those_of_the_processor_of_transformers(llm: LLM, reference):
    sizes = (None, 1, 2, 3)
    many = [
        SamplingParams(**GREEDY, **extra, logits_processors=() if size is None else (ngrams(size),))
        for size in sizes
        for extra in ({}, {"logprobs": 2, "repetition_penalty": 1.2})
    ]
    outputs = llm.generate([prompt for prompt in PROMPTS for _ in many], many * len(PROMPTS))
    changed = 0
    for i, out in enumerate(outputs):
        params, size = many[i % len(many)], sizes[i % len(many) // 2]
        logits = reference.logprobs(out.prompt_ids + out.token_ids)
        for at, token in enumerate(out.token_ids):
            text = torch.tensor([out.prompt_ids + out.token_ids[:at]])
            row = logits[None, text.shape[1] - 1].clone()
            if params.repetition_penalty != 1.0:
                break  # these rows change what the others are batched with; transformers defines other penalties
            row = row if size is None else NoRepeatNGramLogitsProcessor(size)(text, row)
            changed += size is not None and int(row.argmax()) != int(logits[text.shape[1] - 1].argmax())
            assert row[0, token] > row.max() - 1e-3
        if size is not None:
            words = out.prompt_ids + out.token_ids
            new = [tuple(words[j - size : j]) for j in range(len(out.prompt_ids) + 1, len(words) + 1)]
            assert all(words_before(words, gram, j) for j, gram in enumerate(new, len(out.prompt_ids) + 1))
    assert changed > 20
    stats = llm.loop.stats()
    assert stats.drafted_tokens or not llm.loop.scheduler.limits.draft_width
    assert stats.retractions or llm.loop.scheduler.ledger.page_size > 1


def words_before(words: list[int], gram: tuple[int, ...], end: int) -> bool:
    """Return True if ``gram``, which ends before index ``end`` of ``words``, did not occur earlier."""
    size = len(gram)
    return all(tuple(words[j : j + size]) != gram for j in range(end - size))


def test_several_outputs_and_a_seed(llm: LLM):
    params = SamplingParams(max_new_tokens=40, seed=7, n=3, logits_processors=(ngrams(2), ngrams(3)))
    first, second = llm.generate(PROMPTS, params), llm.generate(PROMPTS[:1], params)
    assert [out.token_ids for out in first[:3]] == [out.token_ids for out in second]
    for out in first:
        words = out.prompt_ids + out.token_ids
        fresh = range(len(out.prompt_ids) + 1, len(words) + 1)
        assert all(words_before(words, tuple(words[j - 2 : j]), j) for j in fresh)


def test_processors_that_cannot_run_are_refused(llm: LLM):
    for wrong, text in (
        ({"name": "nothing"}, "no logits processor 'nothing'; allowed: no_repeat_ngram"),
        ({"name": "no_repeat_ngram"}, "no_repeat_ngram_size: Field required"),
        ({**ngrams(2), "other": 1}, "other: Extra inputs"),
    ):
        with pytest.raises(RequestError, match=text) as raised:
            llm.generate("Hi", SamplingParams(logits_processors=[wrong]))
        assert raised.value.param == "logits_processors"
    for wrong in ([len], "no_repeat_ngram", [{"size": 1}], [ngrams(2)] * 9, [{"name": "x", "a": {1}}]):
        with pytest.raises(RequestError, match="logits_processors"):
            SamplingParams(logits_processors=wrong)


def test_a_processor_that_raises_ends_its_own_requests(monkeypatch: pytest.MonkeyPatch):
    real = NoRepeatNgram.process

    def process(self, logits, rows) -> None:
        logits.fill_(float("nan"))
        if any(row.params.no_repeat_ngram_size == 7 and len(row.token_ids) > 20 for row in rows):
            raise ValueError("out of luck")
        logits.zero_()
        real(self, logits, rows)

    for sections in ({}, ENGINES["drafts"]):
        llm = LLM("tiny", device="cpu", grammar="none", **sections)
        expected = llm.generate(PROMPTS[0], SamplingParams(**GREEDY))[0].token_ids
        monkeypatch.setattr(NoRepeatNgram, "process", process)
        stream = llm.stream(PROMPTS[0], SamplingParams(**GREEDY))
        text = next(stream)
        with pytest.raises(EngineError, match="logits processor no_repeat_ngram: ValueError: out of luck"):
            llm.generate(PROMPTS[0], SamplingParams(**GREEDY, logits_processors=[ngrams(7)]))
        assert llm.tokenizer is not None
        assert text + "".join(stream) == llm.tokenizer.decode(expected)
        llm.loop.scheduler.check_integrity()
        monkeypatch.undo()
        llm.close()


def test_a_processor_without_drafts_is_decoded_without_drafts():
    llm = LLM("tiny", device="cpu", grammar="none", **ENGINES["drafts"])
    scheduler = llm.loop.scheduler
    params = SamplingParams(**GREEDY, logits_processors=[ngrams(4)])
    expected = llm.generate(PROMPTS[1], params)[0]
    assert expected.drafted > 0
    entry = scheduler.limits.processors["no_repeat_ngram"]._replace(drafts=False)
    scheduler.limits = dataclasses.replace(scheduler.limits, processors={"no_repeat_ngram": entry})
    with_drafts, without = llm.generate([PROMPTS[1]] * 2, [SamplingParams(**GREEDY), params])
    assert with_drafts.drafted > 0
    assert (without.drafted, without.token_ids) == (0, expected.token_ids)
    llm.close()
