"""Read the HTTP responses of servers: the lines of a stream, the message of an error, and the Dovetail error for a
refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.errors import DovetailError, EngineError, QueueFullError, RequestError

if TYPE_CHECKING:
    import httpx

_BUSY_STATUSES = (429, 503, 529)


def refusal(status: int, message: str) -> DovetailError:
    """Return the error to raise for an answer without success: 429, 503 and 529 mean that the server is busy
    (``QueueFullError``)."""
    if status in _BUSY_STATUSES:
        return QueueFullError(message)
    return RequestError(message) if status < 500 else EngineError(message)


def error_text(body: bytes) -> str:
    """Return the message in the body of an error answer; for JSON without a message the whole JSON, for other text
    its beginning."""
    try:
        return message_of(json.loads(body))
    except ValueError:
        return body.decode("utf-8", "replace")[:500]


def message_of(answer: object) -> str:
    """Return the message of a decoded error in the format of OpenAI's and similar APIs: ``{"error": {"message":
    ...}}``."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def lines_of(response: httpx.Response) -> Iterator[bytes]:
    """Yield the lines of a stream of events. ``iter_lines`` would also split at U+2028 and similar characters, which
    JSON may contain."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
