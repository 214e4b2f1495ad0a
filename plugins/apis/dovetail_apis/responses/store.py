"""Store responses in memory for a limited time, so that clients can fetch and continue them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from dovetail.api.problems import NotFoundError
from dovetail.errors import QueueFullError
from dovetail_apis.config import ResponsesConfig
from dovetail_apis.responses.builder import Event, ResponseBuilder, event_bytes
from dovetail_apis.responses.items import ItemDict, is_whole


class StoredResponse:
    """Hold one stored response.

    ``given`` are its input items. ``logged`` is true if its events are stored too. ``task`` generates it in the
    background, and ``stop`` ends that generation. ``size`` is its memory in bytes when it was last measured.
    """

    def __init__(self, builder: ResponseBuilder, given: Sequence[ItemDict], logged: bool = False) -> None:
        self.id = builder.id
        self.given = given
        self.logged = logged
        self.task: asyncio.Task[None] | None = None
        self.stop: Callable[[], None] | None = None
        self.since = time.monotonic()
        self.size = 0
        self._builder: ResponseBuilder | None = builder
        self._final: dict[str, Any] = {}
        self._log: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def running(self) -> bool:
        """Return true until the response has finished."""
        return self._builder is not None

    @property
    def builder(self) -> ResponseBuilder:
        """Return the builder of the response, which must be running."""
        assert self._builder is not None
        return self._builder

    @property
    def response(self) -> dict[str, Any]:
        """Return the response in its present state."""
        return self._builder.response() if self._builder else self._final

    @property
    def conversation(self) -> list[ItemDict]:
        """Return the input and output items. A call that broke off is left out, because no chat template could render
        it."""
        return [*self.given, *(item for item in self.response["output"] if is_whole(item))]

    def log(self, events: Sequence[Event]) -> None:
        """Store events, and wake up the streams that follow them."""
        if self.logged and events:
            self._log += [event_bytes([event]) for event in events]
            self._changed.set()
            self._changed = asyncio.Event()

    def finish(self) -> None:
        """Mark the response as finished, and release its builder."""
        self._final, self._builder = self.builder.response(), None
        self.measure()
        self._changed.set()

    def measure(self) -> None:
        """Set ``size`` to the present memory of the response, in bytes."""
        self.size = len(msgspec.json.encode([self.given, self.response])) + sum(map(len, self._log))

    async def cancel(self) -> None:
        """End the response if it runs in the background, and wait until it has ended."""
        if self.stop is not None and self.task is not None:
            self.stop()
            await asyncio.wait((self.task,))

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """Yield the events from number ``start`` to the last one, and wait for those that have not happened yet."""
        while True:
            changed, known = self._changed, self._log[start:]
            for event in known:
                yield event
            start += len(known)
            if not self.running and start >= len(self._log):
                return
            await changed.wait()


class ResponseStore:
    """Hold the responses of all owners, with separate bounds for each owner. The oldest response is deleted first;
    running responses are never deleted."""

    def __init__(self, config: ResponsesConfig) -> None:
        self._config = config
        self._owners: dict[str, OrderedDict[str, StoredResponse]] = {}

    def get(self, owner: str, rid: str) -> StoredResponse:
        """Return the response ``rid``. Raises ``NotFoundError`` if there is none or if it belongs to another owner."""
        self._forget_old()
        record = self._owners.get(owner, {}).get(rid)
        if record is None:
            raise NotFoundError(
                f"there is no response {rid!r:.80}; responses are stored for {self._config.max_age:g} s, at most "
                f"{self._config.max_responses} of them, unless store is false",
                param="response_id",
                code="not_found",
            )
        return record

    def check_capacity(self, owner: str) -> None:
        """Raise ``QueueFullError`` if too many responses run in the background, or if these take too much memory."""
        sizes = [record.size for record in self._owners.get(owner, {}).values() if record.running]
        if len(sizes) >= self._config.max_background or sum(sizes) > self._config.max_mib * 2**20:
            raise QueueFullError(
                f"{len(sizes)} responses of {sum(sizes) / 2**20:.1f} MiB in total run in the background; allowed: at most "
                f"{self._config.max_background} responses of {self._config.max_mib:g} MiB in total (api responses: max_background, "
                "max_mib)"
            )

    def add(self, owner: str, record: StoredResponse) -> None:
        """Store a response of ``owner``, and delete old ones if the bounds are exceeded."""
        self._owners.setdefault(owner, OrderedDict())[record.id] = record
        self.shrink(owner)

    def remove(self, owner: str, rid: str) -> StoredResponse:
        """Delete and return the response ``rid``. Raises ``NotFoundError``."""
        record = self.get(owner, rid)
        self._drop(owner, record)
        return record

    def shrink(self, owner: str) -> None:
        """Delete the oldest responses of ``owner`` until the bounds are kept."""
        self._forget_old()
        records = self._owners.get(owner, OrderedDict())
        size = sum(record.size for record in records.values())
        for record in list(records.values()):
            if len(records) <= self._config.max_responses and size <= self._config.max_mib * 2**20:
                return
            if not record.running:
                size -= record.size
                self._drop(owner, record)

    def _forget_old(self) -> None:
        oldest = time.monotonic() - self._config.max_age
        for owner, records in list(self._owners.items()):
            for record in list(records.values()):
                if record.since > oldest:
                    break
                if not record.running:
                    self._drop(owner, record)

    def _drop(self, owner: str, record: StoredResponse) -> None:
        self._owners[owner].pop(record.id, None)
        if not self._owners[owner]:
            del self._owners[owner]
