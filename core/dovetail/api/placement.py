"""Declare the fields of a body that determine how its request is scheduled, and with which requests it shares cached
prefixes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field

from dovetail.api.body import ApiModel, CacheSalt, Int32, Session


class PlacementFields(ApiModel):
    """Declare the priority of a request and what separates its cached prefixes from those of other requests."""

    priority: Int32 | None = Field(None, description="Requests with a larger number are admitted first.")
    cache_salt: CacheSalt = None
    extra_key: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="SGLang's name for a salt. With both, requests share prefixes if both are the same."
    )

    @property
    def namespace(self) -> str:
        """Return the namespace of the request's cached prefixes."""
        salt = self.cache_salt or ""
        return msgspec.json.encode([salt, self.extra_key]).decode() if self.extra_key else salt


class SessionFields(PlacementFields):
    """Declare the conversation to which a request belongs, too."""

    session: Session = None
    session_id: Session = None

    @property
    def session_name(self) -> str:
        """Return the id of the conversation, or an empty text."""
        return self.session or self.session_id or ""
