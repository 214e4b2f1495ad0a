"""Run checks of a server's adapters (LoRA) with an engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dovetail.config import Config
from dovetail.server.adapters import ServedAdapters
from dovetail.server.engines import EngineHandle

E = TypeVar("E", bound=EngineHandle)


def serve_adapters(
    config: Config, make: Callable[[], E], check: Callable[[ServedAdapters, E], Awaitable[None]]
) -> None:
    """Start the engine that ``make`` returns, run ``check`` with it and its adapters, and stop it."""

    async def run() -> None:
        engine = make()
        await engine.start()
        try:
            await check(ServedAdapters(config, engine), engine)
        finally:
            await engine.stop()

    asyncio.run(run())
