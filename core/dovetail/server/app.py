"""The ASGI application: routes, and how errors are answered."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from dovetail.errors import ConfigError
from dovetail.interfaces.api import Api
from dovetail.interfaces.api import Route as ApiRoute
from dovetail.server import admin
from dovetail.server.errors import Formats, add_error_handlers
from dovetail.server.service import Service


class Route(NamedTuple):
    """A route of the server itself, or of an API: what is an ``ApiHost`` to those is the whole ``Service`` to these."""

    methods: Sequence[str]
    path: str
    handler: Callable[[Service, Request], Awaitable[Response]]
    body: type[BaseModel] | None = None


ROUTES = (
    Route(["GET"], "/health", admin.health),
    Route(["GET"], "/health_generate", admin.health_generate),
    Route(["GET"], "/server_info", admin.server_info),
    Route(["GET"], "/model_info", admin.model_info),
    Route(["GET", "POST"], "/flush_cache", admin.flush_cache),
    Route(["POST"], "/abort_request", admin.abort_request, admin.AbortRequest),
    Route(["GET"], "/metrics", admin.metrics),
)


def build_app(service: Service, apis: Sequence[Api], more: Sequence[Route] = ()) -> FastAPI:
    """The application for a running engine. ``more`` routes take the place of those of the server with the same path. Raises
    ``ConfigError`` where two APIs answer the same path."""
    app = FastAPI(title="Dovetail", version=service.version, redirect_slashes=False)
    names: dict[str, str] = {}
    replaced = {route.path for route in more}
    own = (*more, *(route for route in ROUTES if route.path not in replaced))
    for route in (*own, *_routes_of(apis, own)):
        name = getattr(route.handler, "__name__", route.path)
        if names.setdefault(name, route.path) != route.path:  # a handler under several paths
            name += re.sub(r"\W+", "_", route.path)
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
    add_error_handlers(app, Formats(apis))
    return app


def _routes_of(apis: Sequence[Api], own: Sequence[Route]) -> list[ApiRoute]:
    """Those of the APIs, each method and path once."""
    owners = {(method, route.path): "the server" for route in own for method in route.methods}
    routes: list[ApiRoute] = []
    for api in apis:
        name = type(api).__name__
        for route in api.routes():
            for method in route.methods:
                owner = owners.setdefault((method, route.path), name)
                if owner != name:
                    raise ConfigError(
                        f"api: {owner} and {name} both answer {method} {route.path}; name those to serve, as in api: [openai, native]"
                    )
            routes.append(route)
    return routes


def _endpoint(
    service: Service, handler: Callable[[Service, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    return endpoint


def _described(body: type[BaseModel] | None) -> dict[str, Any] | None:
    """The body's schema for /docs; bodies are read and validated by ``api.body``, not by FastAPI."""
    if body is None:
        return None
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}
