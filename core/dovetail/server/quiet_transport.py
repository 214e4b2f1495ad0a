"""Ignore what is sent over a connection that has just been reset."""

from __future__ import annotations

import asyncio
from typing import Any


class QuietTransport:
    """Pass calls on to a transport. What is written after the connection was lost is dropped, as asyncio's own transports do:
    uvloop raises ``RuntimeError`` until the protocol has been told."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """See ``asyncio.WriteTransport``."""
        try:
            self._write(data)
        except RuntimeError:
            if not self._transport.is_closing():
                raise

    def pause_reading(self) -> None:
        """See ``asyncio.ReadTransport``."""
        try:
            self._transport.pause_reading()
        except RuntimeError:
            if not self._transport.is_closing():
                raise

    def resume_reading(self) -> None:
        """See ``asyncio.ReadTransport``."""
        try:
            self._transport.resume_reading()
        except RuntimeError:
            if not self._transport.is_closing():
                raise
