"""Compute how much memory adapters (LoRA) take, for ``dovetail explain``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.mesh import Mesh, OneRank

if TYPE_CHECKING:
    from dovetail.registry import Resolved

GIB = 1 << 30


class _OneOf(OneRank):
    """Be the first of ``size`` ranks, for a model that computes nothing."""

    def __init__(self, size: int) -> None:
        self.size = size


def explain_adapters(resolved: Resolved) -> dict[str, Any] | None:
    """Return the largest ``rank`` of an adapter, the ``modules`` that may have one, the ``bytes`` that one takes on each rank, on the device
    and in host memory, and how many are on the device (``max_resident``) and in host memory (``most_host``). Return None if
    the config does not enable adapters. Loads no weights."""
    import torch

    from dovetail.engine.adapter_files import AdapterRegions
    from dovetail.engine.adapter_places import adapted_modules
    from dovetail.engine.adapters import rank_of_slots, slots_for
    from dovetail.engine.build import build_model
    from dovetail.loop.adapters import most_in_host_memory
    from dovetail.memory.pool import pool_dtype
    from dovetail.registry.ranks import expert_division

    config = resolved.config
    section, parallel = config.adapters, config.parallel
    if not section.enabled:
        return None
    dtype = pool_dtype(config.model.dtype)
    experts = expert_division(parallel.experts, resolved.model_info, parallel.tp)
    mesh = Mesh(_OneOf(parallel.tp), experts, parallel.attention)
    model = build_model(resolved.model.load(), resolved.model_info, torch.device("meta"), dtype, mesh)
    found = adapted_modules(model)
    kinds, rank = slots_for(model, found, resolved)
    kernels = resolved.machine.device_type == "cuda"
    size = AdapterRegions(found, kinds, rank_of_slots(rank, kernels=kernels)).size * dtype.itemsize
    most = most_in_host_memory(section, rank, size * parallel.tp)
    return {
        "rank": rank,
        "modules": kinds,
        "bytes": size,
        "ranks": parallel.tp,
        "max_resident": section.max_resident,
        "most_host": most,
    }


def adapters_line(adapters: Mapping[str, Any]) -> str:
    """Return the line that shows what adapters take."""
    size, ranks = adapters["bytes"], adapters["ranks"]
    device, host = adapters["max_resident"], adapters["most_host"]
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    return (
        f"an adapter of rank up to {adapters['rank']} of {', '.join(adapters['modules'])} takes {size / GIB:.3g} GiB{each}: "
        f"{device} on the device take {device * size / GIB:.3g} GiB{each}, up to {host} in host memory {host * size * ranks / GIB:.3g} GiB"
    )
