"""Keep an engine running: start another process when the engine has ended by itself or was killed because it stood still."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.errors import ConfigError, EngineDeadError, EngineError
from dovetail.messages import Command, CommandReply, EngineStats, GenerateMsg
from dovetail.server.client import EngineClient
from dovetail.server.engine_process import EngineTarget, run_engine
from dovetail.server.metrics import without_gauges
from dovetail.server.streams import OutputStream

if TYPE_CHECKING:
    from dovetail.config import Config

logger = logging.getLogger("dovetail.server")

_LONGEST_BACKOFF = 60.0


class SupervisedEngine:
    """Implement ``engines.EngineHandle`` with one engine process at a time. An object belongs to the event loop that called
    ``start``.

    When the process has ended by itself, its requests end with ``EngineDeadError``, and another process is started after a pause
    that doubles with every restart (``supervision``). Until that one is ready no requests are accepted. Totals go on counting
    over restarts. If there were too many restarts, ``ended`` returns, and no request is accepted any more.
    """

    def __init__(self, config: Config, target: EngineTarget = run_engine) -> None:
        """``target`` is the function that an engine process runs."""
        self._config = config
        self._target = target
        self._limits = config.supervision
        self._client = EngineClient(config, target)
        self._former: list[EngineClient] = []
        self._restarts: deque[float] = deque()  # times of the restarts within the window
        self._totals = EngineStats()  # of the processes before this one
        self._latest = EngineStats()
        self._failure: str | None = None
        self._over = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    # start and stop

    async def start(self) -> dict[str, Any]:
        """Start the engine, wait until it is ready and return its info. Raises ``EngineError`` if it cannot start; the first
        start is not tried again."""
        info = await self._client.start()
        self._watch = asyncio.ensure_future(self._supervise())
        return info

    async def stop(self) -> None:
        """Stop the engine at once, also while it is being started again."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._client.stop()

    async def _supervise(self) -> None:
        while True:
            await self._client.died.wait()
            if self._client.failure is None:
                return  # it was stopped
            self._failure = self._client.failure
            self._totals, self._latest = _sum(self._totals, without_gauges(self._latest)), EngineStats()
            await self._client.stop()
            if not await self._replace():
                self._over.set()
                return

    async def _replace(self) -> bool:
        """Start another process, and try again if it does not start. Return False if there were too many restarts."""
        while self._may_restart():
            await asyncio.sleep(self._pause())
            self._restarts.append(time.monotonic())
            client = EngineClient(_without_adapters(self._config, self._client.info), self._target)
            try:
                await client.start()
            except (ConfigError, EngineError) as error:
                self._failure = str(error)
                logger.error("%s", error)
                continue
            self._former = [former for former in (*self._former, self._client) if former.num_open]
            self._client, self._failure = client, None
            self._totals = msgspec.structs.replace(self._totals, restarts=self._totals.restarts + 1)
            logger.warning("the engine was started again (process %s)", client.pid)
            return True
        return False

    def _may_restart(self) -> bool:
        most, seconds = self._limits.max_restarts, self._limits.window_seconds
        while self._restarts and self._restarts[0] < time.monotonic() - seconds:
            self._restarts.popleft()
        if len(self._restarts) < most:
            return True
        if most:
            logger.error("the engine was started again %d times within %g s and has failed again", most, seconds)
        return False

    def _pause(self) -> float:
        seconds = min(
            self._limits.backoff_seconds * 2 ** len(self._restarts), max(_LONGEST_BACKOFF, self._limits.backoff_seconds)
        )
        logger.warning(
            "the engine is started again in %g s (%d of at most %d times within %g s); requests are answered with 503 until then",
            seconds,
            len(self._restarts) + 1,
            self._limits.max_restarts,
            self._limits.window_seconds,
        )
        return seconds

    # state

    @property
    def info(self) -> dict[str, Any]:
        """Return the info of the process that runs now, or that ran last."""
        return self._client.info

    @property
    def failure(self) -> str | None:
        """Return why there is no engine; None while there is one, and after ``stop``."""
        return self._failure or self._client.failure

    @property
    def alive(self) -> bool:
        """Return True while requests are accepted."""
        return self._client.alive

    @property
    def restarting(self) -> bool:
        """Return True while the engine has ended and another process is about to be ready."""
        return self.failure is not None and not self._over.is_set() and self._limits.max_restarts > 0

    @property
    def stalled(self) -> bool:
        """See ``EngineClient.stalled``."""
        return self._client.stalled

    @property
    def pid(self) -> int | None:
        """Return the process id of the engine."""
        return self._client.pid

    @property
    def num_open(self) -> int:
        """Return the number of groups that are not closed yet, those of ended processes included."""
        return self._client.num_open + sum(former.num_open for former in self._former)

    async def ended(self) -> None:
        """Return once the engine has ended by itself and is not started again."""
        await self._over.wait()

    async def end_if_hung(self, seconds: float) -> None:
        """See ``EngineClient.end_if_hung``. The server is about to end: the engine is not started again after this call."""
        if self._watch is not None:
            self._watch.cancel()
        await self._client.end_if_hung(seconds)

    # requests and commands

    def check(self, tenant: str, count: int) -> None:
        """See ``EngineClient.check``."""
        self._client.check(tenant, count)

    def open(self, group: str, msgs: Sequence[GenerateMsg]) -> OutputStream:
        """See ``EngineClient.open``."""
        return self._client.open(group, msgs)

    def abort(self, group: str, message: str = "aborted by request") -> bool:
        """See ``EngineClient.abort``."""
        return self._client.abort(group, message)

    def abort_all(self, message: str = "aborted by the operator") -> None:
        """See ``EngineClient.abort_all``."""
        self._client.abort_all(message)

    async def stats(self) -> EngineStats:
        """Return the engine's gauges, and totals since the first start. While there is no engine, gauges are 0."""
        with suppress(EngineDeadError):
            self._latest = await self._client.stats()
            return _sum(self._latest, self._totals)
        return _sum(without_gauges(self._latest), self._totals)

    async def command(self, msg: Command) -> CommandReply:
        """See ``EngineClient.command``."""
        return await self._client.command(msg)

    async def flush_cache(self) -> CommandReply:
        """See ``EngineClient.flush_cache``."""
        return await self._client.flush_cache()


def _sum(stats: EngineStats, more: EngineStats) -> EngineStats:
    """Return the sums of all numbers of two processes; ``more`` has no gauges."""
    sums: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(stats).items():
        other = getattr(more, name)
        if isinstance(value, dict):
            sums[name] = {key: value.get(key, 0) + other.get(key, 0) for key in {**value, **other}}
        elif isinstance(value, list):
            sums[name] = [own + before for own, before in zip_longest(value, other, fillvalue=0)]
        else:
            sums[name] = value if isinstance(value, str) else value + other
    return EngineStats(**sums)


def _without_adapters(config: Config, info: Mapping[str, Any]) -> Config:
    """Return the config of an engine that is started again. It knows no adapter before a request names its directory: those of
    the config may have been replaced, unloaded, or damaged since. Slots are as large as before."""
    if not config.adapters.enabled:
        return config
    rank = info.get("adapters_max_rank", config.adapters.max_rank)
    section = config.adapters.model_copy(update={"load": {}, "max_rank": rank})
    return config.model_copy(update={"adapters": section})
