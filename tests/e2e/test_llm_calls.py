"""Test what ``LLM`` offers besides generation: scores, embeddings, the cache and its end.

.venv/bin/python -m pytest -q tests/e2e/test_llm_calls.py
"""

from collections.abc import Iterator

import numpy as np
import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import EngineError, RequestError

QUERY, ITEMS = "The capital of France is", [" Paris", " Rome, and that of Italy is"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", threads=1) as llm:
        yield llm


def test_scores_of_labels_are_the_models_probabilities(llm: LLM) -> None:
    labels = [5, 17, 300]
    params = SamplingParams(max_new_tokens=1, temperature=0, logprobs=0, token_ids_logprob=tuple(labels))
    expected = []
    for item in ITEMS:
        (output,) = llm.generate(QUERY + item, params)
        given = dict(output.logprobs[0].given)
        expected.append([np.exp(given[label]) for label in labels])
    assert llm.score(QUERY, ITEMS, labels) == pytest.approx(np.array(expected), rel=1e-4)
    among = np.array(llm.score(QUERY, ITEMS, labels, apply_softmax=True))
    assert among == pytest.approx(np.array(expected) / np.sum(expected, axis=1, keepdims=True), rel=1e-4)
    swapped = llm.score(QUERY, ITEMS[0], labels, item_first=True)
    assert swapped == llm.score(ITEMS[0], [QUERY], labels)


def test_scores_without_labels_are_cosines_of_embeddings(llm: LLM) -> None:
    vectors = [np.float64(vector) for vector in llm.encode([QUERY, *ITEMS])]
    assert [v.tolist() for v in vectors] == [v.tolist() for v in llm.embed([QUERY, *ITEMS])]
    assert llm.score(QUERY, ITEMS) == pytest.approx([vectors[0] @ vectors[1], vectors[0] @ vectors[2]], abs=1e-6)
    assert llm.score([QUERY, ITEMS[0]], ITEMS) == pytest.approx(
        [vectors[0] @ vectors[1], vectors[1] @ vectors[2]], abs=1e-6
    )
    assert llm.score(QUERY, [QUERY], pooling="mean") == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("query", "items", "labels", "more", "message"),
    [
        (["a", "b"], ["c", "d", "e"], None, {}, "query has 2 entries and items 3"),
        ("a", ["b"], None, {"apply_softmax": True}, "need label_token_ids"),
        ("a", ["b"], [5], {"pooling": "mean"}, "leave it out, or leave out label_token_ids"),
        ("a", [[5, 6]], [5], {}, "different kinds"),
        ("a", ["b"], [10**6], {}, "label_token_ids"),
        ("a", ["b"], [], {}, "label_token_ids"),
    ],
)
def test_wrong_scores_are_refused(llm: LLM, query, items, labels, more, message) -> None:
    with pytest.raises(RequestError, match=message):
        llm.score(query, items, labels, **more)


def test_the_cache_is_flushed_unless_a_stream_is_open(llm: LLM) -> None:
    prompt, params = list(range(5, 105)), SamplingParams(max_new_tokens=2, temperature=0)
    llm.generate(prompt, params)
    assert llm.generate(prompt, params)[0].cached_tokens > 0
    llm.flush_cache()
    assert llm.generate(prompt, params)[0].cached_tokens == 0
    stream = llm.stream("a b c", SamplingParams(max_new_tokens=50, ignore_eos=True))
    next(stream)
    with pytest.raises(RequestError, match="1 requests are running"):
        llm.flush_cache()
    stream.close()
    llm.flush_cache()
    assert llm.loop.stats().pages_cached == 0


def test_it_can_be_shut_down_more_than_once() -> None:
    with LLM("tiny", threads=1) as llm:
        assert llm.generate("a", SamplingParams(max_new_tokens=1))
        left, read = (llm.stream("a", SamplingParams(max_new_tokens=50, ignore_eos=True)) for _ in range(2))
        assert [next(left), next(read)]
        llm.shutdown()
        llm.shutdown()
    llm.close()
    left.close()
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.score("a", "b"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        llm.flush_cache,
        lambda: list(read),
    ):
        with pytest.raises(EngineError, match="this LLM was closed; create another one"):
            call()
