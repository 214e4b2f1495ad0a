"""Serve SGLang's POST /encode and POST /classify, which pool a prompt into a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import ApiModel, Ids, Rid, Rids, Texts, examples, parse
from dovetail.api.embeddings import embedding, pooling_kind
from dovetail.api.meta import finish_json
from dovetail.api.placement import PlacementFields
from dovetail.api.requests import request_names
from dovetail.api.responses import whole
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost, ApiRequest, Choice, Generation
from dovetail_apis.adapters import AdapterNames, placement
from dovetail_apis.embeddings.pooling import as_prompts, pooled, pooling_params


class EncodeRequest(PlacementFields):
    """Describe the body of POST /encode: one prompt or several, as text or token ids."""

    model_config = examples({"text": "A text"}, {"input_ids": [[5, 6, 7], [8, 9]]})

    model: str | None = None
    text: str | Texts | None = None
    input_ids: Ids | list[Ids] | None = None
    lora_path: AdapterNames = None
    rid: Rid | Rids | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"log_metrics", "background", "sampling_params"})
    refused: ClassVar = {"image_data": (), "audio_data": (), "video_data": ()}


class ClassifyRequest(ApiModel):
    """Describe the body of POST /classify. No model of this server classifies, so every request is refused."""

    model_config = examples({"input": "A text"}, {"text": "A text"})

    model: str | None = None
    input: str | Texts | Ids | list[Ids] | None = None
    text: str | Texts | None = None
    input_ids: Ids | list[Ids] | None = None


async def classify(host: ApiHost, request: Request) -> Response:
    """Refuse: a model with a classification head is needed, and none is supported."""
    body = await parse(request, ClassifyRequest, host.max_body)
    host.check_model(body.model)
    raise RequestError(
        f"the model {host.model_name!r} has no classification head; use /v1/score with label_token_ids for the "
        "probabilities of labels, or /encode for the vector of a text",
        param="model",
        code="unsupported_model",
    )


async def encode(host: ApiHost, request: Request) -> Response:
    """Return the embedding of each prompt: a list if there are several prompts."""
    body = await parse(request, EncodeRequest, host.max_body)
    host.check_model(body.model)
    params = pooling_params(pooling_kind(None, host.embedding))
    given, single = _inputs(body)
    param = "text" if body.text is not None else "input_ids"
    rid, names = request_names(body.rid, len(given), "embd-")
    where = placement(host, body.lora_path, body, len(given))
    prompts = await as_prompts(host, given, params, param, names=names, where=where)
    api_request = ApiRequest(rid, tuple(prompts), True, priority=body.priority or 0)

    def answer(outputs: Generation) -> object:
        answers = [_answer(outputs, choice, single, names[choice.index]) for choice in outputs.choices]
        return answers[0] if single else answers

    return await whole(request, await host.submit_in_parts(api_request), answer)


def _inputs(body: EncodeRequest) -> tuple[Sequence[str | list[int]], bool]:
    """Return the prompts, and whether the request has a single one that is not in a list. Raises ``RequestError``."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give one of text and input_ids", param="text")
    given: Any = body.text if body.text is not None else body.input_ids
    if not given:
        param = "text" if body.text is not None else "input_ids"
        raise RequestError(f"{param} is empty; give at least one token", param=param, code="empty_prompt")
    single = isinstance(given, str) or isinstance(given[0], int)
    return ([given] if single else given), single


def _answer(outputs: Generation, choice: Choice, single: bool, name: str) -> dict[str, Any]:
    meta = {
        "id": outputs.rid if single else name or f"{outputs.rid}_{choice.index}",
        "finish_reason": finish_json(choice.finish, 0),
        "prompt_tokens": len(choice.prompt_ids),
        "cached_tokens": choice.cached_tokens,
        "e2e_latency": outputs.elapsed,
    }
    return {"embedding": embedding(pooled(choice)), "meta_info": meta}
