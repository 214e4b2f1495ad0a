"""Define the query parameters of GET requests, and return lists by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from dovetail.api.body import QueryModel
from dovetail.errors import RequestError
from dovetail_apis.responses.items import ItemDict


class GetQuery(QueryModel):
    """Describe the query of GET /v1/responses/{response_id}."""

    stream: bool = False
    starting_after: int = Field(
        -1, ge=-1, description="Sequence number of the last event that the client has received."
    )

    ignored = frozenset(["include", "include[]", "include_obfuscation"])


class ItemsQuery(QueryModel):
    """Describe the query of GET /v1/responses/{response_id}/input_items."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = Field(None, description="Begin after the item with this id.")

    ignored = frozenset(["include", "include[]"])


def page_of(items: Sequence[ItemDict], query: ItemsQuery) -> dict[str, Any]:
    """Return one page. Raises ``RequestError`` if ``after`` is not the id of an item."""
    ordered = list(items) if query.order == "asc" else list(reversed(items))
    if query.after is not None:
        ids = [item["id"] for item in ordered]
        if query.after not in ids:
            raise RequestError(f"after is {query.after!r:.80}, which is not the id of an item", param="after")
        ordered = ordered[ids.index(query.after) + 1 :]
    page = ordered[: query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > len(page),
    }
