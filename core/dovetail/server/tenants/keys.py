"""Identify the sender of a request by the API key in its headers."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from dovetail.config.tenants import KeyEntry, KeyFile, key_digest
from dovetail.errors import AuthenticationError

PREFIX = "dvt-"
_MAX_KEY_BYTES = 1024
_HOW_TO_SEND = "send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"

Headers = Iterable[tuple[bytes, bytes]]
"""Pairs of a lower-case name and a value, as in an ASGI scope."""


def new_key() -> str:
    """Return a new key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class Caller:
    """Describe the owner of a key. ``key`` identifies the key in logs."""

    name: str
    admin: bool
    key: str
    expires: datetime | None = None


class KeyRing:
    """Look up the owners of the keys of one key file.

    The time that a refusal takes reveals nothing about the keys that exist. A key is looked up by a digest under a secret that
    each process draws anew, so that a client cannot choose how many bytes a comparison in the table shares, and the entry found
    is compared in constant time.
    """

    def __init__(self, file: KeyFile, now: Callable[[], float] = time.time) -> None:
        """``now`` returns the time of day, for keys that expire."""
        self._now = now
        self._secret = secrets.token_bytes(32)
        self._found = {self._place(digest): (digest.encode(), caller) for digest, caller in _callers(file)}

    def caller(self, headers: Headers) -> Caller:
        """Return the sender of a request. Raises ``AuthenticationError``."""
        digest = key_digest(_given_key(headers))
        expected, caller = self._found.get(self._place(digest), (b"", None))
        if caller is None or not hmac.compare_digest(expected, digest.encode()):
            raise AuthenticationError(
                f"the API key is not known to this server; {_HOW_TO_SEND}, and ask the operator of this server for a key"
            )
        if caller.expires is not None and caller.expires.timestamp() <= self._now():
            raise AuthenticationError(
                f"the API key expired at {caller.expires.isoformat()}; ask the operator of this server for a new one"
            )
        return caller

    def _place(self, digest: str) -> bytes:
        return hmac.digest(self._secret, digest.encode(), "sha256")


def _callers(file: KeyFile) -> Iterator[tuple[str, Caller]]:
    for admin, owners in ((False, file.tenants), (True, file.admins)):
        for name, owner in owners.items():
            for entry in owner.keys:
                yield entry.hash, _caller(name, admin, entry)


def _caller(name: str, admin: bool, entry: KeyEntry) -> Caller:
    return Caller(name, admin, entry.id, entry.expires)


def _given_key(headers: Headers) -> bytes:
    """Return the only key of a request. Keys in the query are not read, because URLs end up in logs. Raises
    ``AuthenticationError``."""
    keys: set[bytes] = set()
    scheme = b""
    for name, value in headers:
        if name == b"x-api-key":
            keys.add(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                keys.add(key.strip())
    if not keys:
        given = f"the Authorization header's scheme is {_shown(scheme)}" if scheme else "no API key was given"
        raise AuthenticationError(f"{given}; this server needs a key: {_HOW_TO_SEND}")
    if len(keys) > 1:  # two proxies might read different keys
        raise AuthenticationError(f"the request has {len(keys)} different API keys; send one")
    (key,) = keys
    if not key:
        raise AuthenticationError(f"the API key is empty; {_HOW_TO_SEND}")
    if len(key) > _MAX_KEY_BYTES:
        raise AuthenticationError(f"the API key has {len(key)} bytes; allowed: at most {_MAX_KEY_BYTES}")
    return key


def _shown(scheme: bytes) -> str:
    """Return the scheme for an error message. Text that is not a word may be a key without a scheme and is not shown."""
    word = scheme.decode("ascii", "replace")
    return repr(word) if word.isalpha() and len(word) <= 16 else "not a known one"
