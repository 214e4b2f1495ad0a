"""Turn errors into HTTP responses in the format of the API that was called."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import ceil

import msgspec
from fastapi import FastAPI
from prometheus_client import Counter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from dovetail.api.problems import problem_of
from dovetail.errors import DovetailError, RateLimitError
from dovetail.interfaces.api import Api, ApiProblem

_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    504: {"x-should-retry": "false"},  # the clients of OpenAI and Anthropic would otherwise retry twice
}


class ErrorFormats:
    """Format errors as JSON. The API that claims a path defines the format of errors at that path."""

    def __init__(self, apis: Sequence[Api]) -> None:
        claims = [(claim, api) for api in apis for claim in api.claims]
        self._claims = sorted(claims, key=lambda claim: -len(claim[0]))

    def body(self, path: str, problem: ApiProblem) -> object:
        """Return the JSON of an error at ``path``."""
        for claim, api in self._claims:
            if path == claim or path.startswith(claim + "/"):
                return api.error(problem)
        return {"error": {"message": problem.message}}

    def answer(self, path: str, error: BaseException) -> Response:
        """Return the response for an error at ``path``."""
        problem = problem_of(error)
        headers = {**_HEADERS.get(problem.status, {}), **(getattr(error, "headers", None) or {})}
        if problem.retry_after is not None:
            headers["retry-after"] = str(max(ceil(problem.retry_after), 1))
        content = msgspec.json.encode(self.body(path, problem))
        return Response(content, problem.status, headers, media_type="application/json")


def add_error_handlers(app: FastAPI, formats: ErrorFormats, count: Counter) -> None:
    """Install handlers for every error of every route. ``count`` counts them by status."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return counted(Response(status_code=499))  # the client has left and reads nothing
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            error.detail = f"there is no {request.method} {request.url.path}; /docs lists all routes"
        if isinstance(error, HTTPException) and error.status_code == 405:
            error.headers = {"allow": ", ".join(_methods(app, request))}
        if isinstance(error, RateLimitError):
            await asyncio.sleep(error.pause)
        return counted(formats.answer(request.url.path, error))

    def counted(response: Response) -> Response:
        count.labels(status=str(response.status_code)).inc()
        return response

    for kind in (DovetailError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


def _methods(app: FastAPI, request: Request) -> list[str]:
    """Return the methods that any route accepts at the path of the request."""
    found = [route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in found for method in getattr(route, "methods", None) or ()})
