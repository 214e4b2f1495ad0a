"""Answer the routes with which an operator controls the engine: its cache, its steps, and profiles of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dovetail.api.body import ApiModel, Int32, QueryModel, examples, parse_optional, parse_query
from dovetail.api.responses import json_response
from dovetail.errors import EngineDeadError, RequestError
from dovetail.messages import StartProfileMsg, StopProfileMsg
from dovetail.server.service import Service

logger = logging.getLogger("dovetail.server")

_POLL_SECONDS = 0.05
_serial = itertools.count(1)


class FlushQuery(QueryModel):
    """Describe the query of /flush_cache."""

    timeout: float = Field(0.0, ge=0, le=3600, description="Seconds to wait until no request is running.")


class ResetQuery(QueryModel):
    """Describe the query of /reset_prefix_cache."""

    reset_running_requests: bool = Field(False, description="True is refused: running requests keep their prefixes.")
    reset_external: bool = Field(False, description="No effect: no prefix is cached elsewhere.")


class PauseRequest(ApiModel):
    """Describe the body of POST /pause_generation, which may be empty."""

    model_config = examples({"mode": "in_place"}, {"mode": "abort"})

    mode: Literal["in_place", "abort"] = Field(
        "in_place",
        description="`in_place`: requests stay where they are and go on after /continue_generation. `abort`: they end now.",
    )


class ProfileRequest(ApiModel):
    """Describe the body of POST /start_profile, which may be empty. The server chooses the names of the files."""

    model_config = examples({"num_steps": 20}, {"activities": ["CPU"], "seconds": 2.0})

    num_steps: Int32 | None = Field(None, ge=1, description="End the profile after this number of engine steps.")
    seconds: float | None = Field(
        None, gt=0, description="End the profile after this number of seconds, at most `server.profile_seconds`."
    )
    activities: list[Literal["CPU", "GPU", "CUDA"]] | None = Field(
        None, max_length=3, description="What is recorded; by default everything that the machine has."
    )
    with_stack: bool = Field(False, description="Record the Python functions of each operation.")
    record_shapes: bool = Field(False, description="Record the shapes of each operation.")

    refused: ClassVar = {
        "output_dir": (),
        "start_step": (0,),
        "profile_by_stage": (False,),
        "merge_profiles": (False,),
        "profile_prefix": (),
        "profile_stages": (),
    }
    reasons: ClassVar = {
        "output_dir": "the operator names the directory of the traces in server.profile_dir; leave it out",
        "start_step": "the profile starts now; leave it out",
        "profile_by_stage": "one trace has the steps of all stages; leave it out",
        "merge_profiles": "each rank writes one trace; leave it out",
        "profile_prefix": "the server chooses the names of the files; leave it out",
        "profile_stages": "one trace has the steps of all stages; leave it out",
    }


async def flush_cache(service: Service, request: Request) -> Response:
    """Drop every cached prefix. Answer 400 if requests are still running after ``timeout`` seconds."""
    deadline = time.monotonic() + parse_query(request, FlushQuery).timeout
    while not (reply := await service.engine.flush_cache()).ok:
        if time.monotonic() >= deadline:
            raise RequestError(f"the cache was not flushed: {reply.message}", code="busy")
        await asyncio.sleep(_POLL_SECONDS)
    return PlainTextResponse("the cache is empty")


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Drop every cached prefix, as /flush_cache does. ``success`` is false if requests are running (vLLM's form)."""
    if parse_query(request, ResetQuery).reset_running_requests:
        message = (
            "reset_running_requests is true: running requests keep their prefixes; abort them by /pause_generation"
        )
        raise RequestError(message, param="reset_running_requests")
    return json_response({"success": (await service.engine.flush_cache()).ok})


async def pause_generation(service: Service, request: Request) -> Response:
    """Stop the engine's steps. Requests are still accepted and wait, their streams stay open, and they can be
    aborted."""
    body = await parse_optional(request, PauseRequest, service.max_body)
    if body.mode == "abort":
        service.engine.abort_all("generation was paused by the operator")
    await service.pause(True)
    logger.info("generation is paused (mode %s)", body.mode)
    return json_response({"status": "ok", "message": "generation is paused", "mode": body.mode})


async def continue_generation(service: Service, request: Request) -> Response:
    """Go on after /pause_generation. Without a pause this has no effect."""
    was_paused = service.paused
    await service.pause(False)
    if was_paused:
        logger.info("generation continues")
    return json_response({"status": "ok", "message": "generation continues"})


async def is_paused(service: Service, request: Request) -> Response:
    """Return whether generation is paused."""
    return json_response({"is_paused": service.paused})


async def start_profile(service: Service, request: Request) -> Response:
    """Start to profile the engine with torch's profiler. Each rank writes one trace in Chrome's format."""
    body = await parse_optional(request, ProfileRequest, service.max_body)
    server = service.config.server
    if server.profile_dir is None:
        raise RequestError("profiles are switched off; set server.profile_dir, a directory for the traces")
    if body.seconds is not None and body.seconds > server.profile_seconds:
        raise RequestError(
            f"seconds is {body.seconds:g}; allowed: at most {server.profile_seconds:g} (server.profile_seconds)",
            param="seconds",
        )
    folder = Path(server.profile_dir).expanduser().absolute()
    seconds = body.seconds or server.profile_seconds
    activities = tuple(dict.fromkeys("cpu" if name == "CPU" else "cuda" for name in body.activities or ()))
    msg = StartProfileMsg(
        "",
        str(folder / f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{next(_serial)}"),
        seconds,
        body.num_steps or 0,
        activities,
        body.with_stack,
        body.record_shapes,
    )
    reply = await service.engine.command(msg)
    if not reply.ok:
        raise RequestError(reply.message, code="busy")
    task = asyncio.ensure_future(_end_after(service, msg.prefix, seconds))
    service.tasks.add(task)
    task.add_done_callback(service.tasks.discard)
    return json_response({"status": "ok", "directory": str(folder), "seconds": seconds})


async def stop_profile(service: Service, request: Request) -> Response:
    """End the profile, and return the files that it has written. If it has ended by itself, return its files."""
    reply = await service.engine.command(StopProfileMsg(""))
    if not reply.ok:
        raise RequestError(reply.message, code="no_profile")
    return json_response({"status": "ok", "files": list(reply.files)})


async def _end_after(service: Service, prefix: str, seconds: float) -> None:
    """End the profile with this prefix after ``seconds``, also if the engine makes no steps meanwhile."""
    await asyncio.sleep(seconds)
    with suppress(EngineDeadError):
        await service.engine.command(StopProfileMsg("", prefix))
