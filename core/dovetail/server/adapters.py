"""Know the adapters (LoRA) of a server, and load and unload them while it serves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from dovetail.api.problems import DrainingError, NotFoundError
from dovetail.config.adapters import ADAPTER_NAME
from dovetail.errors import DovetailError, EngineDeadError, RequestError
from dovetail.interfaces.api import AdapterCard
from dovetail.messages import AbortLoadsMsg, GenerateMsg, LoadAdapterMsg, UnloadAdapterMsg

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail.server.engines import EngineHandle

logger = logging.getLogger("dovetail.server")


@dataclass(slots=True, eq=False)
class _OpenLoad:
    """Hold a load that has not been answered. ``error`` is set if the load was ended: then the adapter is not served, even if the
    engine has read it."""

    name: str
    error: DovetailError | None = None


class ServedAdapters:
    """Hold the adapters that requests may name. It outlives the engine process: a process that is started again learns from each
    request where its adapter is.

    Loads of one name wait for each other; those of different names are in the engine at the same time. ``unload`` does not wait for
    loads of its name, but ends them.
    """

    def __init__(self, config: Config, engine: EngineHandle) -> None:
        self._config, self._engine = config, engine
        now = int(time.time())
        self.cards = {name: AdapterCard(name, path, now) for name, path in config.adapters.load.items()}
        self._open: set[_OpenLoad] = set()
        # by name; each exists while a load holds or awaits it
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def num_loading(self) -> int:
        """Return the number of loads that have not been answered."""
        return len(self._open)

    def directory(self, name: str, param: str) -> str:
        """Return the directory of an adapter that the field ``param`` names. Raises ``RequestError`` if it was unloaded."""
        card = self.cards.get(name)
        if card is None:
            text = f"{param} names the adapter {name!r:.200}, which was unloaded; load it again"
            raise RequestError(text, param=param, code="model_not_found")
        return card.directory

    def check_loaded(self, msgs: Sequence[GenerateMsg]) -> None:
        """Raise ``RequestError`` if an adapter of ``msgs`` was unloaded since they were made: the engine would load it again."""
        for name, param in {(msg.adapter, msg.adapter_param) for msg in msgs if msg.adapter}:
            self.directory(name, param)

    async def load(self, name: str, directory: str, *, replace: bool) -> None:
        """Load an adapter; requests go on meanwhile. With ``replace``, it may take the place of one of its name, whose requests
        go on. Raises ``RequestError`` if it is refused or ended by ``unload``, and ``DrainingError`` if it is ended by
        ``end_loads``."""
        if not ADAPTER_NAME.fullmatch(name) or self._config.model.is_served(name):
            raise RequestError(
                f"lora_name is {name!r:.200}; allowed: up to 256 characters without @ and control characters, and no name of the "
                "model",
                param="lora_name",
            )
        if not self._config.adapters.enabled:
            raise RequestError("adapters are off; start the server with adapters.enabled: true (--enable-lora)")
        load = _OpenLoad(name)
        self._open.add(load)
        try:
            async with self._turns.setdefault(name, asyncio.Lock()):
                await self._load(load, directory, replace)
        finally:
            self._open.discard(load)
        logger.info("adapter %r was loaded", name)

    async def _load(self, load: _OpenLoad, directory: str, replace: bool) -> None:
        name = load.name
        if load.error is not None:
            raise load.error
        if name in self.cards and not replace:
            raise RequestError(
                f"the adapter {name!r:.200} is loaded already; unload it first, or set load_inplace", param="lora_name"
            )
        reply = await self._engine.command(LoadAdapterMsg("", name, directory))
        if load.error is not None:
            raise load.error
        if not reply.ok:
            raise RequestError(f"the adapter {name!r:.200} was not loaded: {reply.message}", param="lora_path")
        self.cards[name] = AdapterCard(name, directory, int(time.time()))

    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter, and end the loads of this name that have not been answered. Requests that were accepted
        go on. Raises ``NotFoundError`` if there is neither an adapter nor a load of this name."""
        ended = [load for load in self._open if load.name == name and load.error is None]
        for load in ended:
            text = f"the adapter {name!r:.200} was not loaded: it was unloaded before it was read"
            load.error = RequestError(text, param="lora_name", code="adapter_unloaded")
        if self.cards.pop(name, None) is None and not ended:
            raise NotFoundError(f"there is no adapter {name!r:.200}", param="lora_name", code="model_not_found")
        # The engine refuses it if it was started again, because it has no adapter then, and if the loads have not been sent to it. If there
        # is no engine now, the next one learns of adapters from requests, and none can name this one.
        with suppress(EngineDeadError):
            await self._engine.command(UnloadAdapterMsg("", name))
        logger.info("adapter %r was unloaded", name)

    async def end_loads(self) -> None:
        """End all loads that have not been answered, because the server is shutting down. ``Service.check_ready`` refuses new ones."""
        for load in self._open:
            text = f"the adapter {load.name!r:.200} was not loaded: the server is shutting down"
            load.error = load.error or DrainingError(text)
        if self._open:
            await self._engine.command(AbortLoadsMsg("", "the server is shutting down"))
