"""Score how well pairs of texts match, by the angle between their embeddings or by the model's answer to a question."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from dovetail.api.embeddings import cosine, label_probabilities, pooling_kind
from dovetail.api.requests import check_count, new_id
from dovetail.errors import ConfigError, RequestError
from dovetail.interfaces.api import ApiHost, ApiRequest, Generation, Prompt
from dovetail.sampling_params import PoolingKind
from dovetail_apis.config import ScoreConfig
from dovetail_apis.embeddings.pooling import as_prompts, param_of, pooled, pooling_params
from dovetail_apis.score.types import ScoreFields

Pair = tuple[str, str]
"""Type of a pair: a query, and a text that may answer it."""


class FieldNames(NamedTuple):
    """Hold the names that errors give to the two texts of a pair, such as ``query`` and ``documents.3``."""

    first: str
    second: str


class NamedPairs(NamedTuple):
    """Hold at least one pair, and the names of the texts of each pair."""

    pairs: Sequence[Pair]
    fields: Sequence[FieldNames]

    @property
    def param(self) -> str:
        """Return the request field of the second texts, which errors about all pairs name."""
        return param_of(self.fields[0].second)


class Scoring(NamedTuple):
    """Hold a request to the engine, and the function that reads the scores of its outputs in the order of the pairs.
    ``least`` is the lowest score that is possible; the highest is 1."""

    request: ApiRequest
    read: Callable[[Generation], list[float]]
    least: float

    def relevance(self, score: float) -> float:
        """Return a score on the scale from 0 to 1. The order of scores is kept."""
        return min(max((score - self.least) / (1 - self.least), 0.0), 1.0)


async def score_pairs(host: ApiHost, config: ScoreConfig, named: NamedPairs, body: ScoreFields) -> Scoring:
    """Score pairs by the template of ``config``, or by embeddings if there is none. Raises ``RequestError``."""
    check_count(host, len(named.pairs), named.param)
    by = by_embeddings if config.template is None else by_template
    return await by(host, config, named, body)


async def by_embeddings(host: ApiHost, config: ScoreConfig, named: NamedPairs, body: ScoreFields) -> Scoring:
    """Score pairs by the cosine of the embeddings, from -1 to 1. Each text is embedded once, even if it is in several
    pairs; errors give it its first name."""
    params = pooling_params(pooling_kind(body.pooling, host.embedding))
    pairs = named.pairs
    field_of_text: dict[str, str] = {}
    for pair, fields in zip(pairs, named.fields, strict=True):
        for text, field in zip(pair, fields, strict=True):
            field_of_text.setdefault(text, field)
    texts = list(field_of_text)
    prompts = await as_prompts(host, texts, params, named.param, body, fields=list(field_of_text.values()))
    index = {text: i for i, text in enumerate(texts)}

    def read(outputs: Generation) -> list[float]:
        vectors = [pooled(choice) for choice in outputs.choices]
        return [cosine(vectors[index[a]], vectors[index[b]]) for a, b in pairs]

    return Scoring(api_request(body, prompts), read, -1.0)


async def by_template(host: ApiHost, config: ScoreConfig, named: NamedPairs, body: ScoreFields) -> Scoring:
    """Score pairs by the probability of ``config.yes`` against ``config.no`` as the token after the template, from 0 to
    1. The common prefix of the prompts is computed once."""
    assert config.template is not None
    params = pooling_params(PoolingKind.LABELS, (_token(host, config.yes), _token(host, config.no)))
    check_pairs(host, named.pairs, named.param)
    texts = [fill_template(config.template, *pair) for pair in named.pairs]
    prompts = await as_prompts(host, texts, params, named.param, body, add_special_tokens=False)

    def read(outputs: Generation) -> list[float]:
        return [label_probabilities(pooled(choice), among_labels=True)[0] for choice in outputs.choices]

    return Scoring(api_request(body, prompts, together=True), read, 0.0)


def field_names(first: str, first_count: int, second: str, second_count: int) -> list[FieldNames]:
    """Return the names of the texts of ``second_count`` pairs. ``first`` and ``second`` are the request fields of their texts;
    ``first`` has one text for all pairs, or as many as ``second``."""
    return [
        FieldNames(first if first_count == 1 else f"{first}.{i}", second if second_count == 1 else f"{second}.{i}")
        for i in range(second_count)
    ]


def check_pairs(host: ApiHost, pairs: Collection[Pair], param: str) -> None:
    """Raise ``RequestError`` if the pairs, each joined, make more than a request body may have."""
    check_joined(host, sum(len(query) + len(text) for query, text in pairs), len(pairs), param)


def check_joined(host: ApiHost, size: int, count: int, param: str) -> None:
    """Raise ``RequestError`` if ``size`` is larger than a request body may be. It is the number of characters of the queries joined with
    their ``count`` items, and 4 for each token id: a body is bounded, and one query for each of thousands of items would
    otherwise expand to thousands of times as much."""
    if size > host.max_body:
        raise RequestError(
            f"{param}: the query for each of {count} items makes {size / 2**20:.0f} MiB; allowed: "
            f"{host.max_body / 2**20:g} MiB, as for a body (server.max_body_mib). Send fewer items at a time",
            param=param,
        )


def fill_template(template: str, query: str, document: str) -> str:
    """Return ``template`` with the texts inserted. Braces in the texts have no special meaning."""
    texts = {"query": query, "document": document}
    return re.sub(r"\{(query|document)\}", lambda found: texts[found[1]], template)


def api_request(body: ScoreFields, prompts: Sequence[Prompt], *, together: bool = False) -> ApiRequest:
    """Return the request for prompts. With ``together``, they form a group, because they share a prefix."""
    rid = body.rid or body.request_id or new_id(body.id_prefix)
    group = rid if together else ""
    return ApiRequest(rid, tuple(prompts), True, body.namespace, body.priority or 0, group=group)


def _token(host: ApiHost, text: str) -> int:
    ids = host.tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(
            f"api score: {text!r} has {len(ids)} tokens in this model's vocabulary; allowed for yes and no: 1"
        )
    return ids[0]
