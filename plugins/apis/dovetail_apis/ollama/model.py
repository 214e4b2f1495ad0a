"""Describe the served model: GET /api/tags, /api/ps and /api/version, POST /api/show."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import parse, validate
from dovetail.api.responses import json_response
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost
from dovetail.interfaces.parsers import Tool, ToolRequest
from dovetail.sampling_params import SamplingParams
from dovetail_apis.ollama.checkpoint import Checkpoint, read_checkpoint
from dovetail_apis.ollama.types import Options, ShowRequest

OLLAMA_VERSION = "0.12.11"
"""The version of Ollama whose API is implemented. Clients check it to see what they may send."""

_ZERO_DURATION = re.compile(r"[+-]?0+(\.0+)?(ns|us|µs|ms|s|m|h)?")
_NEVER = "9999-12-31T23:59:59Z"
_SHAPE = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Maps Ollama's names to the fields of config.json."""


def check_model(host: ApiHost, name: str) -> None:
    """Check the name like ``ApiHost.check_model``, but allow the suffix ``:latest``."""
    host.check_model(name if name == host.model_name else name.removesuffix(":latest"))


def refuse_unload(keep_alive: float | str | None) -> None:
    """Raise ``RequestError`` if a request without a prompt would unload the model."""
    if keep_alive is not None and _ZERO_DURATION.fullmatch(str(keep_alive)):
        raise RequestError(
            "keep_alive is 0 and there is no prompt, which asks for the model to be unloaded; this server keeps it loaded",
            param="keep_alive",
        )


def check_options(host: ApiHost, given: dict[str, Any] | None) -> Options:
    """Return the validated ``options``. Raises ``RequestError``."""
    options = validate(given or {}, Options)
    if options.num_ctx is not None and options.num_ctx > host.context_len:
        raise RequestError(
            f"num_ctx is {options.num_ctx}; allowed: up to {host.context_len}, the context of this server",
            param="num_ctx",
        )
    return options


async def version(host: ApiHost, request: Request) -> Response:
    """Return the version of Ollama's API that is implemented, and the version of Dovetail."""
    return json_response({"version": OLLAMA_VERSION, "dovetail": host.version})


async def tags(host: ApiHost, request: Request) -> Response:
    """Return the served model as a list, once for each of its names."""
    checkpoint = await _checkpoint(host)
    more = {"modified_at": checkpoint.modified_at}
    return json_response({"models": [{**entry, **more} for entry in _entries(host, checkpoint)]})


async def ps(host: ApiHost, request: Request) -> Response:
    """Return the loaded models: the served model, once for each of its names."""
    entries = _entries(host, await _checkpoint(host))
    more = {"expires_at": _NEVER, "context_length": host.context_len}
    return json_response({"models": [{**entry, **more} for entry in entries]})


async def show(host: ApiHost, request: Request) -> Response:
    """Return a description of the served model."""
    body = await parse(request, ShowRequest, host.max_body)
    name = body.model or body.name
    if not name:
        raise RequestError("model is missing", param="model", code="missing_field")
    check_model(host, name)
    checkpoint = await _checkpoint(host)
    template = host.tokenizer.tool_template
    answer = {
        "modelfile": f"FROM {host.model_name}\n",
        "parameters": "",
        "template": template,
        "details": checkpoint.details(),
        "model_info": _model_info(host, checkpoint),
        "capabilities": _capabilities(host, template),
        "modified_at": checkpoint.modified_at,
    }
    return json_response(answer)


async def _checkpoint(host: ApiHost) -> Checkpoint:
    return await asyncio.to_thread(read_checkpoint, host.config.model.path)


def _entries(host: ApiHost, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    names = [name if ":" in name else f"{name}:latest" for name in host.config.model.names]
    known = {"size": checkpoint.size, "digest": checkpoint.digest, "details": checkpoint.details()}
    return [{"name": name, "model": name, **known} for name in names]


def _model_info(host: ApiHost, checkpoint: Checkpoint) -> dict[str, Any]:
    family, config = checkpoint.family, checkpoint.config
    known = {f"{family}.{theirs}": config[ours] for theirs, ours in _SHAPE.items() if ours in config}
    return {
        "general.architecture": family,
        "general.parameter_count": checkpoint.parameters,
        f"{family}.context_length": host.context_len,
        **known,
    }


def _capabilities(host: ApiHost, template: str) -> list[str]:
    offered = {
        "completion": True,
        "tools": _calls_tools(host),
        "thinking": "enable_thinking" in template or "reasoning_effort" in template,
        "embedding": host.embedding is not None,
    }
    return [name for name, offers in offered.items() if offers]


def _calls_tools(host: ApiHost) -> bool:
    try:
        host.plan_chat(SamplingParams(), "", ToolRequest((Tool("any", {}),)))
    except RequestError:
        return False
    return True
