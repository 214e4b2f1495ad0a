"""Give every HTTP request its scope: who sent it, and what it holds until it is answered."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.api.offload import Intake, RequestScope, entered
from dovetail.server.connections import place_of


class RequestScopes:
    """Enter a ``RequestScope`` for each request, as ASGI middleware. Until access control finds a tenant, the client's
    address takes its place."""

    def __init__(self, app: ASGIApp, intake: Intake) -> None:
        self._app = app
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        client = scope.get("client")
        with entered(RequestScope(self._intake, "@" + (place_of(client[0]) if client else ""))):
            await self._app(scope, receive, send)
