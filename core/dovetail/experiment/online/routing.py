"""Choose the arm of a request: derive a key from the HTTP request, and draw an arm that depends on nothing but the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "header:"
_MAX_KEY_LENGTH = 128


@dataclass(slots=True)
class RoutedRequest:
    """Hold the HTTP request that is being answered: its ASGI scope and, if the key is read from the body, the parts of the body
    that have been received."""

    scope: Scope
    body: list[bytes] = field(default_factory=list)


class _WithUser(msgspec.Struct):
    user: str | None = None


_current: ContextVar[RoutedRequest | None] = ContextVar("routed_request", default=None)
_user = msgspec.json.Decoder(_WithUser)


class RememberRequest:
    """Make the current HTTP request available to ``request_key``, as ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, source: str) -> None:
        """``source`` is ``experiment.key``."""
        self._app = app
        self._keeps_body = source == "user"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = RoutedRequest(scope)
        token = _current.set(request)

        async def kept() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                request.body.append(message.get("body", b""))
            return message

        try:
            await self._app(scope, kept if self._keeps_body else receive, send)
        finally:
            _current.reset(token)


def request_key(source: str) -> str:
    """Return the key by which the current request is assigned to an arm: the value of ``source`` in the request. If the request
    has no such value, the key is the client's address; if there is no address either, it is an empty string."""
    request = _current.get()
    if request is None:
        return ""
    found = None
    if source == "user":
        found = _user_of(request)
    elif source.startswith(_HEADER):
        found = _header(request.scope, source.removeprefix(_HEADER))
    if found:
        return _short(f"{source}={found}")
    client = request.scope.get("client")
    return f"address={client[0]}" if client else ""


def pick(key: str, weights: Mapping[str, float]) -> str:
    """Return one of the names whose weight is above 0, with probabilities proportional to the weights. The same key gives the
    same name in any process and on any machine.

    The function uses weighted rendezvous hashing (an exponential race): if a name is removed, its keys are distributed among the
    other names, and all other keys keep theirs.
    """
    return min(
        (name for name, weight in weights.items() if weight > 0), key=lambda name: _time(key, name, weights[name])
    )


def uniform(text: str) -> float:
    """Return a number in (0, 1) that depends on ``text`` alone."""
    return (int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) + 0.5) / 2**64


def _time(key: str, name: str, weight: float) -> float:
    return -math.log(uniform(f"{name}\0{key}")) / weight


def _short(key: str) -> str:
    """Replace a long key by its hash: keys are kept in memory, and clients choose their length."""
    return key if len(key) <= _MAX_KEY_LENGTH else blake2b(key.encode("utf-8", "surrogatepass")).hexdigest()


def _user_of(request: RoutedRequest) -> str | None:
    try:
        return _user.decode(b"".join(request.body)).user
    except msgspec.DecodeError:
        return None  # not JSON, or not an object: the route that reads the body refuses it


def _header(scope: Scope, name: str) -> str | None:
    expected = name.lower().encode("latin-1")
    return next((value.decode("latin-1") for header, value in scope["headers"] if header == expected), None)
