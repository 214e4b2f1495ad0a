"""Declare the fields of a body that determine how its request is scheduled, and with which requests it shares cached
prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from pydantic import Field

from dovetail.api.body import ApiModel, CacheSalt, Int32, Session
from dovetail.errors import RequestError

ExtraKey = Annotated[str, Field(max_length=1024)] | None
"""Type of SGLang's name for a salt."""


def _namespace(salt: str, key: str | None) -> str:
    return msgspec.json.encode([salt, key]).decode() if key else salt


class PlacementFields(ApiModel):
    """Declare the priority of a request and what separates its cached prefixes from those of other requests."""

    priority: Int32 | None = Field(None, description="Requests with a larger number are admitted first.")
    cache_salt: CacheSalt | list[CacheSalt] = None
    extra_key: ExtraKey | list[ExtraKey] = Field(
        None, description="SGLang's name for a salt. With both, requests share prefixes if both are the same."
    )

    @property
    def namespace(self) -> str:
        """Return the namespace of the request's cached prefixes. Raises ``RequestError`` if prompts have namespaces of
        their own and there are several."""
        return self.namespaces(1)[0]

    def namespaces(self, count: int) -> list[str]:
        """Return the namespace of each of ``count`` prompts. Raises ``RequestError`` for a list of another length."""
        salt, key = self.cache_salt, self.extra_key
        if not isinstance(salt, list) and not isinstance(key, list):
            return [_namespace(salt or "", key)] * count
        salts, keys = (self._each(name, count) for name in ("cache_salt", "extra_key"))
        return [_namespace(salt or "", key) for salt, key in zip(salts, keys, strict=True)]

    def _each(self, name: str, count: int) -> Sequence[str | None]:
        given: str | list[str | None] | None = getattr(self, name)
        if not isinstance(given, list):
            return [given] * count
        if len(given) != count:
            raise RequestError(f"{name} has {len(given)} entries for {count} prompts", param=name)
        return given


class SessionFields(PlacementFields):
    """Declare the conversation to which a request belongs, too."""

    session: Session = None
    session_id: Session = None

    @property
    def session_name(self) -> str:
        """Return the id of the conversation, or an empty text."""
        return self.session or self.session_id or ""
