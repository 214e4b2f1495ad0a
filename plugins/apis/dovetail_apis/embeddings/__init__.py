"""Serve POST /v1/embeddings in OpenAI's format."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import Ids, Int32, Rid, Rids, Texts, examples, parse
from dovetail.api.embeddings import check_dimensions, embedding, pooling_kind
from dovetail.api.placement import PlacementFields
from dovetail.api.requests import request_names
from dovetail.api.responses import whole
from dovetail.api.truncation import TruncationFields
from dovetail.errors import RequestError
from dovetail.interfaces.api import JSON_NUMBER_BYTES, Api, ApiHost, ApiProblem, ApiRequest, Generation, Route
from dovetail.types import FloatArray
from dovetail_apis.adapters import AdapterNames, placement
from dovetail_apis.embeddings.encode import ClassifyRequest, EncodeRequest, classify, encode
from dovetail_apis.embeddings.pooling import as_prompts, input_usage, pooled, pooling_params
from dovetail_apis.fields import EMBEDDINGS
from dovetail_apis.openai.format import error_json

_BASE64_NUMBER_BYTES = 6


class EmbeddingsRequest(TruncationFields, PlacementFields):
    """Describe the body of POST /v1/embeddings."""

    model_config = examples({"model": "tiny", "input": ["A text", "Another one"]}, {"input": "A text", "dimensions": 4})

    input: str | Texts | Ids | list[Ids] = Field(description="A text, token ids, or several of either.")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`base64` encodes the numbers as little-endian float32, which takes a quarter of the size."
    )
    dimensions: Int32 | None = Field(
        None, description="Keep only the first `dimensions` numbers of each vector, and scale it to length 1 again."
    )
    # beyond OpenAI's API
    pooling: Literal["last", "mean"] | None = Field(
        None,
        description="Use the hidden state of the last token, or the mean over all tokens. The default is set by the model.",
    )
    normalize: bool = Field(True, description="Scale vectors to length 1.")
    add_special_tokens: bool = Field(True, description="Let the tokenizer add its special tokens to texts.")
    use_activation: bool | None = Field(None, description="vLLM's name of `normalize`.")
    rid: Rid | Rids | None = None
    lora_path: AdapterNames = None
    request_id: Rid | None = None

    ignored = EMBEDDINGS.ignored
    refused = EMBEDDINGS.refused
    reasons = EMBEDDINGS.reasons


class Embeddings(Api):
    """Serve OpenAI's embeddings: https://platform.openai.com/docs/api-reference/embeddings"""

    claims = ("/v1/embeddings", "/encode", "/classify", "/v1/classify")

    def routes(self) -> Sequence[Route]:
        """Return the routes of OpenAI and of SGLang."""
        return (
            Route(["POST"], "/v1/embeddings", embeddings, EmbeddingsRequest),
            Route(["POST"], "/encode", encode, EncodeRequest),
            *(Route(["POST"], path, classify, ClassifyRequest) for path in ("/classify", "/v1/classify")),
        )

    def error(self, problem: ApiProblem) -> object:
        """Return the error in OpenAI's format."""
        return error_json(problem)


async def embeddings(host: ApiHost, request: Request) -> Response:
    """Return a vector for each text, computed from the model's last hidden states."""
    body = await parse(request, EmbeddingsRequest, host.max_body)
    host.check_model(body.model)
    params = pooling_params(pooling_kind(body.pooling, host.embedding))
    assert host.embedding is not None, "pooling_kind refuses a model without embeddings"
    check_dimensions(body.dimensions, host.embedding["size"])
    inputs = _inputs(body)
    rid, names = request_names(body.rid or body.request_id, len(inputs), "embd-")
    where = placement(host, body.lora_path, body, len(inputs))
    special = body.add_special_tokens
    prompts = await as_prompts(
        host, inputs, params, "input", body, add_special_tokens=special, names=names, where=where
    )
    number_bytes = _BASE64_NUMBER_BYTES if body.encoding_format == "base64" else JSON_NUMBER_BYTES
    api_request = ApiRequest(rid, tuple(prompts), True, priority=body.priority or 0, number_bytes=number_bytes)
    return await whole(request, await host.submit_in_parts(api_request), lambda outputs: _answer(host, body, outputs))


def _inputs(body: EmbeddingsRequest) -> Sequence[str | list[int]]:
    given: Any = body.input
    if not given:
        raise RequestError("input is empty; give a text, token ids, or a list of either", param="input")
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


def _answer(host: ApiHost, body: EmbeddingsRequest, outputs: Generation) -> Mapping[str, Any]:
    normalize = body.normalize and body.use_activation is not False
    vectors = [embedding(pooled(choice), body.dimensions, normalize=normalize) for choice in outputs.choices]
    shown = list(map(_base64, vectors)) if body.encoding_format == "base64" else vectors
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(shown)]
    return {"object": "list", "data": data, "model": host.model_name, "usage": input_usage(outputs.usage)}


def _base64(vector: FloatArray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
