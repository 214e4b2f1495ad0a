"""Answer the routes that describe the server: the model, the config, the version, the load and the tokenizer."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.problems import NotFoundError
from dovetail.api.responses import json_response
from dovetail.config import Config, dump
from dovetail.config.checkpoint import locate, read_json
from dovetail.errors import ConfigError
from dovetail.interfaces.api import Acceptance, ApiHost
from dovetail.messages import EngineStats
from dovetail.server.metrics import balancedness
from dovetail.server.service import Service


async def model_info(service: ApiHost, request: Request) -> Response:
    """Return where the model was loaded from, its sizes and its special tokens, with the fields of SGLang."""
    tokenizer, model = service.tokenizer, service.config.model
    checkpoint = await asyncio.to_thread(_json_of, model.path, "config.json")
    info = {
        "model_path": model.path,
        "tokenizer_path": model.tokenizer or model.path,
        "served_model_name": service.model_name,
        "served_model_names": model.names,
        "is_generation": True,
        "preferred_sampling_params": service.sampling_defaults or None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": checkpoint.get("model_type"),
        "architectures": checkpoint.get("architectures"),
        "context_length": service.context_len,
        "vocab_size": service.vocab_size,
        "tokenizer_size": tokenizer.vocab_size,
        "textless_token_ids": [i for i, data in enumerate(tokenizer.token_bytes) if not data],
        "eos_token_ids": tokenizer.eos_token_ids,
        "has_chat_template": tokenizer.has_chat_template,
        "chat_template": tokenizer.chat_template or None,
        "special_tokens": tokenizer.named_tokens,
        "bos_token_id": tokenizer.bos_token_id,
        "adds_bos": tokenizer.adds_bos,
    }
    return json_response(info)


async def server_info(service: Service, request: Request) -> Response:
    """Return the config, how every component was chosen, the memory report, and the engine's current numbers. The fields
    of SGLang are next to them."""
    stats = await service.fresh_stats()
    info = {
        **_sglang_info(service, stats),
        "status": service.status,
        "version": service.version,
        "engine_pid": service.engine.pid,
        "open_requests": service.engine.num_open,
        "config": dump(service.config),
        "sampling_defaults": service.engine.info["resolved"].get("sampling_defaults", {}),
        "engine": service.engine.info,
        "stats": {name: value for name, value in msgspec.structs.asdict(stats).items() if name != "call_id"},
    }
    return json_response(info)


async def version(service: ApiHost, request: Request) -> Response:
    """Return the version of the server."""
    return json_response({"version": service.version})


async def load(service: Service, request: Request) -> Response:
    """Return the number of requests that are open, with the field of vLLM, and how many of them run and wait."""
    stats = await service.fresh_stats()
    return json_response({"server_load": service.engine.num_open, "running": stats.running, "waiting": stats.waiting})


async def get_load(service: Service, request: Request) -> Response:
    """Return the load of the engine, with the fields of SGLang. There is one data-parallel rank."""
    stats = await service.fresh_stats()
    load = {
        "dp_rank": 0,
        "num_reqs": stats.running + stats.waiting,
        "num_waiting_reqs": stats.waiting,
        "num_tokens": stats.pages_used * service.config.memory.page_size,
    }
    return json_response([load])


async def expert_load(service: Service, request: Request) -> Response:
    """Return the number of tokens that each expert of each layer has received since the engine's start. It must be configured:
    `metrics.expert_load`."""
    if service.config.metrics.expert_load is None:
        raise NotFoundError(
            "the load of experts is not counted; set metrics.expert_load to layers or experts", code="not_counted"
        )
    layers = await service.fresh_expert_tokens()
    shown = [
        {"layer": layer, "balancedness": balancedness(tokens), "tokens": tokens} for layer, tokens in layers.items()
    ]
    return json_response({"layers": shown})


async def tokenizer_info(service: ApiHost, request: Request) -> Response:
    """Return the model's tokenizer_config.json, and the chat template that is used."""
    model, tokenizer = service.config.model, service.tokenizer
    given = await asyncio.to_thread(_json_of, model.tokenizer or model.path, "tokenizer_config.json")
    info = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **given,
        **tokenizer.named_tokens,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": service.context_len,
        "chat_template": tokenizer.chat_template or None,
    }
    return json_response(info)


def _sglang_info(service: Service, stats: EngineStats) -> dict[str, Any]:
    """Return the fields of SGLang's /get_server_info whose meaning exists here."""
    config: Config = service.config
    engine = service.engine.info
    tokens = stats.pages_total * config.memory.page_size
    drafts = Acceptance(stats.drafted_tokens, stats.accepted_tokens, stats.verify_steps)
    state: dict[str, Any] = {
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "token_usage": stats.pages_used / max(stats.pages_total, 1),
        "memory_usage": {"token_capacity": tokens},
    }
    if stats.drafted_tokens:
        state |= {"avg_spec_accept_length": drafts.length}
    chosen = {slot: part["name"] if part else None for slot, part in engine["resolved"]["chosen"].items()}
    return {
        "model_path": config.model.path,
        "tokenizer_path": config.model.tokenizer or config.model.path,
        "served_model_name": service.model_name,
        "host": config.server.host,
        "port": config.server.port,
        "tp_size": config.parallel.tp,
        "enable_dp_attention": config.parallel.attention == "data",
        "dp_size": config.parallel.num_pools,
        "context_length": service.context_len,
        "page_size": config.memory.page_size,
        "attention_backend": chosen.get("attention.decode"),
        "schedule_policy": chosen.get("policy"),
        "speculative_algorithm": chosen.get("speculative"),
        "max_total_num_tokens": tokens,
        "max_req_input_len": service.context_len - 1,
        "internal_states": [state],
    }


@lru_cache(16)
def _json_of(path: str, name: str) -> dict[str, Any]:
    """Return a JSON file of the checkpoint or tokenizer at ``path``, which was located at the start; empty if there is none."""
    try:
        return read_json(locate(path), name)
    except ConfigError:
        return {}
