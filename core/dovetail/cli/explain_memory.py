"""Compute what fits into the memory of keys, values and states, for ``dovetail explain``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.interfaces.cache import CacheGroup
    from dovetail.interfaces.store import PageBytes
    from dovetail.registry import Resolved

GIB = 1 << 30


def explain_memory(resolved: Resolved) -> dict[str, Any]:
    """Return how many tokens fit into the memory that an engine takes on each rank, ``bytes``, and for each cache group the
    tokens, or states of running requests and snapshots, that it alone could keep there. ``pools`` is the number of ranks that
    keep different tokens.

    What a GPU has left when weights are loaded is not known here: unless ``memory`` sets a size, ``per_gib`` is True and the
    numbers are those of one GiB. The caches of a drafter, which take a part of the memory, are not counted.
    """
    import torch

    from dovetail.engine.memory import Needs, budget_for, describe_groups, group_bytes, share_memory, with_arena
    from dovetail.interfaces.store import StoreContext
    from dovetail.memory.pool import pool_dtype

    config, cpu = resolved.config, torch.device("cpu")
    memory, info = config.memory, resolved.model_info
    dtype, own = pool_dtype(memory.kv_dtype), pool_dtype(config.model.dtype)
    stores = resolved.store.build(StoreContext(memory.page_size, dtype, cpu, info.quantization, own))
    groups = [group.share(config.parallel.head_ranks) for group in info.cache_groups]
    sizes = [group_bytes(group, stores, memory.page_size) for group in groups]
    if memory.num_pages is None and memory.kv_gib is None and resolved.machine.device_type != "cpu":
        return {**_per_gib(groups, sizes, memory.page_size), "pools": config.parallel.num_pools}
    assert config.model.context_len is not None, "resolve sets the context"
    budget = budget_for(config, sizes, cpu, config.model.context_len, Needs())
    if share_memory(groups, resolved.store.spec.offers):
        budget = with_arena(budget, config, sizes)
    keys = ("kind", "window", "most_tokens", "most_snapshots")
    found = describe_groups(budget, groups, stores, memory.page_size)
    shown = [{key: group[key] for key in keys if group.get(key) is not None} for group in found]
    pools = config.parallel.num_pools
    return {"per_gib": False, "bytes": budget.pool, "tokens": budget.pool_tokens, "groups": shown, "pools": pools}


def _per_gib(groups: Sequence[CacheGroup], sizes: Sequence[PageBytes], page_size: int) -> dict[str, Any]:
    shown = []
    for group, size in zip(groups, sizes, strict=True):
        window = {} if group.window is None else {"window": group.window}
        count, name = GIB // size.page, "most_tokens" if size.block else "most_snapshots"
        shown.append({"kind": str(group.kind), **window, name: count * page_size if size.block else count})
    column = sum(size.page for size in sizes if size.block)
    return {"per_gib": True, "bytes": GIB, "tokens": GIB // column * page_size if column else 0, "groups": shown}


def memory_line(memory: Mapping[str, Any]) -> str:
    """Return the line that shows what fits, with what each group alone could keep if there are several."""
    groups, tokens, pools = memory["groups"], memory["tokens"], memory["pools"]
    size = "each GiB of memory holds" if memory["per_gib"] else f"{memory['bytes'] / GIB:.2f} GiB of memory hold"
    if len(groups) == 1 and tokens:
        ranks = f" on each of {pools} ranks, {pools * tokens:,} together" if pools > 1 else ""
        return f"{size} {tokens:,} tokens{ranks}"
    each = [
        f"{group['most_snapshots']:,} states or snapshots"
        if "most_snapshots" in group
        else f"{group['most_tokens']:,} tokens in layers of kind {group['kind']}"
        for group in groups
    ]
    size += f" on each of {pools} ranks" if pools > 1 else ""
    return f"{size} {f'{tokens:,} tokens in all layers; alone ' if tokens else ''}{', or '.join(each)}"
