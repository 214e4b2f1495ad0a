"""Answer the routes about the server itself: health, metrics and aborts."""

from __future__ import annotations

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dovetail.api.body import ApiModel, parse
from dovetail.api.requests import new_id
from dovetail.api.responses import json_response
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
    """Answer 200 while requests are accepted, else 503. The text says if generation is paused, and if lines of the usage log are
    lost."""
    service.check_ready()
    problem = service.problem()
    return PlainTextResponse(("paused" if service.paused else "ok") + (f", but {problem}" if problem else ""))


async def health_generate(service: ApiHost, request: Request) -> Response:
    """Answer 200 if the engine generates a token within ``server.health_seconds``, else 503. The body says how far the
    engine is with compiling kernels and capturing graphs; steps that wait for these take longer."""
    assert isinstance(service, Service | TenantHost)
    token = next(i for i, data in enumerate(service.tokenizer.token_bytes) if data)
    prompt = Prompt([token], SamplingParams(max_new_tokens=1, temperature=0.0))
    seconds = service.config.server.health_seconds
    if service.paused:
        return json_response(
            {"error": {"message": "generation is paused; POST /continue_generation ends the pause"}}, 503
        )
    try:
        with service.submit(ApiRequest(new_id("health-"), (prompt,))) as outputs:
            await asyncio.wait_for(outputs.wait(), seconds)
    except TimeoutError:
        return json_response({"error": {"message": f"no token within {seconds:g} s"}}, 503)
    stats = await service.fresh_stats()
    return json_response({"status": "ok", "warm_up": stats.warm_up})


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
    if service.config.metrics.expert_load is not None:
        await service.fresh_expert_tokens()
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)
