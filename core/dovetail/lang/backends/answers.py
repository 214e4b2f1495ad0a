"""What servers answer over HTTP: the lines of a stream, what an error says, and which error of this house a refusal is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dovetail.errors import DovetailError, EngineError, QueueFullError, RequestError

if TYPE_CHECKING:
    import httpx

_BUSY = (429, 503, 529)


def refusal(status: int, message: str) -> DovetailError:
    """An answer that is no success, as an error to raise: 429, 503 and 529 say that the server is busy (``QueueFullError``)."""
    if status in _BUSY:
        return QueueFullError(message)
    return RequestError(message) if status < 500 else EngineError(message)


def error_text(body: bytes) -> str:
    """What the body of such an answer says: its error's message; JSON without one as a whole, other text its
    beginning."""
    try:
        return message_of(json.loads(body))
    except ValueError:
        return body.decode("utf-8", "replace")[:500]


def message_of(answer: object) -> str:
    """The message of an error as OpenAI's API and those like it write it, decoded: ``{"error": {"message": ...}}``."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def lines_of(response: httpx.Response) -> Iterator[bytes]:
    """The lines of a stream of events. ``iter_lines`` would end them at U+2028 and the like too, which JSON may contain."""
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
