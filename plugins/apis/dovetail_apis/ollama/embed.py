"""Handle POST /api/embed and /api/embeddings."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import parse
from dovetail.api.embeddings import check_dimensions, embedding, pooling_kind
from dovetail.api.offload import for_each
from dovetail.api.requests import check_count, new_id
from dovetail.api.responses import json_response, whole
from dovetail.errors import ContextLengthError
from dovetail.interfaces.api import ApiHost, ApiRequest, Generation
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

    def answer(outputs: Generation) -> object:
        vectors = [embedding(pooled(choice), body.dimensions) for choice in outputs.choices]
        count = outputs.usage.prompt
        counts = {"prompt_eval_count": count, "total_duration": times.elapsed(), "load_duration": 0}
        return {"model": body.model, "embeddings": vectors, **counts}

    outputs = await _submitted(host, body, texts, "input", body.dimensions, truncate=body.truncate is not False)
    return await whole(request, outputs, answer)


async def embeddings(host: ApiHost, request: Request) -> Response:
    """Return the vector of one text without scaling it to length 1."""
    body = await parse(request, OllamaEmbeddingsRequest, host.max_body)
    check_model(host, body.model)
    if not body.prompt:
        refuse_unload(body.keep_alive)
        return json_response({"embedding": []})
    outputs = await _submitted(host, body, [body.prompt], "prompt", None, truncate=False)
    return await whole(request, outputs, lambda outputs: {"embedding": pooled(outputs.choices[0])})


async def _submitted(
    host: ApiHost, body: EmbedFields, texts: list[str], param: str, dimensions: int | None, *, truncate: bool
) -> Generation:
    """Send ``texts``, which are those of the request field ``param``, to the engine, and return their outputs. Raises
    ``RequestError``."""
    check_options(host, body.options)
    params = pooling_params(pooling_kind(None, host.embedding))
    assert host.embedding is not None, "pooling_kind refuses a model without embeddings"
    check_dimensions(dimensions, host.embedding["size"])
    given = await for_each(texts, partial(_shortened, host)) if truncate else texts
    prompts = await as_prompts(host, given, params, param)
    api_request = ApiRequest(new_id("ollama-"), tuple(prompts), True, body.namespace, body.priority or 0)
    return await host.submit_in_parts(api_request)


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
