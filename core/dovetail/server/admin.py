"""Answer the routes about the server itself: health, configuration, metrics, cache and aborts."""

from __future__ import annotations

import asyncio

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dovetail.api.body import ApiModel, parse
from dovetail.api.requests import new_id
from dovetail.api.responses import json_response
from dovetail.config import dump
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost, ApiRequest, Prompt
from dovetail.sampling_params import SamplingParams
from dovetail.server.service import Service
from dovetail.server.tenants.host import TenantHost


class AbortRequest(ApiModel):
    """Describe the body of POST /abort_request."""

    rid: str | None = Field(None, description="Id of the request: its `rid`, or the `id` of its response.")
    abort_all: bool = False


async def health(service: Service, request: Request) -> Response:
    """Answer 200 while requests are accepted, else 503."""
    service.check_ready()
    return PlainTextResponse("ok")


async def health_generate(service: ApiHost, request: Request) -> Response:
    """Answer 200 if the engine generates a token within ``server.health_seconds``, else 503. The body says how far the
    engine is with compiling kernels and capturing graphs; steps that wait for these take longer."""
    assert isinstance(service, Service | TenantHost)
    token = next(i for i, data in enumerate(service.tokenizer.token_bytes) if data)
    prompt = Prompt([token], SamplingParams(max_new_tokens=1, temperature=0.0))
    seconds = service.config.server.health_seconds
    try:
        with service.submit(ApiRequest(new_id("health-"), (prompt,))) as outputs:
            await asyncio.wait_for(outputs.wait(), seconds)
    except TimeoutError:
        return json_response({"error": {"message": f"no token within {seconds:g} s"}}, 503)
    stats = await service.fresh_stats()
    return json_response({"status": "ok", "warm_up": stats.warm_up})


async def model_info(service: ApiHost, request: Request) -> Response:
    """Return where the model was loaded from, its sizes and its special tokens."""
    tokenizer = service.tokenizer
    info = {
        "model_path": service.config.model.path,
        "served_model_name": service.model_name,
        "is_generation": True,
        "context_length": service.context_len,
        "vocab_size": service.vocab_size,
        "tokenizer_size": tokenizer.vocab_size,
        "textless_token_ids": [i for i, data in enumerate(tokenizer.token_bytes) if not data],
        "eos_token_ids": tokenizer.eos_token_ids,
        "has_chat_template": tokenizer.has_chat_template,
        "chat_template": tokenizer.chat_template or None,
        "special_tokens": tokenizer.named_tokens,
        "bos_token_id": tokenizer.bos_token_id,
        "adds_bos": tokenizer.adds_bos,
    }
    return json_response(info)


async def server_info(service: Service, request: Request) -> Response:
    """Return the config, how every component was chosen, the memory report, and the engine's current numbers."""
    stats = await service.fresh_stats()
    info = {
        "status": "draining" if service.draining else "ready" if service.engine.alive else "dead",
        "version": service.version,
        "engine_pid": service.engine.pid,
        "open_requests": service.engine.num_open,
        "config": dump(service.config),
        "engine": service.engine.info,
        "stats": {name: value for name, value in msgspec.structs.asdict(stats).items() if name != "call_id"},
    }
    return json_response(info)


async def flush_cache(service: Service, request: Request) -> Response:
    """Drop every cached prefix. Answer 400 while requests are running."""
    reply = await service.engine.flush_cache()
    if not reply.ok:
        raise RequestError(f"the cache was not flushed: {reply.message}", code="busy")
    return PlainTextResponse("the cache is empty")


async def abort_request(service: Service, request: Request) -> Response:
    """Abort one request, or all of them. Each ends with finish reason ``abort``."""
    body = await parse(request, AbortRequest, service.max_body)
    if body.abort_all:
        service.engine.abort_all()
        return json_response({"aborted": "all"})
    if body.rid is None:
        raise RequestError("give rid, or abort_all: true", param="rid")
    return json_response({"aborted": service.abort(body.rid)})


async def metrics(service: Service, request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    await service.fresh_stats()
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
