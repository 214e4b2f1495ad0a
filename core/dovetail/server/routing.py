"""Which arm answers a request: a key of the request, and a draw that the key decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "header:"
_LONGEST = 128


@dataclass(slots=True)
class Asked:
    """The HTTP request that is being answered: its ASGI scope, and its body as far as it has been read, where it counts."""

    scope: Scope
    body: list[bytes] = field(default_factory=list)


class _WithUser(msgspec.Struct):
    user: str | None = None


_asked: ContextVar[Asked | None] = ContextVar("asked", default=None)
_user = msgspec.json.Decoder(_WithUser)


class RememberRequest:
    """ASGI middleware: lets ``request_key`` see the request, whatever route answers it."""

    def __init__(self, app: ASGIApp, source: str) -> None:
        """``source`` is ``experiment.key``."""
        self._app = app
        self._keeps_body = source == "user"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Asked(scope)
        token = _asked.set(asked)

        async def kept() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                asked.body.append(message.get("body", b""))
            return message

        try:
            await self._app(scope, kept if self._keeps_body else receive, send)
        finally:
            _asked.reset(token)


def request_key(source: str) -> str:
    """What sticks to an arm: the value of ``source`` in the request that is being answered; where it has none, the client's
    address; where there is neither, an empty text."""
    asked = _asked.get()
    if asked is None:
        return ""
    found = None
    if source == "user":
        found = _user_of(asked)
    elif source.startswith(_HEADER):
        found = _header(asked.scope, source.removeprefix(_HEADER))
    if found:
        return _short(f"{source}={found}")
    client = asked.scope.get("client")
    return f"address={client[0]}" if client else ""


def pick(key: str, weights: Mapping[str, float]) -> str:
    """One of the names with a weight above 0, with chances as the weights; the same for the same key, in any process and on
    any machine.

    Rendezvous hashing with weights (an exponential race): a name that leaves gives its keys to the others, and all other keys
    stay where they were.
    """
    return min(
        (name for name, weight in weights.items() if weight > 0), key=lambda name: _time(key, name, weights[name])
    )


def uniform(text: str) -> float:
    """A number in (0, 1) that ``text`` decides."""
    return (int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) + 0.5) / 2**64


def _time(key: str, name: str, weight: float) -> float:
    return -math.log(uniform(f"{name}\0{key}")) / weight


def _short(key: str) -> str:
    """Keys are remembered, and clients choose how long they are."""
    return key if len(key) <= _LONGEST else blake2b(key.encode("utf-8", "surrogatepass")).hexdigest()


def _user_of(asked: Asked) -> str | None:
    try:
        return _user.decode(b"".join(asked.body)).user
    except msgspec.DecodeError:
        return None  # no text, or no object: another field of the request will be told to be wrong


def _header(scope: Scope, name: str) -> str | None:
    wanted = name.lower().encode("latin-1")
    return next((value.decode("latin-1") for header, value in scope["headers"] if header == wanted), None)
