"""Compare /v1/score in both meanings, and /v1/rerank, to transformers' logits and hidden states.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_score_api.py
"""

from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.config.checkpoint import locate
from dovetail.errors import ConfigError, RequestError
from dovetail.registry import setup
from dovetail.server.launch import running_server
from dovetail.tokenizer import Tokenizer
from dovetail_apis.score.pairs import check_pairs, fill_template

QUERY = "What is the capital of France?"
DOCUMENTS = ["Bananas are yellow.", "Paris is the capital of France.", "The capital is far away.", "Seven."]
LABELS = [104, 370, 21]
TEMPLATE = "Query: {query}\nDocument: {document}\nDoes it answer the query? y or n:"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(locate("tiny"))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(locate("tiny"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def probabilities(model):
    @torch.inference_mode()
    def after(ids):
        return model(torch.tensor([ids])).logits[0, -1].double().softmax(-1).numpy()

    return after


@pytest.fixture(scope="module")
def cosine(model, tokenizer):
    @torch.inference_mode()
    def between(a, b):
        last = [model.model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1] for text in (a, b)]
        return float(torch.cosine_similarity(last[0].double(), last[1].double(), dim=0))

    return between


def posted(client, path, **body):
    return client.post(path, json=body).raise_for_status().json()


# -- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item_first", [False, True])
def test_labels_after_texts(tiny, tokenizer, probabilities, item_first):
    joined = [item + QUERY if item_first else QUERY + item for item in DOCUMENTS]
    answer = posted(
        tiny, "/v1/score", query=QUERY, items=DOCUMENTS, label_token_ids=LABELS, item_first=item_first, model="tiny"
    )
    assert (answer["object"], answer["model"]) == ("scoring", "tiny")
    wanted = [probabilities(tokenizer.encode(text))[LABELS] for text in joined]
    np.testing.assert_allclose(answer["scores"], wanted, rtol=1e-3)
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in joined)


def test_softmax_is_over_the_labels(tiny, tokenizer, probabilities):
    ids = [tokenizer.encode(text) for text in (QUERY, *DOCUMENTS)]
    answer = posted(tiny, "/v1/score", query=ids[0], items=ids[1:], label_token_ids=LABELS, apply_softmax=True)
    wanted = [probabilities(ids[0] + item)[LABELS] for item in ids[1:]]
    np.testing.assert_allclose(answer["scores"], [row / row.sum() for row in wanted], rtol=1e-3)
    own = [[LABELS[0], number] for number in range(20, 20 + len(ids) - 1)]
    answer = posted(
        tiny, "/v1/score", query=ids[0], items=ids[1:], label_token_ids=own, apply_softmax=True, temperature=2.0,
        return_token_logprobs=True,
    )  # fmt: skip
    wanted = [probabilities(ids[0] + item)[labels] for item, labels in zip(ids[1:], own, strict=True)]
    np.testing.assert_allclose(answer["token_logprobs"], np.log(wanted), rtol=1e-3)
    warm = np.sqrt(wanted)
    np.testing.assert_allclose(answer["scores"], warm / warm.sum(1, keepdims=True), rtol=1e-3)


def test_the_query_is_computed_once(tiny, tokenizer):
    query = tokenizer.encode(QUERY * 40)
    items = [[token] for token in LABELS] * 4
    answer = posted(tiny, "/v1/score", query=query, items=items, label_token_ids=LABELS, cache_salt="score-1")
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (len(items) - 1) * (len(query) - 16), "all but one find the query's full pages in the cache"


# -- pairs -----------------------------------------------------------------------------------------------------------


