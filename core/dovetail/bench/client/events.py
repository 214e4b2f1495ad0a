"""Read server-sent events as inference servers write them: every event is one ``data:`` line."""

from __future__ import annotations

DONE = b"[DONE]"


class EventLines:
    """Split a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that ``chunk`` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
