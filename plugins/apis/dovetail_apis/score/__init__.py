"""Serve /v1/score with the meanings of vLLM and SGLang, and /v1/rerank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import parse
from dovetail.api.embeddings import label_probabilities
from dovetail.api.responses import whole
from dovetail.errors import RequestError
from dovetail.interfaces.api import Api, ApiHost, ApiProblem, Generation, Route
from dovetail.sampling_params import PoolingKind, SamplingParams
from dovetail_apis.config import ScoreConfig
from dovetail_apis.embeddings.pooling import as_prompts, input_usage, pooled, pooling_params
from dovetail_apis.openai.format import error_json
from dovetail_apis.score.pairs import NamedPairs, Scoring, api_request, check_joined, field_names, score_pairs
from dovetail_apis.score.types import RerankRequest, ScoreRequest

_PAIRS = ("text_1", "text_2")
_SIDES = (("text_1", "queries", "data_1"), ("text_2", "documents", "data_2"))
_LABELS = ("query", "items", "label_token_ids")


class Score(Api):
    """Serve scores of texts. Pairs are scored with ``config.template`` if it is set, else by embeddings."""

    claims = ("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank")

    def __init__(self, config: ScoreConfig) -> None:
        self._config = config

    def routes(self) -> Sequence[Route]:
        """Return each route under all paths that clients of vLLM, SGLang, Jina and Cohere use."""
        score = [Route(["POST"], path, self.score, ScoreRequest) for path in ("/v1/score", "/score")]
        paths = ("/v1/rerank", "/v2/rerank", "/rerank")
        return (*score, *(Route(["POST"], path, self.rerank, RerankRequest) for path in paths))

    def error(self, problem: ApiProblem) -> object:
        """Return the error in OpenAI's format."""
        return error_json(problem)

    async def score(self, host: ApiHost, request: Request) -> Response:
        """Return how well pairs of texts match, or how likely each label is after each item."""
        body = await parse(request, ScoreRequest, host.max_body)
        host.check_model(body.model)
        sides = _sides(body)
        if _has_labels(body, sides):
            return await _score_labels(host, request, body)
        scoring = await score_pairs(host, self._config, _pairs(body, sides), body)
        return await whole(
            request, await host.submit_in_parts(scoring.request), lambda outputs: _score_answer(host, scoring, outputs)
        )

    async def rerank(self, host: ApiHost, request: Request) -> Response:
        """Return documents in the order of their relevance to the query."""
        body = await parse(request, RerankRequest, host.max_body)
        host.check_model(body.model)
        if not body.documents:
            raise RequestError("documents is empty; give at least one", param="documents")
        if not body.query:
            raise RequestError("query is empty; give a text", param="query", code="empty_prompt")
        if body.top_n is not None and body.top_n < 0:
            raise RequestError(f"top_n is {body.top_n}; allowed: at least 1, or 0 for all", param="top_n")
        documents = body.documents if isinstance(body.documents, list) else [body.documents]
        texts = [document if isinstance(document, str) else document.text for document in documents]
        named = NamedPairs([(body.query, text) for text in texts], field_names("query", 1, "documents", len(texts)))
        scoring = await score_pairs(host, self._config, named, body)
        return await whole(
            request,
            await host.submit_in_parts(scoring.request),
            lambda outputs: _rerank_answer(host, body, texts, scoring, outputs),
        )


def _sides(body: ScoreRequest) -> Sequence[Sequence[str]]:
    """Return the names of the fields of both sides of pairs, of which ``items`` is one beside ``queries``, as in vLLM. Raises
    ``RequestError``."""
    if body.queries is None or body.items is None or body.query is not None or body.label_token_ids is not None:
        return _SIDES
    if any(not isinstance(item, str) for item in body.items):
        raise RequestError("items has token ids; beside queries they must be texts", param="items")
    one, other = _SIDES
    return one, (*other, "items")


def _has_labels(body: ScoreRequest, sides: Sequence[Sequence[str]]) -> bool:
    """Return true if the request scores labels, and false if it scores pairs. Raises ``RequestError`` if it has fields
    of both, or not all fields of one."""
    pairs = [standard for standard, names in zip(_PAIRS, sides, strict=True) if body.side(*names)[1] is not None]
    labels = [name for name in _LABELS if getattr(body, name) is not None and name not in sides[1]]
    allowed = "either text_1 and text_2, or query, items and label_token_ids"
    if pairs and labels:
        raise RequestError(f"{pairs[0]} and {labels[0]} cannot be combined; give {allowed}", param=labels[0])
    missing = [name for name in (_PAIRS if pairs else _LABELS) if name not in pairs + labels]
    if missing:
        raise RequestError(f"{missing[0]} is missing; give {allowed}", param=missing[0], code="missing_field")
    for name in ("apply_softmax", "item_first", "return_token_logprobs"):
        if pairs and getattr(body, name):
            raise RequestError(f"{name} needs query, items and label_token_ids; text_1 was given", param=name)
    if body.temperature not in (None, 1) and not body.apply_softmax:
        raise RequestError("temperature needs apply_softmax: true", param="temperature")
    if labels and body.pooling is not None:
        raise RequestError("pooling needs text_1 and text_2; query was given", param="pooling")
    return bool(labels)