def test_pairs_by_the_angle_of_their_embeddings(tiny, cosine):
    one = posted(tiny, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    assert (one["object"], [item["index"] for item in one["data"]]) == ("list", [0, 1, 2, 3])
    scores = [item["score"] for item in one["data"]]
    np.testing.assert_allclose(scores, [cosine(QUERY, text) for text in DOCUMENTS], atol=1e-4)
    each = posted(tiny, "/score", text_1=DOCUMENTS, text_2=DOCUMENTS[::-1])
    wanted = [cosine(a, b) for a, b in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    np.testing.assert_allclose([item["score"] for item in each["data"]], wanted, atol=1e-4)
    for name in ("documents", "items"):  # vLLM's names
        named = posted(tiny, "/v1/score", queries=QUERY, **{name: DOCUMENTS})
        np.testing.assert_allclose([item["score"] for item in named["data"]], scores, atol=1e-5)
    single = posted(tiny, "/v1/score", text_1=QUERY, text_2=QUERY)
    assert abs(single["data"][0]["score"] - 1) < 1e-5


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank_orders_documents(tiny, cosine, path):
    wanted = [cosine(QUERY, text) for text in DOCUMENTS]
    order = np.argsort([-score for score in wanted]).tolist()
    answer = posted(tiny, path, query=QUERY, documents=[{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]], model="tiny")
    assert [result["index"] for result in answer["results"]] == order
    assert list(answer) == ["id", "model", "usage", "results"]
    assert answer["id"].startswith("rerank-")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0
    for result in answer["results"]:
        assert abs(result["relevance_score"] - (1 + wanted[result["index"]]) / 2) < 1e-4
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
        assert list(result) == ["index", "document", "relevance_score"]
    best = posted(tiny, path, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)
    assert [result["index"] for result in best["results"]] == order[:2]
    assert best["results"][0].keys() == {"index", "relevance_score"}


# -- a model that judges ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judging():
    api = [{"kind": "score", "template": TEMPLATE, "yes": "y", "no": "n"}]
    server = {"port": 0, "log_level": "warning"}
    config, _ = setup(arguments={"threads": 1, "server": server, "api": api})
    with running_server(config) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_a_template_asks_the_model(judging, tokenizer, probabilities):
    (yes,), (no,) = (tokenizer.encode(text, add_special_tokens=False) for text in "yn")

    def judged(query, document):
        text = TEMPLATE.replace("{query}", query).replace("{document}", document)
        given = probabilities(tokenizer.encode(text, add_special_tokens=False))
        return given[yes] / (given[yes] + given[no])

    wanted = [judged(QUERY, text) for text in DOCUMENTS]
    answer = posted(judging, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    assert [r["index"] for r in answer["results"]] == np.argsort([-score for score in wanted]).tolist()
    np.testing.assert_allclose([r["relevance_score"] for r in answer["results"]], sorted(wanted)[::-1], rtol=1e-3)
    pairs = posted(judging, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    np.testing.assert_allclose([item["score"] for item in pairs["data"]], wanted, rtol=1e-3)


def test_braces_in_texts_stand_for_themselves():
    assert fill_template("{query}|{document}|{other}", "{document}", "{query}") == "{document}|{query}|{other}"


def test_a_template_without_a_place_is_refused():
    with pytest.raises(ConfigError, match=r"the template has no \{document\}"):
        setup(arguments={"api": [{"kind": "score", "template": "{query}"}]})


# -- refusals --------------------------------------------------------------------------------------------------------


def test_the_size_of_joined_texts_is_that_of_each_query_with_its_item():
    """One long query of many does not count for the items of the others."""
    host: Any = SimpleNamespace(max_body=1000)
    check_pairs(host, [("a" * 900, "b"), *[("a", "b")] * 40], "text_2")
    with pytest.raises(RequestError, match="for each of 41 items"):
        check_pairs(host, [("a" * 30, "b")] * 41, "text_2")


LABELLED = {"query": "a", "items": ["b"], "label_token_ids": [1]}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/score", {}, "query", "give either text_1 and text_2, or query, items and label_token_ids"),
        ("/v1/score", {**LABELLED, "text_1": "a"}, "query", "text_1 and query cannot be combined"),
        ("/v1/score", {"text_1": "a"}, "text_2", "text_2 is missing"),
        ("/v1/score", {"query": "a", "items": ["b"]}, "label_token_ids", "label_token_ids is missing"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "apply_softmax": True}, "apply_softmax", "needs query"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["b"]}, "text_1", "2 texts and text_2 1"),
        ("/v1/score", {"text_1": [], "text_2": ["b"]}, "text_1", "empty"),
        ("/v1/score", {"text_1": "a", "text_2": ""}, "text_2", "empty"),
        ("/v1/score", {"text_1": "a", "text_2": ["c", ""]}, "text_2", "empty"),
        ("/v1/score", {**LABELLED, "items": []}, "items", "items is empty"),
        ("/v1/score", {**LABELLED, "items": [[1]]}, "items", "different kinds"),
        ("/v1/score", {**LABELLED, "pooling": "last"}, "pooling", "needs text_1"),
        ("/v1/score", {**LABELLED, "label_token_ids": []}, "label_token_ids", "1 to 1024"),
        ("/v1/score", {**LABELLED, "label_token_ids": [-1]}, "label_token_ids", "at least 0"),
        ("/v1/score", {**LABELLED, "label_token_ids": [10**7]}, "label_token_ids", "outside of"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "documents is empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 1"),
        ("/v1/rerank", {"documents": ["b"]}, "query", "query is missing"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents", "documents.1 has an empty text"),
        ("/rerank", {"query": "", "documents": ["b", ""]}, "query", "query is empty"),
        ("/rerank", {"query": "a", "documents": ["b", "c " * 3000]}, "documents", "documents.1 has 3001 tokens; the"),
        (
            "/rerank",
            {"query": "c " * 3000, "documents": ["b", "a"]},
            "query",
            "query has 3001 tokens; the context holds",
        ),
        (
            "/rerank",
            {"query": "a", "documents": ["b", {"text": 7}]},
            "documents",
            "documents.1.text is 7: input should",
        ),
        ("/rerank", {"query": "a", "documents": ["b", {"id": 7}]}, "documents", "documents.1.text is missing"),
        (
            "/rerank",
            {"query": "a", "documents": ["b", 7]},
            "documents",
            "documents.1 is 7: input should be a valid string or",
        ),
        ("/rerank", {"query": "a", "documents": ["b", *["c " * 3000] * 2]}, "documents", "documents.1 has 3001 tokens"),
        ("/rerank", {"query": "a", "documents": {"text": "c " * 3000}}, "documents", "documents has 3001 tokens"),
        (
            "/v1/score",
            {"text_1": ["a", "c " * 3000], "text_2": ["b", "d"]},
            "text_1",
            "text_1.1 has 3001 tokens; the context",
        ),
        (
            "/v1/score",
            {"query": [1], "items": [[2], [10**7]], "label_token_ids": [1]},
            "items",
            "items.1 has the token id 10000000, which is outside of",
        ),
        ("/v1/score", {"queries": "a", "items": [[1]]}, "items", "beside queries they must be texts"),
        ("/v1/score", {"queries": "a", "items": ["b"], "documents": ["b"]}, "items", "names of the same field"),
        ("/v1/score", {"queries": "a", "items": ["b"], "query": "a"}, "query", "cannot be combined"),
        ("/v1/score", {"queries": "a", "items": ["b", ""]}, "items", "items is empty, or one of its texts"),
        ("/v1/score", {"queries": "a", "items": ["b"], "text_2": "b"}, "items", "text_2 and items are names of the"),
        ("/v1/score", {"queries": ["a", "b"], "items": "c"}, "queries", "2 texts and items 1"),
        ("/v1/score", {"queries": "a", "items": ["b", "c " * 3000]}, "items", "items.1 has 3001 tokens; the context"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c " * 3000]}, "text_2", "text_2.1 has 3001 tokens; the context"),
    ],
)
def test_what_is_wrong_is_named(tiny, path, body, param, message):
    answer = tiny.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]
