"""Implement HTTP/1.1 with uvicorn's protocol and bounds on what a connection may hold before its request is known."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from dovetail.server.connections import Connection, ConnectionGuard

MAX_PIPELINED = 16
"""The largest number of requests that may wait on a connection while an earlier one is answered. The parser cannot stop
within a packet, so the connection is closed once those are answered."""


class GatedFlow(FlowControl):
    """Keep reading paused while a pipelined request waits. uvicorn would resume it for the request before."""

    gated = False

    def resume_reading(self) -> None:
        """Resume reading unless a pipelined request waits."""
        if not self.gated:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol, Connection):
    """Handle one connection under the limits of a ``ConnectionGuard``, which closes it if it is late or in the way.

    The guard is the attribute ``guard`` of a subclass (``bounded_protocol``). Bytes of headers and trailers are counted
    until the parser has read them. While one request is answered, at most ``MAX_PIPELINED`` further ones are parsed, and
    reading is paused until they are answered.
    """

    guard: ConnectionGuard

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Connection.__init__(self)
        self._head_bytes = 0
        self._refused = False
        self._running: RequestResponseCycle | None = None  # may be before ``cycle``, the one that was parsed last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See uvicorn's protocol. Reports the connection to the guard, which may close it."""
        super().connection_made(transport)
        self.flow = GatedFlow(transport)
        self.address = self.client[0] if self.client else ""
        self.guard.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See uvicorn's protocol. Requests that wait in the pipeline are dropped, and the one that runs learns that its client has
        gone, even if another request was parsed after it."""
        self.guard.closed(self)
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See uvicorn's protocol. Counts the bytes that are not part of a body."""
        if self._refused or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self.guard.began(self)
        self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)  # pyright: ignore[reportOptionalMemberAccess]
        except httptools.HttpParserUpgrade:
            pass  # the request is answered over HTTP/1.1, as RFC 9110, section 7.8, allows
        except httptools.HttpParserError:
            self._refuse_data()
            return
        if self._head_bytes > self.guard.head_bytes:
            self._refuse_head()

    def _refuse_head(self) -> None:
        self.guard.shed("headers too large", self)
        self.refuse(431, f"The headers are larger than {self.guard.head_bytes >> 10} KiB.")

    def _refuse_data(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.guard.shed("too many pipelined requests", self)
            self._refused = True  # what waits is answered, then the connection is closed
            self.pipeline[0][0].keep_alive = False
        elif not self._refused:
            self.refuse(400, "Invalid HTTP request received.")

    def refuse(self, status: int, message: str) -> None:
        """Close the connection. Send an answer before, unless ``status`` is 0 or another answer has begun."""
        self._refused = True
        if self.transport.is_closing():
            return
        if status and not self.is_answering:
            content = message.encode()
            head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(content) + content)
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once, and drop what was not sent."""
        self._refused = True
        self.transport.abort()

    @property
    def unread_descriptor(self) -> int | None:
        """Return the file descriptor if reading is paused because requests wait."""
        assert isinstance(self.flow, GatedFlow)
        return self.transport.get_extra_info("socket").fileno() if self.flow.gated else None

    @property
    def unsent(self) -> int:
        """Return the number of bytes that the client has not taken yet."""
        return self.transport.get_write_buffer_size()

    def on_message_begin(self) -> None:
        """See uvicorn's protocol. Raises, which stops the parser, if too many requests wait."""
        if self._refused or len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests are pipelined")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """See uvicorn's protocol. A request on a connection beyond the limit is answered by the guard. Raises, which stops
        the parser, if the headers are too large although they arrived together."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.guard.head_bytes:
            self._refuse_head()
            raise ValueError("the headers are too large")
        self._head_bytes = 0
        before = self.app
        try:
            self.app = cast("Any", self.guard.app_for(self, self.url) or before)
            super().on_headers_complete()
        finally:
            self.app = before
        if self.pipeline:
            self._gate(True)

    def on_body(self, body: bytes) -> None:
        """See uvicorn's protocol. Resets the count."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See uvicorn's protocol. Reports the request to the guard."""
        self._head_bytes = 0
        super().on_message_complete()
        if self.is_answering:
            self.guard.received(self)
        else:
            self.guard.answered(self)  # the rest of a body that no handler has read

    def on_response_complete(self) -> None:
        """See uvicorn's protocol. If the body of the request is incomplete, the guard waits for its end for a short time."""
        reading = self.cycle is not None and self.cycle.response_complete and self.cycle.more_body
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if not self.pipeline:
            self._gate(False)
        if self.is_answering:
            return
        if reading:
            self._unset_keepalive_if_required()
            self.flow.resume_reading()
            self.guard.lingers(self)
        else:
            self.guard.answered(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def is_answering(self) -> bool:
        """Return True while a request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _gate(self, gated: bool) -> None:
        assert isinstance(self.flow, GatedFlow)
        self.flow.gated = gated
        if gated:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()


def bounded_protocol(guard: ConnectionGuard) -> type[BoundedProtocol]:
    """Return the protocol for the connections of ``guard``."""
    return type("GuardedProtocol", (BoundedProtocol,), {"guard": guard})
