"""Repeat the id that a client gives its request in the header of the response."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_ALLOWED = re.compile(rb"[\x21-\x7e]{1,256}")


class RequestIds:
    """Wrap an application: the response to a request with the header ``x-request-id`` has this header too. Values that are
    longer than 256 characters, or have other characters than visible ones of ASCII, are not repeated."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        given = next((value for name, value in scope.get("headers", ()) if name == HEADER), b"")
        if scope["type"] != "http" or not _ALLOWED.fullmatch(given):
            await self._app(scope, receive, send)
            return

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, given)]}
            await send(message)

        await self._app(scope, receive, with_id)
