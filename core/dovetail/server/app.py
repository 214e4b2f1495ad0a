"""Build the ASGI application: its routes and the handling of errors."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from dovetail.errors import ConfigError
from dovetail.interfaces.api import Api
from dovetail.interfaces.api import Route as ApiRoute
from dovetail.server import adapter_routes, admin, control, info, parsing
from dovetail.server.errors import ErrorFormats, add_error_handlers
from dovetail.server.openapi import RouteDescriber
from dovetail.server.pages.routes import add_pages
from dovetail.server.request_ids import RequestIds
from dovetail.server.request_log import ROUTE
from dovetail.server.scopes import RequestScopes
from dovetail.server.service import Service
from dovetail.server.tenants.access import AccessControl
from dovetail.server.tenants.tenancy import Tenancy
from dovetail.server.tracing import RequestTraces, Tracing


class ServerRoute(NamedTuple):
    """Describe a route of the server itself, whose handler gets the ``Service``. If the server has keys, the route requires the
    key of an admin unless it is ``open``. See ``interfaces.api.Route`` for ``answers`` and ``query``."""

    methods: Sequence[str]
    path: str
    handler: Callable[[Service, Request], Awaitable[Response]]
    body: type[BaseModel] | None = None
    open: bool = False
    answers: Sequence[str] = ("application/json",)
    query: type[BaseModel] | None = None


_TEXT = ("text/plain",)


ROUTES = (
    ServerRoute(["GET"], "/health", admin.health, open=True, answers=_TEXT),
    ServerRoute(["GET", "POST"], "/ping", admin.health, open=True, answers=_TEXT),
    ServerRoute(["GET"], "/server_info", info.server_info),
    ServerRoute(["GET"], "/get_server_info", info.server_info),
    ServerRoute(["GET"], "/load", info.load),
    ServerRoute(["GET"], "/get_load", info.get_load),
    ServerRoute(["GET"], "/expert_load", info.expert_load),
    ServerRoute(["GET", "POST"], "/flush_cache", control.flush_cache, answers=_TEXT, query=control.FlushQuery),
    ServerRoute(["POST"], "/reset_prefix_cache", control.reset_prefix_cache, query=control.ResetQuery),
    ServerRoute(["POST"], "/pause_generation", control.pause_generation, control.PauseRequest),
    ServerRoute(["POST"], "/continue_generation", control.continue_generation),
    ServerRoute(["GET"], "/is_paused", control.is_paused),
    ServerRoute(["POST"], "/start_profile", control.start_profile, control.ProfileRequest),
    ServerRoute(["POST"], "/stop_profile", control.stop_profile),
    ServerRoute(["POST"], "/load_lora_adapter", adapter_routes.load_lora_adapter, adapter_routes.LoadAdapterRequest),
    ServerRoute(
        ["POST"], "/unload_lora_adapter", adapter_routes.unload_lora_adapter, adapter_routes.UnloadAdapterRequest
    ),
    ServerRoute(
        ["POST"],
        "/v1/load_lora_adapter",
        adapter_routes.v1_load_lora_adapter,
        adapter_routes.LoadAdapterRequest,
        answers=_TEXT,
    ),
    ServerRoute(
        ["POST"],
        "/v1/unload_lora_adapter",
        adapter_routes.v1_unload_lora_adapter,
        adapter_routes.UnloadAdapterRequest,
        answers=_TEXT,
    ),
    ServerRoute(["POST"], "/abort_request", admin.abort_request, admin.AbortRequest),
    ServerRoute(["GET"], "/metrics", admin.metrics, answers=_TEXT),
)

TENANT_ROUTES = (
    ApiRoute(["GET"], "/health_generate", admin.health_generate),
    ApiRoute(["GET"], "/model_info", info.model_info),
    ApiRoute(["GET"], "/get_model_info", info.model_info),
    ApiRoute(["GET"], "/version", info.version),
    ApiRoute(["GET"], "/tokenizer_info", info.tokenizer_info),
    ApiRoute(["POST"], "/separate_reasoning", parsing.separate_reasoning, parsing.ReasoningRequest),
    ApiRoute(["POST"], "/parse_function_call", parsing.parse_function_call, parsing.FunctionCallRequest),
)
"""Routes of the server that any key grants access to."""


def build_app(
    service: Service,
    apis: Sequence[Api],
    more: Sequence[ServerRoute] = (),
    tenancy: Tenancy | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Return the application for a running engine. The routes ``more`` replace routes of the server with the same path. With a
    ``tenancy`` every request needs a key, and with ``tracing`` requests are traced. Raises ``ConfigError`` if two APIs answer the same method and path."""
    access = AccessControl(service, tenancy)
    app = FastAPI(title="Dovetail", version=service.version, redirect_slashes=False, docs_url=None, redoc_url=None)
    formats = ErrorFormats(apis)
    describer = RouteDescriber(formats, service.model_name)
    names: dict[str, str] = {}
    replaced = {route.path for route in more}
    own = (*more, *(route for route in ROUTES if route.path not in replaced), *TENANT_ROUTES)
    for route in (*own, *_routes_of(apis, own)):
        name = getattr(route.handler, "__name__", route.path)
        if names.setdefault(name, route.path) != route.path:  # one handler has several paths
            name += re.sub(r"\W+", "_", route.path)
        for method in route.methods:
            app.add_api_route(
                route.path,
                _endpoint(service, access, route),
                methods=[method],
                response_model=None,
                summary=(route.handler.__doc__ or "").strip(),
                name=name,
                openapi_extra=describer.request(route),
                responses=describer.responses(route),
                operation_id=f"{name}_{method.lower()}",
            )
        if "GET" in route.methods:  # the server sends the head of the answer only
            endpoint = _endpoint(service, access, route)
            app.add_api_route(route.path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    add_pages(app)
    describer.publish(app)
    add_error_handlers(app, formats, service.metrics.errors)
    app.add_middleware(RequestScopes, intake=service.intake)
    _allow_origins(app, service.config.server.cors_origins)
    app.add_middleware(RequestIds)
    if tracing is not None:
        app.add_middleware(RequestTraces, tracing=tracing)
    return app


def _routes_of(apis: Sequence[Api], own: Sequence[ServerRoute | ApiRoute]) -> list[ApiRoute]:
    """Return the routes of the APIs. Raises ``ConfigError`` if a method and path has two owners."""
    owners = {(method, route.path): "the server" for route in own for method in route.methods}
    routes: list[ApiRoute] = []
    for api in apis:
        name = type(api).__name__
        for route in api.routes():
            for method in route.methods:
                owner = owners.setdefault((method, route.path), name)
                if owner != name:
                    raise ConfigError(
                        f"api: {owner} and {name} both answer {method} {route.path}; name the APIs to serve, as in api: [openai, native]"
                    )
            routes.append(route)
    return routes


def _endpoint(
    service: Service, access: AccessControl, route: ServerRoute | ApiRoute
) -> Callable[[Request], Awaitable[Response]]:
    async def for_tenants(request: Request) -> Response:
        assert isinstance(route, ApiRoute)
        ROUTE.set(route.path)
        return await route.handler(access.host(request), request)

    async def for_admins(request: Request) -> Response:
        assert isinstance(route, ServerRoute)
        if not route.open:
            access.check_admin(request)
        return await route.handler(service, request)

    return for_tenants if isinstance(route, ApiRoute) else for_admins


def _allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Allow cross-origin requests from ``origins`` (WHATWG Fetch, section 3.2). Without ``origins`` none are allowed."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
