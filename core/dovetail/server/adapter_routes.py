"""Answer the routes that load and unload adapters (LoRA): those of SGLang and those of vLLM."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dovetail.api.body import ApiModel, examples, parse
from dovetail.api.responses import json_response
from dovetail.server.service import Service

Directory = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class LoadAdapterRequest(ApiModel):
    """Describe the body of POST /load_lora_adapter and /v1/load_lora_adapter."""

    model_config = examples({"lora_name": "mine", "lora_path": "/adapters/mine"})

    lora_name: str = Field(description="The name by which requests select the adapter.")
    lora_path: Directory = Field(description="A directory on the server, as PEFT saves it.")
    load_inplace: bool = Field(False, description="Replace an adapter of this name (vLLM).")

    ignored = frozenset({"base_model_name", "is_3d_lora_weight"})
    refused: ClassVar = {"pinned": (False, None), "added_tokens_config": (None,), "lora_id": (None,)}
    reasons: ClassVar = {
        "pinned": "the adapter that was used least recently gives way; leave it out",
        "added_tokens_config": "adapters do not change the vocabulary; leave it out",
        "lora_id": "adapters have names; leave it out",
    }


class UnloadAdapterRequest(ApiModel):
    """Describe the body of POST /unload_lora_adapter and /v1/unload_lora_adapter."""

    model_config = examples({"lora_name": "mine"})

    lora_name: str = Field(description="The name of the adapter.")

    ignored = frozenset({"lora_int_id"})
    refused: ClassVar = {"lora_id": (None,)}
    reasons: ClassVar = {"lora_id": "adapters have names; leave it out"}


async def load_lora_adapter(service: Service, request: Request) -> Response:
    """Load an adapter while requests run (SGLang's form of the answer)."""
    await _load(service, request)
    return json_response({"success": True, "error_message": None, "loaded_adapters": _loaded(service)})


async def unload_lora_adapter(service: Service, request: Request) -> Response:
    """Unload an adapter; its requests go on (SGLang's form of the answer)."""
    await _unload(service, request)
    return json_response({"success": True, "error_message": None, "loaded_adapters": _loaded(service)})


async def v1_load_lora_adapter(service: Service, request: Request) -> Response:
    """Load an adapter while requests run (vLLM's form of the answer)."""
    return PlainTextResponse(f"Success: LoRA adapter '{await _load(service, request)}' added successfully.")


async def v1_unload_lora_adapter(service: Service, request: Request) -> Response:
    """Unload an adapter; its requests go on (vLLM's form of the answer)."""
    return PlainTextResponse(f"Success: LoRA adapter '{await _unload(service, request)}' removed successfully.")


async def _load(service: Service, request: Request) -> str:
    """Load the adapter of ``request`` and return its name."""
    body = await parse(request, LoadAdapterRequest, service.max_body)
    service.check_ready()
    await service.served_adapters.load(body.lora_name, body.lora_path, replace=body.load_inplace)
    return body.lora_name


async def _unload(service: Service, request: Request) -> str:
    """Unload the adapter of ``request`` and return its name."""
    body = await parse(request, UnloadAdapterRequest, service.max_body)
    await service.served_adapters.unload(body.lora_name)
    return body.lora_name


def _loaded(service: Service) -> dict[str, str]:
    return {card.name: card.directory for card in service.served_adapters.cards.values()}
