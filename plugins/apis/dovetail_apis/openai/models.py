"""Handle GET /v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.responses import json_response
from dovetail.interfaces.api import AdapterCard, ApiHost


async def models(host: ApiHost, request: Request) -> Response:
    """Return the served model as a list, once under each of its names, and its adapters, whose ``parent`` is the model."""
    cards = [_card(host, name) for name in host.config.model.names]
    return json_response({"object": "list", "data": [*cards, *(_adapter(host, card) for card in host.adapters())]})


async def model(host: ApiHost, request: Request) -> Response:
    """Return the served model by one of its names, or one of its adapters."""
    name = request.path_params["name"]
    host.check_model(name)
    if not host.config.model.is_served(name):
        return json_response(next(_adapter(host, card) for card in host.adapters() if card.name == name))
    return json_response(_card(host, name))


def _adapter(host: ApiHost, card: AdapterCard) -> dict[str, Any]:
    own = {"created": card.created, "root": card.directory, "parent": host.config.model.name}
    return {**_card(host, card.name), **own}


def _card(host: ApiHost, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": host.created,
        "owned_by": "dovetail",
        "root": host.config.model.path,
        "max_model_len": host.context_len,
    }
