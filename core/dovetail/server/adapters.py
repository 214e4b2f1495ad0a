"""Know the adapters (LoRA) of a server, and load and unload them while it serves."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from dovetail.api.problems import NotFoundError
from dovetail.config.adapters import ADAPTER_NAME
from dovetail.errors import RequestError
from dovetail.interfaces.api import AdapterCard
from dovetail.messages import LoadAdapterMsg, UnloadAdapterMsg

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail.server.engines import EngineHandle

logger = logging.getLogger("dovetail.server")


class ServedAdapters:
    """Hold the adapters that requests may name. It outlives the engine process: a process that is started again learns from each
    request where its adapter is."""

    def __init__(self, config: Config, engine: EngineHandle) -> None:
        self._config, self._engine = config, engine
        now = int(time.time())
        self.cards = {name: AdapterCard(name, path, now) for name, path in config.adapters.load.items()}
        self._changes = asyncio.Lock()

    def directory(self, name: str) -> str:
        """Return the directory of an adapter. Raises ``RequestError`` if it was unloaded."""
        card = self.cards.get(name)
        if card is None:
            raise RequestError(f"the adapter {name!r:.200} was unloaded", param="model", code="model_not_found")
        return card.directory

    async def load(self, name: str, directory: str, *, replace: bool) -> None:
        """Load an adapter; requests go on meanwhile. With ``replace``, it may take the place of one of its name, whose requests
        go on. Raises ``RequestError`` if it is refused."""
        if not ADAPTER_NAME.fullmatch(name) or self._config.model.is_served(name):
            raise RequestError(
                f"lora_name is {name!r:.200}; allowed: up to 256 characters without @ and control characters, and no name of the "
                "model",
                param="lora_name",
            )
        if not self._config.adapters.enabled:
            raise RequestError("adapters are off; start the server with adapters.enabled: true (--enable-lora)")
        async with self._changes:
            if name in self.cards and not replace:
                raise RequestError(
                    f"the adapter {name!r:.200} is loaded already; unload it first, or set load_inplace",
                    param="lora_name",
                )
            reply = await self._engine.command(LoadAdapterMsg("", name, directory))
            if not reply.ok:
                raise RequestError(f"the adapter {name!r:.200} was not loaded: {reply.message}", param="lora_path")
            self.cards[name] = AdapterCard(name, directory, int(time.time()))
        logger.info("adapter %r was loaded", name)

    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter; those that were accepted go on. Raises ``NotFoundError`` if there is none."""
        async with self._changes:
            if self.cards.pop(name, None) is None:
                raise NotFoundError(f"there is no adapter {name!r:.200}", code="model_not_found")
            await self._engine.command(
                UnloadAdapterMsg("", name)
            )  # refused if the engine was started again: it has none then
        logger.info("adapter %r was unloaded", name)
