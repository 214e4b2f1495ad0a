"""Test what requests may set about sampling, on small engines: with and without overlap, drafts and retraction.

Run: python -m pytest -q tests/e2e/test_sampling_requests.py
"""

from __future__ import annotations

import re

import pytest

from dovetail import LLM, SamplingParams
from dovetail.types import FinishKind

ENGINES = {
    "plain": {},
    "overlap, retraction": {
        "scheduler": {"overlap": True, "chunk_size": 8},
        "memory": {"num_pages": 130, "page_size": 1},
        "model": {"context_len": 120},
    },
    "drafts": {"speculative": "ngram"},
}
PROMPTS = ["Once upon a time there was a", "The little dog ran to the", "She said: I like the the the"]


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES)
def llm(request: pytest.FixtureRequest):
    made = LLM("tiny", device="cpu", grammar="none", **request.param)
    yield made
    made.loop.scheduler.check_integrity()
    stats = made.loop.stats()
    assert bool(stats.retractions) == ("memory" in request.param)
    assert bool(stats.drafted_tokens) == ("speculative" in request.param)
    made.close()


def cut_at(text: str, pattern: str, *, keep: bool) -> str:
    """Return ``text`` up to the match of ``pattern`` that ends first."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if re.compile(pattern).fullmatch(text[:end], start):
                return text[: end if keep else start]
    return text


@pytest.mark.parametrize("pattern", [r"[a-z]+[.!]", r"\s(a|e)\w{2,}\s", r"e.*e.*e", "^[A-Z ].*,", "nowhere[0-9]{9}"])
def test_a_stop_expression_ends_the_output_where_re_finds_it(llm: LLM, pattern: str):
    given = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.8, "seed": 3, "n": 2}
    free = llm.generate(PROMPTS, SamplingParams(**given))
    assert any(re.search(pattern, out.text) for out in free) == ("nowhere" not in pattern)
    for keep in (False, True):
        stopped = llm.generate(PROMPTS, SamplingParams(**given, stop_regex=(pattern,), include_stop=keep))
        for full, out in zip(free, stopped, strict=True):
            assert out.text == cut_at(full.text, pattern, keep=keep)
            assert out.finish is not None
            if re.search(pattern, full.text):
                assert (out.finish.kind, out.finish.matched) == (FinishKind.STOP, pattern)
                assert out.token_ids == full.token_ids[: len(out.token_ids)]
            else:
                assert out.finish == full.finish
