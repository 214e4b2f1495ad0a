"""What is asked for in the query of a GET, and lists by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from dovetail.api.body import QueryModel
from dovetail.errors import RequestError
from dovetail_apis.responses.items import ItemDict


class GetQuery(QueryModel):
    """GET /v1/responses/{response_id}."""

    stream: bool = False
    starting_after: int = Field(-1, ge=-1, description="The number of the last event that is known already.")

    ignored = frozenset(["include", "include[]", "include_obfuscation"])


class ItemsQuery(QueryModel):
    """GET /v1/responses/{response_id}/input_items."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = Field(None, description="Begin behind the item with this id.")

    ignored = frozenset(["include", "include[]"])


def page_of(items: Sequence[ItemDict], query: ItemsQuery) -> dict[str, Any]:
    """One page. Raises ``RequestError`` where ``after`` is none of the items."""
    ordered = list(items) if query.order == "asc" else list(reversed(items))
    if query.after is not None:
        ids = [item["id"] for item in ordered]
        if query.after not in ids:
            raise RequestError(f"after is {query.after!r:.80}, which is none of the items", param="after")
        ordered = ordered[ids.index(query.after) + 1 :]
    page = ordered[: query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > len(page),
    }