def _pairs(body: ScoreRequest, sides: Sequence[Sequence[str]]) -> NamedPairs:
    """Return the pairs of the request. Raises ``RequestError``."""
    (first, queries), (second, answers) = (_texts(*body.side(*names)) for names in sides)
    for param, texts in ((first, queries), (second, answers)):
        if not texts or "" in texts:
            raise RequestError(f"{param} is empty, or one of its texts; give at least one, not empty", param=param)
    if len(queries) not in (1, len(answers)):
        raise RequestError(
            f"{first} has {len(queries)} texts and {second} {len(answers)}; allowed: one, or as many as {second}",
            param=first,
        )
    pairs = list(zip(queries * (len(answers) if len(queries) == 1 else 1), answers, strict=True))
    return NamedPairs(pairs, field_names(first, len(queries), second, len(answers)))


def _texts(name: str, given: str | list[str] | None) -> tuple[str, list[str]]:
    return name, [given] if isinstance(given, str) else given or []


async def _score_labels(host: ApiHost, request: Request, body: ScoreRequest) -> Response:
    texts = _joined(host, body)
    prompts = await as_prompts(host, texts, _label_params(body, len(texts)), "items", body)
    outputs = await host.submit_in_parts(api_request(body, prompts, together=not body.item_first))
    return await whole(request, outputs, lambda outputs: _label_answer(host, body, outputs))


def _label_params(body: ScoreRequest, count: int) -> SamplingParams | Callable[[int], SamplingParams]:
    """Return the parameters of ``count`` items with their label tokens, or a function that returns those of each. Raises
    ``RequestError``."""
    given: Any = body.label_token_ids or ()
    if not (given and isinstance(given[0], list)):
        return pooling_params(PoolingKind.LABELS, tuple(given))
    if len(given) != count:
        raise RequestError(f"label_token_ids has {len(given)} lists for {count} items", param="label_token_ids")
    return lambda index: pooling_params(PoolingKind.LABELS, tuple(given[index]))


def _joined(host: ApiHost, body: ScoreRequest) -> list[str] | list[list[int]]:
    """Return query and item joined, for each item. Texts are joined before they are tokenized."""
    query: Any = body.query
    items: Any = [body.items] if isinstance(body.items, str) else body.items
    if not items:
        raise RequestError("items is empty; give at least one", param="items")
    if set(map(type, items)) != {type(query)}:
        raise RequestError(
            "query and items are of different kinds; allowed: texts, or lists of token ids", param="items"
        )
    length = len(items) * len(query) + sum(map(len, items))
    check_joined(host, length if isinstance(query, str) else 4 * length, len(items), "items")
    return [item + query if body.item_first else query + item for item in items]


def _label_answer(host: ApiHost, body: ScoreRequest, outputs: Generation) -> dict[str, Any]:
    logprobs = [pooled(choice) for choice in outputs.choices]
    heat = 1.0 if body.temperature is None else body.temperature
    scores = [label_probabilities(one, among_labels=body.apply_softmax, temperature=heat) for one in logprobs]
    more = {"token_logprobs": [one.tolist() for one in logprobs]} if body.return_token_logprobs else {}
    return {
        "id": outputs.rid,
        "object": "scoring",
        "model": host.model_name,
        "scores": scores,
        **more,
        "usage": input_usage(outputs.usage),
    }


def _score_answer(host: ApiHost, scoring: Scoring, outputs: Generation) -> dict[str, Any]:
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scoring.read(outputs))]
    return {
        "id": outputs.rid,
        "object": "list",
        "created": int(time.time()),
        "model": host.model_name,
        "data": data,
        "usage": input_usage(outputs.usage),
    }


def _rerank_answer(
    host: ApiHost, body: RerankRequest, texts: Sequence[str], scoring: Scoring, outputs: Generation
) -> dict[str, Any]:
    scores = [scoring.relevance(score) for score in scoring.read(outputs)]
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
    shown = [{"document": {"text": texts[i]}} if body.return_documents else {} for i in order]
    results = [{"index": i, **own, "relevance_score": scores[i]} for i, own in zip(order, shown, strict=True)]
    return {"id": outputs.rid, "model": host.model_name, "usage": input_usage(outputs.usage), "results": results}
