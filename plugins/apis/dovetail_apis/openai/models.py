"""Handle GET /v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.responses import json_response
from dovetail.interfaces.api import ApiHost


async def models(host: ApiHost, request: Request) -> Response:
    """Return the served model as a list."""
    return json_response({"object": "list", "data": [_card(host)]})


async def model(host: ApiHost, request: Request) -> Response:
    """Return the served model by its name."""
    host.check_model(request.path_params["name"])
    return json_response(_card(host))


def _card(host: ApiHost) -> dict[str, Any]:
    return {
        "id": host.model_name,
        "object": "model",
        "created": host.created,
        "owned_by": "dovetail",
        "root": host.config.model.path,
        "max_model_len": host.context_len,
    }
