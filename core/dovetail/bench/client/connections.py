"""Keep HTTP connections that do little work per token: one callback reads, timestamps and forwards a chunk of a stream.

A general client (httpx) spends 0.1 ms of CPU on each token of a stream, and more with every connection. At the token
rates of a GPU, the client would be what is measured. This client takes a sixth of that time or less, for any number of
connections.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

Sink = Callable[[bytes], None]


class Reply(NamedTuple):
    """Hold the status of a reply, and its body unless the status was 200 and the body went to the sink."""

    status: int
    body: bytes


class ConnectionPool:
    """Keep connections to one server, as many as there are concurrent requests. Idle connections are reused."""

    def __init__(self, url: str, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        """End a request after ``timeout`` seconds without a byte; send ``headers`` with each request."""
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._timeout = timeout
        self._idle: list[_Connection] = []
        more = {"host": parts.netloc.rpartition("@")[2], "content-type": "application/json", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in more.items())

    async def post(self, path: str, body: bytes, sink: Sink) -> Reply:
        """Post ``body``; the body of a reply with status 200 goes to ``sink`` as it arrives.

        Raises ``OSError`` (including ``TimeoutError``), ``ssl.SSLError``, and any exception that ``sink`` raises.
        """
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                try:
                    return await self._exchange(connection, request, sink)
                except _Stale:  # the server had closed it in the meantime
                    continue
        return await self._exchange(await self._connect(), request, sink)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self._tls else None
        making = asyncio.get_running_loop().create_connection(_Connection, self._host, self._port, ssl=context)
        try:
            return (await asyncio.wait_for(making, self._timeout))[1]
        except TimeoutError:
            raise TimeoutError(f"no connection within {self._timeout:g} s") from None

    async def _exchange(self, connection: _Connection, request: bytes, sink: Sink) -> Reply:
        try:
            reply = await connection.exchange(request, sink, self._timeout)
        except BaseException:
            connection.close()
            raise
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return reply


class _Stale(ConnectionError):
    """Raised when a reused connection ended without a byte of an answer."""


class _Connection(asyncio.Protocol):
    """Handle one request at a time. ``usable`` is True while another request may follow."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Reply] | None = None
        self._used = False
        self.usable = True

    async def exchange(self, request: bytes, sink: Sink, timeout: float) -> Reply:
        """Send a request and wait for the end of its reply."""
        assert self._transport is not None
        assert self._done is None
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self._parts, self._refusal = sink, list[bytes](), list[bytes]()
        self._begun = self._measured = self._complete = False
        self._done = self._loop.create_future()
        self._timeout, self._last = timeout, self._loop.time()
        self._timer = self._loop.call_later(timeout, self._check)
        try:
            self._transport.write(request)
            return await self._done
        finally:
            self._timer.cancel()
            self._used, self._done = True, None

    def close(self) -> None:
        """Abort the connection."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def _check(self) -> None:
        quiet = self._loop.time() - self._last
        if quiet >= self._timeout:
            self._fail(TimeoutError(f"no byte arrived for {self._timeout:g} s"))
        else:
            self._timer = self._loop.call_later(self._timeout - quiet, self._check)

    def _fail(self, error: BaseException) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # -- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the new connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not one by its type

    def data_received(self, data: bytes) -> None:
        """Parse the data and forward its part of the body at once, in one piece."""
        if self._done is None or self._done.done():
            self.close()  # no request is waiting for it
            return
        self._last = self._loop.time()
        try:
            self._parser.feed_data(data)
            if self._parts:
                parts, self._parts = self._parts, []
                self._sink(parts[0] if len(parts) == 1 else b"".join(parts))
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the server does not answer in HTTP: {error}"))
        except Exception as error:  # from the sink, for the waiting request
            self._fail(error)
        else:
            if self._complete:
                self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection, which is also the end of a body without an announced length."""
        self.usable = False
        if self._done is None or self._done.done():
            return
        if self._begun and not self._measured and exc is None:
            self._end()
        elif self._used and not self._begun:
            self._fail(_Stale())
        else:
            why = exc or "before it answered" if not self._begun else "before its answer was complete"
            self._fail(ConnectionError(f"the server closed the connection: {why}"))

    # -- httptools ---------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the headers announce the length of the body."""
        self._measured = self._measured or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """Note that the status is known."""
        self._begun = True

    def on_body(self, body: bytes) -> None:
        """Collect a piece of the body."""
        (self._parts if self._parser.get_status_code() == 200 else self._refusal).append(body)

    def on_message_complete(self) -> None:
        """Note that the message is complete. Only now does the parser know whether another message may follow."""
        self._complete = True
        self.usable = self.usable and self._parser.should_keep_alive()

    def _end(self) -> None:
        assert self._done is not None
        self._done.set_result(Reply(self._parser.get_status_code(), b"".join(self._refusal)))
