"""Deliver the outputs of a group of requests from the engine to their reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from dovetail.errors import DovetailError
from dovetail.messages import TokenOutput


class OutputStream:
    """Deliver the outputs of the requests ``rids`` in batches: each holds the outputs that arrived since the last read.

    Iteration ends when every request has finished, and raises the error that ended one of them. ``close`` aborts the requests
    that are still open; it must be called, or the stream must be used as a context manager. A stream belongs to one event loop.
    """

    def __init__(
        self,
        group: str,
        rids: Iterable[str],
        on_close: Callable[[OutputStream], None],
        on_end: Callable[[str], None],
    ) -> None:
        """``on_end`` is called with the id of a request that its reader ends, ``on_close`` when the stream is closed."""
        self.group = group
        self.rids = tuple(rids)
        self.open = set(self.rids)
        self._on_close = on_close
        self._on_end = on_end
        self._arrived: list[TokenOutput] = []
        self._error: DovetailError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[TokenOutput]:
        """Return the next batch. Raises ``RequestError``, ``QueueFullError`` or ``EngineError``."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self.open or self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived

    def put(self, output: TokenOutput) -> None:
        """Add an output. The reader sleeps until ``wake``."""
        self._arrived.append(output)
        if output.finish is not None:
            self.open.discard(output.rid)

    def fail(self, error: DovetailError) -> None:
        """End the stream with an error. The reader sleeps until ``wake``."""
        self._error = self._error or error

    def wake(self) -> None:
        """Wake the reader, so that it reads what has arrived."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def unread(self) -> int:
        """Return the number of tokens that have arrived since the last read."""
        return sum(len(output.token_ids) for output in self._arrived)

    def end(self, rid: str) -> None:
        """Abort one request. Iteration no longer waits for its outputs."""
        self.open.discard(rid)
        self._on_end(rid)

    def close(self) -> None:
        """Abort the requests that are still open."""
        if not self._closed:
            self._closed = True
            self._on_close(self)
            self.wake()
