"""Communicate among ranks with torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from dovetail.errors import RankLostError
from dovetail.interfaces.mesh import Collectives
from dovetail.ops.norm import add_rms_norm

if TYPE_CHECKING:
    from torch.distributed import Store


class UnfusedCollectives(Collectives):
    """Compute ``all_reduce_norm`` as ``all_reduce``, followed by the kernel that adds the residual and normalises."""

    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Collectives.all_reduce_norm``."""
        total = self.all_reduce(x)
        return add_rms_norm(total, residual, weight, eps), total


class TorchCollectives(UnfusedCollectives):
    """Communicate through a process group of torch.distributed, ``group``. ``host`` is a group of the same ranks for
    numbers in host memory; it may be the same group."""

    def __init__(self, rank: int, size: int, group: Any, host: Any) -> None:
        self.rank, self.size = rank, size
        self._group, self._host = group, host

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.all_reduce``. Overwrites ``x``."""
        if x.numel():
            self._wait(self._group.allreduce, [x])
        return x

    def all_gather(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """See ``Collectives.all_gather``."""
        n, m = x.shape
        whole = self.size * m if width is None else width
        if not n:
            return x.new_empty(0, whole)
        found = x.new_empty(self.size * n, m)
        self._wait(self._group._allgather_base, found, x.contiguous())
        beside = found.view(self.size, n, m).transpose(0, 1)
        return beside.reshape(n, self.size * m)[:, :whole].contiguous()

    def agree(self, ok: bool) -> bool:
        """See ``Collectives.agree``."""
        return bool(self.min(int(ok)))

    def min(self, value: int) -> int:
        """See ``Collectives.min``."""
        given = torch.tensor([value])
        options: Any = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MIN
        self._wait(self._host.allreduce, [given], options)
        return int(given)

    def close(self) -> None:
        """See ``Collectives.close``."""
        for group in {id(group): group for group in (self._group, self._host)}.values():
            group.shutdown()

    def _wait(self, launch: Callable[..., Any], *arguments: Any) -> None:
        """Launch a collective, and wait for it: for gloo on the host, for NCCL on the current stream."""
        try:
            launch(*arguments).wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.rank} of {self.size} cannot communicate any more: another rank has ended or did not answer in "
                f"time ({str(error).strip().partition(chr(10))[0]}); the log of that rank says why"
            ) from error


def gloo_group(store: Store, rank: int, size: int, timeout: float) -> Any:
    """Return a process group of CPUs of this host, which communicates over its loopback interface. Every wait ends
    after ``timeout`` seconds."""
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout)
    return gloo(store, rank, size, options)


def nccl_group(store: Store, rank: int, size: int, timeout: float) -> Any:
    """Return a process group of the current CUDA devices of this host's processes. A collective that takes longer than
    ``timeout`` seconds ends the process."""
    nccl: Any = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout)
    return nccl(store, rank, size, options)
