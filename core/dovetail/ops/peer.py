"""Communicate among GPUs of one host through memory that all of them can access."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore

from dovetail.interfaces.mesh import Collectives
from dovetail.ops.ipc import ipc_memory
from dovetail.ops.norm import add_rms_norm
from dovetail.ops.triton import peer_rules

if TYPE_CHECKING:
    from torch.distributed import Store

    from dovetail.ops.triton.peer import Channels

logger = logging.getLogger(__name__)

Share = Callable[[int], tuple[torch.Tensor, list[int]]]
"""Allocate memory that all ranks can access, of the given number of bytes: a new int32 tensor, and the addresses of the
memory of all ranks. All ranks call it in the same order."""
CLOCK = 2_000_000_000
"""No supported GPU has more clock cycles per second."""


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import peer

    return peer


class PeerCollectives(Collectives):
    """Add up and gather through peer memory where ``peer_rules`` selects that, and through ``others`` elsewhere.

    ``share`` allocates the memory: for each width of rows, at its first use outside of a capture. A graph that is
    captured before that use communicates through ``others``. A kernel that waits longer than ``timeout`` seconds for
    another rank fails, and CUDA with it: the device is lost. All calls must run on streams that wait for each other,
    so that no two of them run at the same time.
    """

    adds_parts = True

    def __init__(self, others: Collectives, share: Share, timeout: float) -> None:
        self.rank, self.size = others.rank, others.size
        self._others, self._share = others, share
        self._limit = int(timeout * CLOCK)
        self._channels: dict[tuple[str, int], Channels | None] = {}
        self._memory: list[torch.Tensor] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.all_reduce``."""
        found = self._sum(x, None, None, 0.0) if x.ndim == 2 else None
        return self._others.all_reduce(x) if found is None else found[1]

    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Collectives.all_reduce_norm``."""
        found = self._sum(x, residual, weight, eps)
        if found is not None:
            return found
        if x.ndim == 3:
            x = functools.reduce(torch.add, x.unbind()).to(residual.dtype)
        if weight.dtype is not residual.dtype:
            total = self.all_reduce(x)
            return add_rms_norm(total, residual, weight, eps), total
        return self._others.all_reduce_norm(x, residual, weight, eps)

    def all_gather(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """See ``Collectives.all_gather``. Zeros of the result may have another sign than those of ``x``."""
        found = self._gather(x, self.size * x.shape[1] if width is None else width)
        return self._others.all_gather(x, width) if found is None else found

    def agree(self, ok: bool) -> bool:
        """See ``Collectives.agree``."""
        return self._others.agree(ok)

    def min(self, value: int) -> int:
        """See ``Collectives.min``."""
        return self._others.min(value)

    def close(self) -> None:
        """See ``Collectives.close``."""
        self._channels.clear()
        self._memory.clear()
        self._others.close()

    def _sum(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return ``(norm, sum)``, or None if the sum is not for peer memory."""
        like = x if residual is None else residual
        rows, width = like.shape
        if not rows or like.dtype not in (torch.bfloat16, torch.float16) or width % 8:
            return None
        if weight is not None and weight.dtype is not like.dtype:
            return None
        kind = "one_shot" if peer_rules.is_one_shot(self.size, rows, 2 * width) else "two_shot"
        channels = self._find(kind, 2 * width)
        if channels is None:
            return None
        return getattr(_triton(), kind)(channels, x, residual, weight, eps, self._limit)

    def _gather(self, x: torch.Tensor, width: int) -> torch.Tensor | None:
        """Return the rows of all ranks, or None if they are not for peer memory."""
        n, m = x.shape
        item = x.element_size()
        strides = (m * item, width * item, x.stride(0) * item, x.data_ptr())
        if not n or not x.is_floating_point() or item not in (2, 4):
            return None
        if x.stride(1) != 1 or any(number % 16 for number in strides):
            return None
        channels = self._find("gather", m * item)
        if channels is None:
            return None
        return _triton().gather(channels, x, width, self._limit)

    def _find(self, kind: str, row_bytes: int) -> Channels | None:
        """Return the channels for one kind of kernel and width of rows. Allocates them if no graph is being captured,
        and returns None otherwise."""
        key = kind, row_bytes
        if key not in self._channels:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return None
            self._channels[key] = self._allocate(kind, row_bytes)
        return self._channels[key]

    def _allocate(self, kind: str, row_bytes: int) -> Channels:
        triton = _triton()
        if kind == "gather":
            block = peer_rules.GATHER_CHUNKS * triton.CHUNK
            blocks = -(-row_bytes // block)
            count = blocks * max(1, peer_rules.GATHER_BYTES // row_bytes)
            space, row_bytes = triton.gather_bytes(self.size, count, peer_rules.GATHER_CHUNKS), block
        else:
            one_shot = kind == "one_shot"
            rows = peer_rules.channel_rows(self.size, row_bytes, one_shot=one_shot)
            count = rows if one_shot else rows // self.size
            space = (triton.one_shot_bytes if one_shot else triton.two_shot_bytes)(self.size, rows, row_bytes)
        memory, addresses = self._share(space)
        triton.empty(memory)
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)
        self.agree(True)  # no rank sends before every rank's channels are empty
        self._memory.append(memory)
        logger.info("%d MiB of memory shared with other GPUs: %s of rows of %d bytes", space >> 20, kind, row_bytes)
        uses = torch.zeros(count, dtype=torch.int32, device=memory.device)
        table = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        return triton.Channels(self.rank, self.size, table, uses, row_bytes)


_numbers = itertools.count()


def symmetric_memory(store: Store, rank: int, size: int, device: torch.device) -> Share:
    """Return a function that allocates memory of ``device`` through torch's symmetric memory. ``store`` is for this
    function alone, on every rank."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # NVLink multicast is never used
    from torch._C import _distributed_c10d
    from torch.distributed import _symmetric_memory

    internals: Any = _distributed_c10d
    name = f"dovetail.peer.{next(_numbers)}"
    group = internals.ProcessGroup(store, rank, size)  # torch 2.11 takes rank and store from a group with this name
    group._set_group_name(name)
    internals._register_process_group(name, group)
    internals._SymmetricMemory.set_group_info(name, rank, size, store)  # older versions take them from here

    def share(space: int) -> tuple[torch.Tensor, list[int]]:
        assert group.size() == size  # torch's registry does not keep the group
        memory = _symmetric_memory.empty(-(-space // 4), dtype=torch.int32, device=device)
        pointers = list(internals._SymmetricMemory.rendezvous(memory, name).buffer_ptrs)
        offset = memory.data_ptr() - pointers[rank]
        return memory, [pointer + offset for pointer in pointers]

    return share


def peer_collectives(others: Collectives, store: Store, device: torch.device, timeout: float) -> Collectives:
    """Return collectives that use peer memory, or ``others`` if a rank cannot access the memory of all ranks, with a
    warning that says why. ``others`` are the collectives of ranks on this host, on consecutive CUDA devices.
    ``store`` is for this function alone."""
    rank, size = others.rank, others.size
    reason = _unreachable(rank, size, device)
    if not others.agree(reason is None):
        logger.warning("rank %d: NCCL adds up and gathers: %s", rank, reason or "another rank reports why")
        return others
    for make in (symmetric_memory, ipc_memory):
        share: Share | None = None
        try:
            share = make(PrefixStore(make.__name__, store), rank, size, device)
            _try(share, rank, others)
            reason = None
        except (RuntimeError, OSError, AttributeError, TypeError) as error:  # whatever another version of torch lacks
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if others.agree(reason is None) and share is not None:
            logger.info("rank %d: adds up and gathers through peer memory (%s)", rank, make.__name__)
            return PeerCollectives(others, share, timeout)
        logger.warning("rank %d: no peer memory by %s: %s", rank, make.__name__, reason or "another rank reports why")
    logger.warning("rank %d: NCCL adds up and gathers", rank)
    return others


def _try(share: Share, rank: int, others: Collectives) -> None:
    """Share a little memory. Raises ``RuntimeError`` if it has no address on this device."""
    memory, addresses = share(1 << 20)
    if len(addresses) != others.size or not all(addresses) or addresses[rank] != memory.data_ptr():
        raise RuntimeError(f"the addresses of the ranks' memory are {addresses}, of its own {memory.data_ptr()}")


def _unreachable(rank: int, size: int, device: torch.device) -> str | None:
    """Return why ranks cannot access each other's memory, or None if nothing is known against it."""
    if size > peer_rules.MOST_RANKS:
        return f"there are {size} ranks; allowed: up to {peer_rules.MOST_RANKS}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "the kernels need compute capability 9.0"
    first = device.index - rank
    for other in range(first, first + size):
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"CUDA device {device.index} cannot access the memory of device {other}"
    return None
