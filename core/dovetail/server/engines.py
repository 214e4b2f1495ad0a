"""What the server asks of its engine, whether that is one process or the arms of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dovetail.messages import CommandReply, EngineStats, GenerateMsg, TokenOutput


class Stream(Protocol):
    """The answers of one group of requests, in batches. ``streams.OutputStream`` says what each method means."""

    @property
    def open(self) -> set[str]:
        """Ids of the requests that have not finished."""
        ...

    @property
    def unread(self) -> int:
        """Tokens that have arrived since the last read."""
        ...

    async def __anext__(self) -> list[TokenOutput]:
        """The next batch. Raises what ended a request otherwise."""
        ...

    def end(self, rid: str) -> None:
        """Abort one request."""
        ...

    def close(self) -> None:
        """Abort what is still open."""
        ...


class Engine(Protocol):
    """One engine, or what looks like one. ``client.EngineClient`` says what each method means."""

    @property
    def info(self) -> dict[str, Any]:
        """What it said when it was ready."""
        ...

    @property
    def failure(self) -> str | None:
        """Why it has ended by itself."""
        ...

    @property
    def alive(self) -> bool:
        """True while requests can be taken."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id."""
        ...

    @property
    def num_open(self) -> int:
        """Groups of requests that are not closed yet."""
        ...

    async def start(self) -> dict[str, Any]:
        """Start and wait until it can serve."""
        ...

    async def stop(self) -> None:
        """End at once."""
        ...

    def open(self, group: str, msgs: Sequence[GenerateMsg]) -> Stream:
        """Send requests that are answered together."""
        ...

    def abort(self, group: str) -> bool:
        """End a group's requests; False if there is none."""
        ...

    def abort_all(self, message: str = ...) -> None:
        """End all requests."""
        ...

    async def stats(self) -> EngineStats:
        """Gauges and totals."""
        ...

    async def flush_cache(self) -> CommandReply:
        """Drop every cached prefix."""
        ...
