"""Handle POST /api/embed and /api/embeddings."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import parse
from dovetail.api.embeddings import check_dimensions, embedding, pooling_kind
from dovetail.api.offload import for_each
from dovetail.api.requests import check_count, new_id
from dovetail.api.responses import json_response, until_disconnect
from dovetail.errors import ContextLengthError
from dovetail.interfaces.api import ApiHost, ApiRequest
from dovetail_apis.embeddings.pooling import as_prompts, pooled, pooling_params
from dovetail_apis.ollama.format import RequestTimes
from dovetail_apis.ollama.model import check_model, check_options, refuse_unload
from dovetail_apis.ollama.types import EmbedFields, EmbedRequest, OllamaEmbeddingsRequest


async def embed(host: ApiHost, request: Request) -> Response:
    """Return a vector of length 1 for each text."""
    times = RequestTimes()
    body = await parse(request, EmbedRequest, host.max_body)
    check_model(host, body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if texts in ([], [""]):
        refuse_unload(body.keep_alive)
        return json_response({"model": body.model, "embeddings": []})
    check_count(host, len(texts), "input")
    vectors, count = await _vectors(host, request, body, texts, body.dimensions, body.truncate is not False)
    counts = {"prompt_eval_count": count, "total_duration": times.elapsed(), "load_duration": 0}
    return json_response({"model": body.model, "embeddings": vectors, **counts})


async def embeddings(host: ApiHost, request: Request) -> Response:
    """Return the vector of one text without scaling it to length 1."""
    body = await parse(request, OllamaEmbeddingsRequest, host.max_body)
    check_model(host, body.model)
    if not body.prompt:
        refuse_unload(body.keep_alive)
        return json_response({"embedding": []})
    ((vector,), _) = await _vectors(host, request, body, [body.prompt], None, False, normalize=False)
    return json_response({"embedding": vector})


async def _vectors(
    host: ApiHost,
    request: Request,
    body: EmbedFields,
    texts: list[str],
    dimensions: int | None,
    truncate: bool,
    *,
    normalize: bool = True,
) -> tuple[list[list[float]], int]:
    """Return one vector for each text, and the number of tokens of all texts. Raises ``RequestError``."""
    check_options(host, body.options)
    params = pooling_params(pooling_kind(None, host.embedding))
    assert host.embedding is not None, "pooling_kind refuses a model without embeddings"
    check_dimensions(dimensions, host.embedding["size"])
    given = await for_each(texts, partial(_shortened, host)) if truncate else texts
    prompts = await as_prompts(host, given, params, "input")
    api_request = ApiRequest(new_id("ollama-"), tuple(prompts), True, body.namespace, body.priority or 0)
    with await host.submit_in_parts(api_request) as outputs:
        await until_disconnect(request.receive, outputs.wait())
        found = [embedding(pooled(choice), dimensions, normalize=normalize) for choice in outputs.choices]
        return [vector.tolist() for vector in found], outputs.usage.prompt


async def _shortened(host: ApiHost, text: str) -> list[int]:
    """Return the token ids of ``text``, cut off at its end to fit into the context. A special token at its end is kept."""
    try:
        ids = await host.encode(text, add_special_tokens=True)
    except ContextLengthError:  # far too long: half of it is too long as well
        return await _shortened(host, text[: len(text) // 2])
    most = host.context_len - 1
    if len(ids) <= most:
        return ids
    last = [i for i in ids[-1:] if i in host.tokenizer.special_token_ids]
    return ids[: most - len(last)] + last
