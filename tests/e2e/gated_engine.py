"""Run an engine that begins to read an adapter when the test lets it: an adapter whose directory has a FIFO ``gate`` is read once a
writer has opened and closed that FIFO."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dovetail.config import Config
from dovetail.engine.adapters import EngineAdapters
from dovetail.engine.read_thread import Note
from dovetail.server.engine_process import Endpoints, run_engine

GATE, WAS_READ = "gate", "was_read"


def add_gate(directory: Path) -> Path:
    """Add the FIFO to a directory. To open it for writing blocks until the engine is about to read the adapter."""
    os.mkfifo(directory / GATE)
    return directory / GATE


def gated(read: Callable[..., object]) -> Callable[..., object]:
    """Return a ``read`` of ``EngineAdapters`` that waits for the FIFO, and adds a character to the file ``was_read`` in the directory."""

    def read_later(adapters: EngineAdapters, directory: str, *note: Note) -> object:
        if (Path(directory) / GATE).exists():
            (Path(directory) / GATE).read_bytes()
        with (Path(directory) / WAS_READ).open("a") as file:
            file.write("x")
        return read(adapters, directory, *note)

    return read_later


def run_gated_engine(config: Config, endpoints: Endpoints) -> None:
    """Run the engine of ``config``, as ``run_engine`` does, with the FIFOs."""
    EngineAdapters.read = gated(EngineAdapters.read)  # pyright: ignore[reportAttributeAccessIssue]
    run_engine(config, endpoints)
