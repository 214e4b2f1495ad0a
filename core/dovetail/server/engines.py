"""Define the interface between the server and its engine, which is one process or several processes behind one handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dovetail.messages import Command, CommandReply, EngineStats, GenerateMsg, TokenOutput


class Stream(Protocol):
    """Deliver the outputs of one group of requests in batches. See ``streams.OutputStream`` for each method."""

    @property
    def open(self) -> set[str]:
        """Return the ids of the requests that have not finished."""
        ...

    @property
    def unread(self) -> int:
        """Return the number of tokens that have arrived since the last read."""
        ...

    async def __anext__(self) -> list[TokenOutput]:
        """Return the next batch. Raises the error that ended a request."""
        ...

    def end(self, rid: str) -> None:
        """Abort one request."""
        ...

    def close(self) -> None:
        """Abort the requests that are still open."""
        ...


class EngineHandle(Protocol):
    """Start, use and stop an engine. See ``client.EngineClient`` for each method."""

    @property
    def info(self) -> dict[str, Any]:
        """Return the info that the engine reported when it was ready."""
        ...

    @property
    def failure(self) -> str | None:
        """Return why there is no engine, which has ended by itself; None if it runs or was stopped."""
        ...

    @property
    def restarting(self) -> bool:
        """Return True if there is no engine, and another process is about to be ready."""
        ...

    @property
    def stalled(self) -> bool:
        """Return True while the engine has given no sign of life for ``supervision.stall_seconds``."""
        ...

    @property
    def alive(self) -> bool:
        """Return True while requests are accepted."""
        ...

    @property
    def pid(self) -> int | None:
        """Return the process id of the engine."""
        ...

    @property
    def num_open(self) -> int:
        """Return the number of groups of requests that are not closed yet."""
        ...

    async def start(self) -> dict[str, Any]:
        """Start the engine, wait until it is ready and return its info."""
        ...

    async def stop(self) -> None:
        """Stop the engine at once."""
        ...

    async def ended(self) -> None:
        """Return once the engine has ended by itself and is not started again."""
        ...

    async def end_if_hung(self, seconds: float) -> None:
        """Kill the engine if it does not respond within ``seconds``."""
        ...

    def check(self, tenant: str, count: int) -> None:
        """Raise ``QueueFullError`` if it is clear already that ``count`` more requests of ``tenant`` may not wait. ``open``
        checks it again."""
        ...

    def open(self, group: str, msgs: Sequence[GenerateMsg]) -> Stream:
        """Send requests whose outputs are read from one stream."""
        ...

    def abort(self, group: str) -> bool:
        """Abort the requests of a group; return False if there is no such group."""
        ...

    def abort_all(self, message: str = ...) -> None:
        """Abort all requests."""
        ...

    async def stats(self) -> EngineStats:
        """Return gauges and totals."""
        ...

    async def command(self, msg: Command) -> CommandReply:
        """Send a command and return its reply."""
        ...

    async def flush_cache(self) -> CommandReply:
        """Drop every cached prefix."""
        ...
