"""Who may ask what: stands before every route."""

from __future__ import annotations

from starlette.requests import Request

from dovetail.errors import PermissionDeniedError
from dovetail.interfaces.api import ApiHost
from dovetail.server.service import Service
from dovetail.server.tenants.host import TenantHost
from dovetail.server.tenants.tenancy import Tenancy


class Gate:
    """Without keys everybody may ask everything, except pages of other origins: any page that a user opens could reach a server
    on the user's own machine, and a request that changes something does so even if its answer is never shown to the page."""

    def __init__(self, service: Service, tenancy: Tenancy | None) -> None:
        self._service = service
        self._tenancy = tenancy

    def host(self, request: Request) -> ApiHost:
        """What the request's sender sees. A request that is sent is counted before its body is read. Raises ``AccessError`` or
        ``RateLimitError``."""
        if self._tenancy is None:
            self._check_origin(request)
            return self._service
        caller = self._tenancy.caller(request.scope["headers"])
        sent = request.method == "POST"
        if sent:
            self._tenancy.tenants[caller.name].arrive()
        return TenantHost(self._service, self._tenancy, caller, request.scope["path"], counted=sent)

    def check_admin(self, request: Request) -> None:
        """Raises ``AccessError`` where the sender is no admin."""
        if self._tenancy is None:
            self._check_origin(request)
        else:
            self._tenancy.admin(request.scope["headers"])

    def _check_origin(self, request: Request) -> None:
        origin = request.headers.get("origin")
        if origin is None or origin.partition("://")[2] == request.headers.get("host"):
            return
        allowed = self._service.config.server.cors_origins
        if not ({"*", origin} & {*allowed}):
            raise PermissionDeniedError(
                f"a page of {origin!r:.200} may not call this server; to allow it, add it to server.cors_origins"
            )
