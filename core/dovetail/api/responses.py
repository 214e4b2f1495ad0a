"""HTTP answers that end when their client leaves: whole ones, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.api.problems import problem_of
from dovetail.errors import DovetailError
from dovetail.interfaces.api import ApiProblem, Delta, Generation

logger = logging.getLogger("dovetail.server")

T = TypeVar("T")


class Formatter(Protocol):
    """Turns the deltas of one request into what its stream says; each method returns whole events or lines, or nothing."""

    @property
    def media_type(self) -> str:
        """Of the stream."""
        ...

    def head(self) -> bytes:
        """Before the first delta."""
        ...

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """What one engine step added."""
        ...

    def tail(self) -> bytes:
        """After the last delta."""
        ...

    def failed(self, problem: ApiProblem) -> bytes:
        """In place of what would follow: the status is sent already, so that the error must travel in the stream."""
        ...


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


SSE = "text/event-stream"
"""The media type of server-sent events (WHATWG HTML, section 9.2)."""

NDJSON = "application/x-ndjson"
"""The media type of streams that have a line of JSON for each step."""


def json_response(content: object, status: int = 200) -> Response:
    """``content`` as JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def whole(request: Request, outputs: Generation, render: Callable[[Generation], object]) -> Response:
    """Wait for the end of all outputs and answer at once. A client that leaves aborts them."""
    with outputs:
        await until_disconnect(request.receive, outputs.wait())
        return json_response(render(outputs))


async def streamed(request: Request, outputs: Generation, formatter: Formatter) -> Response:
    """Answer step by step. What fails before the first token still has its own status: nothing is sent before it."""
    try:
        first = await until_disconnect(request.receive, anext(outputs))
    except BaseException:
        outputs.close()
        raise
    return EventStream(outputs, first, formatter)


class EventStream(Response):
    """A stream with one write for each engine step. Aborts the outputs when the client leaves."""

    def __init__(self, outputs: Generation, first: Sequence[Delta], formatter: Formatter) -> None:
        self.status_code = 200
        self.media_type = formatter.media_type
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._outputs = outputs
        self._first = first
        self._formatter = formatter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI answer."""
        with self._outputs:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await until_disconnect(receive, self._pump(send))
            except ClientDisconnect:
                logger.debug("%s: the client has left", self._outputs.rid)

    async def _pump(self, send: Send) -> None:
        try:
            await _write(send, self._formatter.head() + self._formatter.deltas(self._first))
            async for deltas in self._outputs:
                await _write(send, self._formatter.deltas(deltas))
            last = self._formatter.tail()
        except Exception as error:
            if not isinstance(error, DovetailError):
                logger.exception("%s failed", self._outputs.rid)
            last = self._formatter.failed(problem_of(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _write(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. Raises ``ClientDisconnect``, with ``work`` cancelled, if the client leaves before."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
