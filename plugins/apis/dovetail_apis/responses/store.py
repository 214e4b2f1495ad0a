"""Responses that are kept for a while, in memory: to be fetched, and to be gone on from."""

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
from dovetail_apis.responses.answer import Answer, Event, event_bytes
from dovetail_apis.responses.items import ItemDict, is_whole


class Record:
    """One response that is kept. ``given`` are the items that it was made from, ``logged`` says that its events are kept too;
    ``task`` makes it in the background, until ``stop``."""

    def __init__(self, answer: Answer, given: Sequence[ItemDict], logged: bool = False) -> None:
        self.id = answer.id
        self.given = given
        self.logged = logged
        self.task: asyncio.Task[None] | None = None
        self.stop: Callable[[], None] | None = None
        self.since = time.monotonic()
        self.size = 0
        self._answer: Answer | None = answer
        self._final: dict[str, Any] = {}
        self._log: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def running(self) -> bool:
        """True until it has come to an end."""
        return self._answer is not None

    @property
    def answer(self) -> Answer:
        """What it grows from, while it runs."""
        assert self._answer is not None
        return self._answer

    @property
    def response(self) -> dict[str, Any]:
        """It as it is now."""
        return self._answer.response() if self._answer else self._final

    @property
    def conversation(self) -> list[ItemDict]:
        """What it was made from, and what it has answered. A call that has broken off is left out: no template could show it."""
        return [*self.given, *(item for item in self.response["output"] if is_whole(item))]

    def log(self, events: Sequence[Event]) -> None:
        """Keep events, and tell those who follow."""
        if self.logged and events:
            self._log += [event_bytes([event]) for event in events]
            self._changed.set()
            self._changed = asyncio.Event()

    def settle(self) -> None:
        """It has come to an end: what it grew from is let go."""
        self._final, self._answer = self.answer.response(), None
        self.measure()
        self._changed.set()

    def measure(self) -> None:
        """Set ``size`` to what it takes now, in bytes."""
        self.size = len(msgspec.json.encode([self.given, self.response])) + sum(map(len, self._log))

    async def cancel(self) -> None:
        """End it, if it runs in the background; return when it has ended."""
        if self.stop is not None and self.task is not None:
            self.stop()
            await asyncio.wait((self.task,))

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """Its events from number ``start`` on, until the last."""
        while True:
            changed, known = self._changed, self._log[start:]
            for event in known:
                yield event
            start += len(known)
            if not self.running and start >= len(self._log):
                return
            await changed.wait()


class Store:
    """The responses of all owners, bounded for each: what is oldest is forgotten first, what still runs never."""

    def __init__(self, config: ResponsesConfig) -> None:
        self._config = config
        self._owners: dict[str, OrderedDict[str, Record]] = {}

    def get(self, owner: str, rid: str) -> Record:
        """Raises ``NotFoundError`` where there is none, or it is another's."""
        self._forget_old()
        record = self._owners.get(owner, {}).get(rid)
        if record is None:
            raise NotFoundError(
                f"there is no response {rid!r:.80}; responses are kept for {self._config.max_age:g} s, at most "
                f"{self._config.max_responses} of them, unless store is false",
                param="response_id",
                code="not_found",
            )
        return record

    def check_room(self, owner: str) -> None:
        """Raises ``QueueFullError`` where too many run in the background, or take too much memory together."""
        sizes = [record.size for record in self._owners.get(owner, {}).values() if record.running]
        if len(sizes) >= self._config.max_background or sum(sizes) > self._config.max_mib * 2**20:
            raise QueueFullError(
                f"{len(sizes)} responses of {sum(sizes) / 2**20:.1f} MiB run in the background; at most "
                f"{self._config.max_background} of {self._config.max_mib:g} MiB may (api responses: max_background, max_mib)"
            )

    def add(self, owner: str, record: Record) -> None:
        """Keep it."""
        self._owners.setdefault(owner, OrderedDict())[record.id] = record
        self.shrink(owner)

    def remove(self, owner: str, rid: str) -> Record:
        """Forget it. Raises ``NotFoundError``."""
        record = self.get(owner, rid)
        self._drop(owner, record)
        return record

    def shrink(self, owner: str) -> None:
        """Forget what is beyond the bounds."""
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

    def _drop(self, owner: str, record: Record) -> None:
        self._owners[owner].pop(record.id, None)
        if not self._owners[owner]:
            del self._owners[owner]
