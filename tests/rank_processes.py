"""Run functions on all ranks of a mesh: one process for each rank, connected by gloo. Every wait has a deadline."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from dovetail.engine.mesh import connect
from dovetail.interfaces.mesh import Mesh
from fresh import heavy_imported

SECONDS = 60.0


class RankProcesses:
    """Hold the processes of ``size`` ranks. They are forked from a process that has imported torch already."""

    def __init__(self, size: int, timeout: float = SECONDS) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self.processes = []
        context = heavy_imported()
        for rank in range(size):
            ours, theirs = context.Pipe()
            file = Path(self._folder.name, "rendezvous")
            process = context.Process(target=_serve, args=(rank, size, file, timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return ``function(mesh, *arguments)`` of every rank. ``function`` must be at the top level of its module, and
        the arguments must not have types of that module. Raises ``AssertionError`` with the traceback if it raises on a rank, or if a rank does not return in time."""
        for pipe in self._pipes:
            pipe.send((inspect.unwrap(function).__code__.co_filename, function.__name__, arguments))
        return self.results()

    def results(self) -> list[Any]:
        """Return what ``run`` returns, for the last call that was sent."""
        deadline = time.monotonic() + 2 * SECONDS
        found = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} does not return"
            found.append(pickle.loads(pipe.recv_bytes()))
        errors = [text for ok, text in found if not ok]
        assert not errors, "\n".join(errors)
        return [value for _, value in found]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join(SECONDS)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _serve(rank: int, size: int, file: Path, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    mesh: Mesh | None = None
    while True:
        try:
            where, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            mesh = mesh or connect(rank, size, torch.device("cpu"), file, timeout)
            result = True, getattr(_module(where), name)(mesh, *arguments)
        except BaseException:
            result = False, f"rank {rank}:\n{traceback.format_exc()}"
        pipe.send_bytes(pickle.dumps(result))


def _module(where: str) -> Any:
    """Return the module of a test file. pytest gives it a name by which other processes cannot import it."""
    name = f"rank_task_{Path(where).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, where)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
