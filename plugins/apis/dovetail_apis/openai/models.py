"""Handle GET /v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.responses import json_response
from dovetail.interfaces.api import ApiHost


async def models(host: ApiHost, request: Request) -> Response:
    """Return the served model as a list, once under each of its names."""
    return json_response({"object": "list", "data": [_card(host, name) for name in host.config.model.names]})


async def model(host: ApiHost, request: Request) -> Response:
    """Return the served model by one of its names."""
    name = request.path_params["name"]
    host.check_model(name)
    return json_response(_card(host, name))


def _card(host: ApiHost, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": host.created,
        "owned_by": "dovetail",
        "root": host.config.model.path,
        "max_model_len": host.context_len,
    }
