"""Send complete and streamed HTTP responses, and abort their outputs when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.api.json_parts import encode_in_parts, encode_json
from dovetail.api.offload import INPUTS_OF_PART, offloaded, request_scope
from dovetail.api.problems import problem_of
from dovetail.errors import DovetailError
from dovetail.interfaces.api import ApiProblem, Delta, Generation

logger = logging.getLogger("dovetail.server")

T = TypeVar("T")

_PIECE = 1 << 18


class Formatter(Protocol):
    """Turn the deltas of one request into the data of its stream. Each method returns complete events or lines, or
    nothing."""

    @property
    def media_type(self) -> str:
        """Return the media type of the stream."""
        ...

    def head(self) -> bytes:
        """Return the data before the first delta."""
        ...

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return the data for the deltas of one engine step."""
        ...

    def tail(self) -> bytes:
        """Return the data after the last delta."""
        ...

    def failed(self, problem: ApiProblem) -> bytes:
        """Return the data that reports an error and ends the stream. The status has been sent, so the error is part of
        the stream."""
        ...


def event(data: bytes) -> bytes:
    """Return one server-sent event."""
    return b"data: " + data + b"\n\n"


SSE = "text/event-stream"
"""Give the media type of server-sent events (WHATWG HTML, section 9.2)."""

NDJSON = "application/x-ndjson"
"""Give the media type of streams with a line of JSON for each step."""


def json_response(content: object, status: int = 200) -> Response:
    """Return a response with ``content`` as JSON. Arrays of numpy are written as lists of their numbers."""
    return Response(encode_json(content), status, media_type="application/json")


async def whole(request: Request, outputs: Generation, render: Callable[[Generation], object]) -> Response:
    """Wait for the end of all outputs and return one response. If the client disconnects, the outputs are aborted."""
    with outputs:
        await until_disconnect(request.receive, outputs.wait())
        if request_scope().answer_bytes:
            return await offloaded(True, lambda: LargeResponse(encode_in_parts(render(outputs))))
        return await offloaded(len(outputs.choices) > INPUTS_OF_PART, lambda: json_response(render(outputs)))


class LargeResponse(Response):
    """Send JSON in pieces, as fast as the client takes it. The request counts as open until the client has taken it."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response through ASGI."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), _PIECE):
            more = start + _PIECE < len(self.body)
            piece = bytes(self.body[start : start + _PIECE])
            await send({"type": "http.response.body", "body": piece, "more_body": more})
            await asyncio.sleep(0)  # a client that reads fast would let the event loop do nothing else


async def streamed(request: Request, outputs: Generation, formatter: Formatter) -> Response:
    """Return a response that is sent in parts, one for each engine step. Nothing is sent before the first token, so an
    error before that is answered with its own status."""
    try:
        first = await until_disconnect(request.receive, anext(outputs))
    except BaseException:
        outputs.close()
        raise
    return EventStream(outputs, first, formatter)


class EventStream(Response):
    """Stream one write for each engine step, and abort the outputs when the client disconnects."""

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
        """Send the response through ASGI."""
        with self._outputs:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await until_disconnect(receive, self._send_all(send))
            except ClientDisconnect:
                logger.debug("%s: the client has disconnected", self._outputs.rid)

    async def _send_all(self, send: Send) -> None:
        try:
            large = request_scope().answer_bytes > 0
            head = self._formatter.head()  # before the first deltas: a formatter may number its events
            await _write(send, head + await offloaded(large, self._formatter.deltas, self._first))
            async for deltas in self._outputs:
                await _write(send, await offloaded(large, self._formatter.deltas, deltas))
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
    """Return the result of ``work``. If the client disconnects first, cancel ``work`` and raise
    ``ClientDisconnect``."""
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
