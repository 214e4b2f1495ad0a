"""Decide who may call which route, before every route."""

from __future__ import annotations

import ipaddress

from starlette.requests import Request

from dovetail.api.offload import request_scope
from dovetail.errors import PermissionDeniedError
from dovetail.interfaces.api import ApiHost
from dovetail.server.service import Service
from dovetail.server.tenants.host import TenantHost
from dovetail.server.tenants.tenancy import Tenancy


class AccessControl:
    """Decide whether the sender of a request may call a route.

    Without keys every sender may call every route, except pages of other origins: any page that a user opens could reach a server
    on the user's own machine, and a request takes effect even if the page never sees the response. With DNS rebinding such a page
    has the origin of this server; therefore the ``Host`` header must be a known name.
    """

    def __init__(self, service: Service, tenancy: Tenancy | None) -> None:
        self._service = service
        self._tenancy = tenancy

    def host(self, request: Request) -> ApiHost:
        """Return the host that the sender of ``request`` may use. A POST request is counted before its body is read. Raises
        ``AccessError`` or ``RateLimitError``."""
        if self._tenancy is None:
            self._check_page(request)
            return self._service
        caller = self._tenancy.caller(request.scope["headers"])
        scope = request_scope()
        scope.tenant, scope.weight = caller.name, self._tenancy.tenants[caller.name].limits.weight
        sent = request.method == "POST"
        if sent:
            self._tenancy.tenants[caller.name].arrive()
        return TenantHost(self._service, self._tenancy, caller, request.scope["path"], counted=sent)

    def check_admin(self, request: Request) -> None:
        """Raise ``AccessError`` if the sender is not an admin."""
        if self._tenancy is None:
            self._check_page(request)
        else:
            self._tenancy.admin(request.scope["headers"])

    def _check_page(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if not self._is_known(_name_in(host)):
            raise PermissionDeniedError(
                f"this server is not known as {host!r:.200}; to call it by that name, add it to server.allowed_hosts"
            )
        origin = request.headers.get("origin")
        allowed = self._service.config.server.cors_origins
        if origin is None and request.headers.get("sec-fetch-site") == "cross-site":  # such as an image or a link
            origin = "another site"
        if origin is None or origin.partition("://")[2] == host:
            return
        if not ({"*", origin} & {*allowed}):
            raise PermissionDeniedError(
                f"a page of {origin!r:.200} may not call this server; to allow it, add it to server.cors_origins"
            )

    def _is_known(self, name: str) -> bool:
        server = self._service.config.server
        if "*" in server.allowed_hosts or (server.allow_public_without_keys and not server.allowed_hosts):
            return True
        return (
            name in ("", "localhost", server.host.lower(), *server.allowed_hosts)
            or name.endswith(".localhost")
            or _is_address(name)
        )


def _name_in(host: str) -> str:
    """Return the name in a ``Host`` header: without the port, and for an IPv6 address without the brackets."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
