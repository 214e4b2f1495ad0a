"""Turn errors into ``ApiProblem``, which each API formats in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlette.exceptions import HTTPException

from dovetail.errors import (
    AuthenticationError,
    DovetailError,
    EngineDeadError,
    PermissionDeniedError,
    QueueFullError,
    RateLimitError,
    RequestError,
    TimeLimitError,
)
from dovetail.interfaces.api import ApiProblem


class NotFoundError(RequestError):
    """Raised when the request names something that does not exist (404)."""


class UnknownModelError(NotFoundError):
    """Raised when the request names a model that is not served."""

    def __init__(self, model: str, served: Sequence[str], aliases: Iterable[str] = (), adapters: int = 0) -> None:
        """``served`` are the names of the served model, ``aliases`` patterns of further names that requests may give, and
        ``adapters`` is the number of adapters."""
        names = [*map(repr, served), *(f"{pattern!r} (alias)" for pattern in aliases)]
        if adapters:
            names.append(f"{adapters} adapters (GET /v1/models)")
        super().__init__(
            f"the model {model!r:.200} does not exist; this server serves {', '.join(names)}",
            param="model",
            code="model_not_found",
        )


class DrainingError(DovetailError):
    """Raised when the server is about to stop and accepts no more requests."""


_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}
_KINDS: dict[type[DovetailError], tuple[int, str]] = {
    AuthenticationError: (401, "invalid_api_key"),
    PermissionDeniedError: (403, "permission_denied"),
    RateLimitError: (429, "rate_limit_exceeded"),
    QueueFullError: (503, "queue_full"),
    DrainingError: (503, "draining"),
    EngineDeadError: (503, "engine_dead"),
    TimeLimitError: (504, "time_limit_exceeded"),
}
"""Map errors that the content of the request does not cause to their status and code."""


def problem_of(error: BaseException) -> ApiProblem:
    """Return the problem that the client is sent for an error. Errors other than ``DovetailError`` and
    ``HTTPException`` show no details."""
    status = status_of(error)
    message = error.detail if isinstance(error, HTTPException) else str(error)
    if not isinstance(error, DovetailError | HTTPException):
        message = "internal error; the server's log has the details"
    param = error.param if isinstance(error, RequestError) else None
    return ApiProblem(status, message, _code_of(error, status), param, _retry_after(error, status))


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, NotFoundError):
        return 404
    if isinstance(error, RequestError):
        return 400
    return next((status for kind, (status, _) in _KINDS.items() if isinstance(error, kind)), 500)


def _code_of(error: BaseException, status: int) -> str | None:
    if isinstance(error, RequestError):
        return error.code
    return next((code for kind, (_, code) in _KINDS.items() if isinstance(error, kind)), _CODES.get(status))


def _retry_after(error: BaseException, status: int) -> float | None:
    if isinstance(error, RateLimitError):
        return error.retry_after
    return 1 if status == 503 else None
