"""HTTP/1.1 as uvicorn speaks it, with a bound on what nobody has asked for."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 256 * 1024
"""Bytes that a request line, headers or trailers may have; the parser would keep them all, whoever sends them."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. It is closed, with status 400, where headers have no end."""

    _waiting = 0
    """Bytes since the parser last came to the end of the headers, or to a piece of a body."""

    def data_received(self, data: bytes) -> None:
        """As uvicorn's."""
        self._waiting += len(data)
        super().data_received(data)
        if self._waiting > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")

    def on_headers_complete(self) -> None:
        """As uvicorn's."""
        self._waiting = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """As uvicorn's."""
        self._waiting = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """As uvicorn's."""
        self._waiting = 0
        super().on_message_complete()
