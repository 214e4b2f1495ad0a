"""Connect the processes of a mesh, and describe the share of a model that one rank computes."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed import FileStore, PrefixStore, TCPStore

from dovetail.errors import RankLostError
from dovetail.interfaces.mesh import SINGLE, Collectives, Mesh

if TYPE_CHECKING:
    from dovetail.interfaces.model import ModelInfo

TIMEOUT = 300.0
"""The number of seconds after which a rank that does not answer counts as lost. A rank may compile kernels in the meantime.
The executor notices at once that the process of a rank has ended."""


def connect(
    rank: int,
    size: int,
    device: torch.device,
    rendezvous: Path | int,
    timeout: float = TIMEOUT,
    experts: Literal["tp", "ep"] = "tp",
    attention: Literal["heads", "data"] = "heads",
) -> Mesh:
    """Connect this process, rank ``rank`` of ``size``, with the other ranks on this host, and return their mesh.

    ``rendezvous`` is the same for all ranks: a file that does not exist yet, or a free port of 127.0.0.1. On CUDA the
    function makes ``device`` the current device, and the tensors of the collectives must be there. Every wait ends
    after ``timeout`` seconds. ``experts`` and ``attention``: see ``Mesh``. Raises ``RankLostError`` if the ranks do not find each other.
    """
    if size == 1:
        return SINGLE
    from dovetail.ops.collectives import TorchCollectives, gloo_group, nccl_group

    limit = timedelta(seconds=timeout)
    try:
        if isinstance(rendezvous, Path):
            store = FileStore(str(rendezvous), size)
            store.set_timeout(limit)
        else:
            store = TCPStore("127.0.0.1", rendezvous, size, is_master=rank == 0, timeout=limit)
        group = host = gloo_group(PrefixStore("host", store), rank, size, timeout)
        if device.type == "cuda":
            os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast is never used
            torch.cuda.set_device(device)
            group = nccl_group(PrefixStore("tp", store), rank, size, timeout)
    except RuntimeError as error:
        raise RankLostError(
            f"rank {rank} of {size} did not find the other ranks at {rendezvous} within {timeout:g} s: {error}"
        ) from error
    collectives: Collectives = TorchCollectives(rank, size, group, host)
    _warm_up(collectives, device)
    if device.type == "cuda":
        from dovetail.ops.peer import peer_collectives

        collectives = peer_collectives(collectives, PrefixStore("peer", store), device, timeout)
    return Mesh(collectives, experts, attention)


def _warm_up(collectives: Collectives, device: torch.device) -> None:
    """Call each collective once: connections are opened by the first call, which must not be in a captured graph."""
    x = torch.ones(1, 1, device=device)
    collectives.all_reduce(x)
    collectives.all_gather(x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    collectives.agree(True)


def local_info(info: ModelInfo, mesh: Mesh) -> ModelInfo:
    """Return ``info`` with the heads and the KV heads that this rank computes and stores. All other numbers are those of
    the whole model."""
    tp = mesh.of_attention.tp
    if tp.size == 1:
        return info
    return replace(
        info,
        num_heads=tp.share(info.num_heads)[1],
        num_kv_heads=tp.share(info.num_kv_heads)[1],
        cache_groups=tuple(group.share(tp.size) for group in info.cache_groups),
    )


def rank_device(device: str, rank: int) -> torch.device:
    """Return the device of a rank: the ranks of a host use consecutive CUDA devices, and ``device`` is the first."""
    kind, _, index = device.partition(":")
    return torch.device(kind, int(index or 0) + rank) if kind == "cuda" else torch.device(device)
