"""Errors as HTTP answers, in the format of the API that was called."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dovetail.errors import DovetailError, EngineDeadError, QueueFullError, RequestError


class UnknownModelError(RequestError):
    """The request names a model that is not served here (404)."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(
            f"the model {model!r:.200} does not exist; served here: {served!r}", param="model", code="model_not_found"
        )


class DrainingError(DovetailError):
    """The server is about to stop and takes no more requests."""


_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
_UNAVAILABLE: dict[type[DovetailError], str] = {
    QueueFullError: "queue_full",
    DrainingError: "draining",
    EngineDeadError: "engine_dead",
}


def status_of(error: BaseException) -> int:
    """The HTTP status that an error stands for."""
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, UnknownModelError):
        return 404
    if isinstance(error, RequestError):
        return 400
    return 503 if isinstance(error, tuple(_UNAVAILABLE)) else 500


def body_of(error: BaseException, openai: bool) -> dict[str, Any]:
    """The JSON of an error. What is no ``DovetailError`` shows no details."""
    status = status_of(error)
    message = error.detail if isinstance(error, HTTPException) else str(error)
    if not isinstance(error, DovetailError | HTTPException):
        message = "internal error; the server's log has the details"
    if not openai:
        return {"error": {"message": message}}
    param = error.param if isinstance(error, RequestError) else None
    kind = "invalid_request_error" if status < 500 else "service_unavailable" if status == 503 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": _code_of(error, status)}}


def _code_of(error: BaseException, status: int) -> str | None:
    if isinstance(error, RequestError):
        return error.code
    return next((code for kind, code in _UNAVAILABLE.items() if isinstance(error, kind)), _CODES.get(status))


def is_openai(path: str) -> bool:
    """True for the routes that speak OpenAI's format."""
    return path.startswith("/v1")


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    status = status_of(error)
    if isinstance(error, HTTPException) and status in (404, 405):
        error.detail = f"there is no {request.method} {request.url.path}; /docs lists what there is"
    headers = dict(getattr(error, "headers", None) or {})
    if status == 503:
        headers["retry-after"] = "1"
    content = msgspec.json.encode(body_of(error, is_openai(request.url.path)))
    return Response(content, status, headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of every route."""
    for kind in (DovetailError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _answer)
