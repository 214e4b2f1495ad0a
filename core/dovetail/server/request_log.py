"""Write one line to the log for each request that has ended. The line has no text of prompts or outputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from dovetail.api.problems import status_of

if TYPE_CHECKING:
    from dovetail.interfaces.api import Choice, Usage
    from dovetail.server.metrics import RequestMetrics

logger = logging.getLogger("dovetail.requests")

ROUTE: ContextVar[str] = ContextVar("route", default="-")
"""The path of the route that handles the current request."""

_PROBES = ("/health_generate",)
_CLIENT_LEFT = 499


class EndedRequest(Protocol):
    """Describe what the log reads of ``outputs.RequestOutputs``."""

    @property
    def rid(self) -> str: ...
    @property
    def error(self) -> BaseException | None: ...
    @property
    def choices(self) -> Sequence[Choice]: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def unread(self) -> int: ...
    @property
    def elapsed(self) -> float: ...
    @property
    def finished(self) -> bool: ...


def log_request(tenant: str, outputs: EndedRequest, metrics: RequestMetrics) -> None:
    """Log the request whose outputs were just closed. Probes are left out."""
    route = ROUTE.get()
    if route in _PROBES or not logger.isEnabledFor(logging.INFO):
        return
    usage, ttft = outputs.usage, metrics.ttft
    logger.info(
        "%s tenant=%s route=%s prompt=%d cached=%d completion=%d queue=%.3f ttft=%s total=%.3f status=%d finish=%s",
        _shown(outputs.rid),
        tenant or "-",
        route,
        usage.prompt,
        usage.cached,
        usage.completion + outputs.unread,
        metrics.queue_seconds,
        "-" if ttft is None else f"{ttft:.3f}",
        outputs.elapsed,
        *_end(outputs),
    )


def _end(outputs: EndedRequest) -> tuple[int, str]:
    """Return the status of the answer, and how the outputs have ended."""
    if outputs.error is not None:
        return status_of(outputs.error), type(outputs.error).__name__
    if not outputs.finished:
        return _CLIENT_LEFT, "disconnect"
    return 200, ",".join(dict.fromkeys(c.finish.kind.value for c in outputs.choices if c.finish is not None)) or "-"


def _shown(rid: str) -> str:
    """Return the id of a request, which its client may have chosen, without line breaks and blanks."""
    return rid if rid.isprintable() and " " not in rid else repr(rid)
