"""Run the ranks of a mesh as threads of one process, for tests of models that are divided among ranks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import torch

from dovetail.errors import RankLostError
from dovetail.interfaces.mesh import Mesh
from dovetail.ops.collectives import UnfusedCollectives

SECONDS = 60.0
"""The number of seconds for which a rank waits for the others."""

T = TypeVar("T")
R = TypeVar("R")


class ThreadCollectives(UnfusedCollectives):
    """Communicate among threads, which share the list ``values`` and ``barrier``."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(values)
        self._values, self._barrier = values, barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.all_reduce``."""
        assert x.is_contiguous()
        return self._exchange(x, lambda values: functools.reduce(torch.add, values))

    def all_gather(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """See ``Collectives.all_gather``."""
        return self._exchange(x, lambda values: torch.cat(values, 1)[:, :width].contiguous())

    def agree(self, ok: bool) -> bool:
        """See ``Collectives.agree``."""
        return self._exchange(ok, all)

    def min(self, value: int) -> int:
        """See ``Collectives.min``."""
        return self._exchange(value, min)

    def abort(self) -> None:
        """Make the other ranks raise ``RankLostError`` where they wait for this one."""
        self._barrier.abort()

    def _exchange(self, value: Any, combine: Callable[[list[Any]], R]) -> R:
        """Return ``combine`` of the values of all ranks. Values may change once this returns."""
        try:
            self._values[self.rank] = value
            self._barrier.wait()
            result = combine(self._values)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankLostError(f"rank {self.rank} of {self.size} waits for a rank that has failed") from error
        return result


def thread_meshes(
    size: int, experts: Literal["tp", "ep"] = "tp", attention: Literal["heads", "data"] = "heads"
) -> list[Mesh]:
    """Return the meshes of ``size`` ranks, for ``run_ranks``. ``experts`` and ``attention``: see ``Mesh``."""
    values: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=SECONDS)
    return [Mesh(ThreadCollectives(rank, values, barrier), experts, attention) for rank in range(size)]


def run_ranks(meshes: Sequence[Mesh], work: Callable[[T], R], given: Sequence[T]) -> list[R]:
    """Call ``work`` with each element of ``given``, one for each of ``meshes``, in threads of their own, and return the
    results in this order. If a rank raises an exception, the others are aborted and the exception is raised."""

    def run(mesh: Mesh, one: T) -> R:
        try:
            return work(one)
        except BaseException:
            assert isinstance(mesh.tp, ThreadCollectives)
            mesh.tp.abort()
            raise

    with ThreadPoolExecutor(len(meshes)) as pool:
        futures = [pool.submit(run, mesh, one) for mesh, one in zip(meshes, given, strict=True)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e.__cause__, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]
