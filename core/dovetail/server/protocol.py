"""Implement HTTP/1.1 with uvicorn's protocol and a limit on the size of headers and trailers."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 256 * 1024
"""The largest size of a request line with headers, or of trailers, in bytes. The parser alone would keep any amount."""


class BoundedProtocol(HttpToolsProtocol):
    """Handle one connection, and close it with status 400 if its headers exceed ``MAX_HEAD``."""

    _waiting = 0
    """Bytes received since the parser last reached the end of the headers or a part of a body."""

    def data_received(self, data: bytes) -> None:
        """See uvicorn's protocol. Counts the bytes that are not part of a body."""
        self._waiting += len(data)
        super().data_received(data)
        if self._waiting > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")

    def on_headers_complete(self) -> None:
        """See uvicorn's protocol. Resets the count."""
        self._waiting = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See uvicorn's protocol. Resets the count."""
        self._waiting = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See uvicorn's protocol. Resets the count."""
        self._waiting = 0
        super().on_message_complete()
