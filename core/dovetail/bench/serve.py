"""Run a workload against a server once."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx

from dovetail.bench.call_tracker import OnDone, ignore_measurement
from dovetail.bench.client.http import HttpSender, pool_of
from dovetail.bench.client.target import Target, hash_of
from dovetail.bench.load import run_load
from dovetail.bench.machine import machine_facts
from dovetail.bench.metrics import span
from dovetail.bench.records import RunRecord, Workload

T = TypeVar("T")


async def measure_server(
    client: httpx.AsyncClient,
    target: Target,
    workload: Workload,
    warmup: Workload | None = None,
    *,
    flush: bool = True,
    arm: str = "",
    block: int = 0,
    on_done: OnDone = ignore_measurement,
) -> RunRecord:
    """Send ``warmup``, which is not recorded, empty the prefix cache if ``flush`` is true and the server allows it, and
    send ``workload``.

    Raises ``ConfigError`` for a workload that the API cannot carry.
    """
    target.api.check(workload)
    with contextlib.closing(pool_of(client)) as pool:
        send = HttpSender(pool, target.api)
        if warmup is not None:
            await run_load(warmup, send)
        if flush:
            await target.flush()
        before, started = await target.counters(), datetime.now(UTC)
        measurements, lag = await run_load(workload, send, on_done)
    return RunRecord(
        kind="serve",
        arm=arm,
        block=block,
        workload=workload.name,
        workload_hash=workload.content_hash,
        config_hash=hash_of(target.config) if target.config is not None else None,
        config=target.config,
        target=f"{target.api.name} {client.base_url}",
        machine=machine_facts(target.device),
        started=started.isoformat(timespec="seconds"),
        seconds=span(measurements),
        warmup_calls=len(warmup.calls) if warmup is not None else 0,
        lag=lag,
        measurements=tuple(measurements),
        counters_before=before,
        counters_after=await target.counters(),
    )


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the fastest event loop of this platform."""
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
