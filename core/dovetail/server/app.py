"""The ASGI application: routes, and how errors are answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from dovetail.server import admin
from dovetail.server.body import ApiModel
from dovetail.server.chat import chat_completions
from dovetail.server.completions import completions
from dovetail.server.errors import add_error_handlers
from dovetail.server.native import NativeRequest, generate
from dovetail.server.openai_types import ChatRequest, CompletionRequest
from dovetail.server.service import Service

Handler = Callable[[Service, Request], Awaitable[Response]]


class Route(NamedTuple):
    """One row of the API."""

    methods: Sequence[str]
    path: str
    handler: Handler
    body: type[ApiModel] | None = None


ROUTES = (
    Route(["POST"], "/v1/chat/completions", chat_completions, ChatRequest),
    Route(["POST"], "/v1/completions", completions, CompletionRequest),
    Route(["GET"], "/v1/models", admin.models),
    Route(["GET"], "/v1/models/{name:path}", admin.model),
    Route(["POST"], "/generate", generate, NativeRequest),
    Route(["GET"], "/health", admin.health),
    Route(["GET"], "/health_generate", admin.health_generate),
    Route(["GET"], "/server_info", admin.server_info),
    Route(["GET"], "/model_info", admin.model_info),
    Route(["GET", "POST"], "/flush_cache", admin.flush_cache),
    Route(["POST"], "/abort_request", admin.abort_request, admin.AbortRequest),
    Route(["GET"], "/metrics", admin.metrics),
)


def build_app(service: Service, more: Sequence[Route] = ()) -> FastAPI:
    """The application for a running engine. ``more`` routes take the place of those with the same path."""
    app = FastAPI(title="Dovetail", version=service.version, redirect_slashes=False)
    replaced = {route.path for route in more}
    for route in (*more, *(route for route in ROUTES if route.path not in replaced)):
        name = getattr(route.handler, "__name__", route.path)
        for method in route.methods:
            app.add_api_route(
                route.path,
                _endpoint(service, route.handler),
                methods=[method],
                response_model=None,
                summary=(route.handler.__doc__ or "").strip(),
                name=name,
                openapi_extra=_described(route.body),
                operation_id=f"{name}_{method.lower()}",
            )
    add_error_handlers(app)
    return app


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    return endpoint


def _described(body: type[ApiModel] | None) -> dict[str, Any] | None:
    """The body's schema for /docs; bodies are read and validated by ``server.body``, not by FastAPI."""
    if body is None:
        return None
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}
