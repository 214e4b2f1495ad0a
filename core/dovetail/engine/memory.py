"""Divide the device's memory among weights, activations (as measured), graphs, and the KV pool, which gets the rest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from dovetail.engine.draft_pages import DraftPages
from dovetail.engine.progress import size_text
from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.executor import ArenaLayout
from dovetail.interfaces.features import Feature
from dovetail.interfaces.store import PageBytes
from dovetail.memory.arena import make_layout

if TYPE_CHECKING:
    from torch import nn

    from dovetail.config.sections import Config
    from dovetail.interfaces.cache import CacheGroup
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.store import KVStoreFactory

GIB = 1 << 30
CPU_POOL_BYTES = GIB
SNAPSHOTS = 7
"""The number of snapshots of states for each running request from which on the memory is not made larger."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Count the bytes that are not available to the pool. ``activations`` is what a step takes in addition to weights
    and pool, measured with a step of ``tokens`` tokens (0 means not measured). ``graphs`` is reserved for graphs that
    are captured later."""

    weights: int = 0
    activations: int = 0
    tokens: int = 0
    graphs: int = 0

    def text(self) -> str:
        """Return the text for messages."""
        measured = f"measured with {self.tokens} tokens" if self.tokens else "not measured"
        parts = f"weights {size_text(self.weights)}, activations {size_text(self.activations)} ({measured})"
        return f"{parts}, graphs {size_text(self.graphs)} reserved"


@dataclass(frozen=True, slots=True)
class Budget:
    """Describe how the memory of a device is divided. ``num_pages`` is the pool's number of pages, page 0 included, and
    ``pool_tokens`` the number of tokens that it holds. The other numbers are bytes; ``free`` is what remains when all
    the rest is in use. On a CPU ``total`` and ``free`` are 0, because only the pool is counted there. ``arena`` divides
    the memory of several cache groups; ``num_pages`` and ``pool_tokens`` then count what fits if all groups keep
    everything."""

    total: int
    needs: Needs
    pool: int
    num_pages: int
    pool_tokens: int
    free: int
    arena: ArenaLayout | None = None

    def __str__(self) -> str:
        """Return the line for the log."""
        left = f", {size_text(self.free)} left free" if self.total else ""
        return f"memory: {self.needs.text()}, KV pool {size_text(self.pool)} = {self.pool_tokens:,} tokens{left}"

    def to_json(self) -> dict[str, int]:
        """Return the numbers for /server_info."""
        needs = asdict(self.needs)
        measured = needs.pop("tokens")
        return {
            "total_bytes": self.total,
            **{f"{name}_bytes": value for name, value in needs.items()},
            "measured_tokens": measured,
            "kv_pool_bytes": self.pool,
            "kv_pool_tokens": self.pool_tokens,
            "free_bytes": self.free,
        }


def measure_peak(run: Callable[[], None], device: torch.device) -> int:
    """Return the peak of the bytes that ``run`` needs on a CUDA device, including what the allocator wastes. Memory
    that is allocated already, and memory that stays allocated after the first run, is not counted. On a CPU, return 0
    without calling ``run``.

    ``run`` is the largest possible step: a prompt chunk of ``scheduler.chunk_size`` tokens and, if steps are mixed, a
    token for each of ``scheduler.max_running`` rows; then the logits of these rows, and sampling. It runs twice: what
    the first run loads or keeps for good (kernels, workspaces) is in use from then on, and ``budget_for`` counts it as
    used memory.
    """
    if device.type == "cpu":
        return 0
    run()
    _release(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    # the first number misses what fitted into memory reserved before; the second misses what the allocator wastes
    peak = max(torch.cuda.max_memory_reserved(device) - reserved, torch.cuda.max_memory_allocated(device) - allocated)
    _release(device)
    return peak


def _release(device: torch.device) -> None:
    """Give the memory that torch has reserved and does not use back to the device."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()


def module_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters and buffers, each counted once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def budget_for(
    config: Config,
    groups: Sequence[PageBytes],
    device: torch.device,
    context_len: int,
    needs: Needs,
    draft_page_bytes: int = 0,
) -> Budget:
    """Divide the device's memory as it is now: the weights are loaded, and the stores are not allocated. All
    of them have the same number of pages; a page of each of the ``groups`` takes these bytes (see ``group_bytes``).
    ``draft_page_bytes`` are the bytes that each page also takes in the caches of a drafter. Beside memory that slots of
    states share, a drafter has pages for all of it.

    If ``memory.num_pages`` is set, the pool gets that number of pages. Otherwise, if ``memory.kv_gib`` is set, it gets
    as many as fit into that. Otherwise it gets as many as ``memory.fraction`` allows (on a CPU, as fit into
    ``CPU_POOL_BYTES``), but not more than all running requests together could fill. Raises ``ConfigError`` if not even
    one page besides page 0 fits, or if the requested size does not fit into the memory."""
    memory = config.memory
    page = sum(group.page for group in groups if group.block) + draft_page_bytes
    states, rows = sum(group.page for group in groups if not group.block), config.scheduler.rows
    if draft_page_bytes and states:
        states += states * draft_page_bytes // next(group.page for group in groups if group.block)
    limit = rows * (-(-context_len // memory.page_size) + 1) + 1
    if not page:  # a model of state groups only: a page is a slot
        page, states, limit = states, 0, rows * (1 + SNAPSHOTS) + 1
    free, total = (0, 0) if device.type == "cpu" else torch.cuda.mem_get_info(device)
    available = free - needs.activations - needs.graphs
    if memory.num_pages is not None:
        pages = memory.num_pages + -(-rows * 2 * states // page)
    else:
        allowed = CPU_POOL_BYTES if device.type == "cpu" else available - int((1 - memory.fraction) * total)
        allowed = allowed if memory.kv_gib is None else int(memory.kv_gib * GIB)
        pages = allowed // page
        if memory.kv_gib is None:
            pages = min(pages, limit + -(-rows * (1 + SNAPSHOTS) * states // page))
        if pages < 2:
            raise ConfigError(_too_little(config, needs, allowed, page, free, total))
    if total and pages * page > available:
        raise ConfigError(_too_much(config, needs, pages * page, free, total))
    left = available - pages * page if total else 0
    return Budget(total, needs, pages * page, pages, (pages - 1) * memory.page_size, left)


def group_bytes(group: CacheGroup, stores: KVStoreFactory, page_size: int) -> PageBytes:
    """Return the bytes of a page of ``group``, or of a slot if it keeps states."""
    if group.kind is CacheGroupKind.STATE:
        return PageBytes(stores.slot_bytes(group), 0)
    return stores.page_bytes(group, page_size)


def share_memory(groups: Sequence[CacheGroup], store_offers: Container[Feature], draft_page_bytes: int = 0) -> bool:
    """Return whether the cache groups draw from one memory: if one of them keeps states, or if there are several and the
    store can, unless one keeps latents or a drafter has pages too."""
    if any(group.kind is CacheGroupKind.STATE for group in groups):
        return True
    paged = len(groups) > 1 and not draft_page_bytes and all(g.kind is not CacheGroupKind.LATENT for g in groups)
    return paged and Feature.STORE_SLABS in store_offers


def agreed_budget(divide: Callable[[], Budget], mesh: Mesh) -> Budget:
    """Return this rank's budget, which ``divide`` computes, with the number of pages of the rank that has the fewest.
    Raises ``ConfigError`` if ``divide`` does, on this rank or on another."""
    try:
        budget = divide()
    except BaseException:
        mesh.tp.min(0)
        raise
    pages = mesh.tp.min(budget.num_pages)
    if not pages:
        raise ConfigError("the memory of another rank does not suffice; the log of that rank says why")
    if pages == budget.num_pages:
        return budget
    page, tokens = budget.pool // budget.num_pages, budget.pool_tokens // (budget.num_pages - 1)
    freed = (budget.num_pages - pages) * page if budget.total else 0
    return replace(
        budget, pool=pages * page, num_pages=pages, pool_tokens=(pages - 1) * tokens, free=budget.free + freed
    )


def with_arena(budget: Budget, config: Config, groups: Sequence[PageBytes], draft_page_bytes: int = 0) -> Budget:
    """Return ``budget`` with a memory that several groups share, whose pages and slots take these bytes. If
    ``memory.num_pages`` is set, it holds that number of pages of all groups together, and two slots of states for each row,
    which may take a few slabs more; otherwise it takes no more bytes. In a model without pages, slots are counted
    instead. ``draft_page_bytes`` are the bytes that a page of the first group with pages also takes in the caches of a
    drafter, which have memory beside all slabs."""
    page_size, rows, given = config.memory.page_size, config.scheduler.rows, config.memory.num_pages
    states = [not group.block for group in groups]
    sizes = [group._replace(page=group.page - group.beside) for group in groups]
    beside = 1 + sum({Fraction(group.beside, size.page) for group, size in zip(groups, sizes, strict=True)})
    drafts = Fraction(draft_page_bytes, next(size.page for size in sizes if size.block)) if draft_page_bytes else 0
    slots = (given or 0) - 1 if all(states) else 2 * rows
    layout = make_layout(sizes, int(budget.pool / (beside + drafts)), None if given is None else given - 1, slots)
    if not layout.columns:
        raise ConfigError(_too_little(config, budget.needs, budget.pool, layout.slab_bytes, budget.free, budget.total))
    used = int(layout.num_slabs * layout.slab_bytes * beside)
    if draft_page_bytes:
        used += DraftPages.in_arena(layout).num_pages * draft_page_bytes
    free = budget.free + budget.pool - used if budget.total else 0
    tokens = 0 if all(states) else layout.columns * page_size
    return replace(budget, pool=used, num_pages=layout.columns + 1, pool_tokens=tokens, free=free, arena=layout)


def describe_groups(
    budget: Budget, groups: Sequence[CacheGroup], stores: KVStoreFactory, page_size: int
) -> list[dict[str, Any]]:
    """Return for each cache group what it keeps, in how many layers, the bytes of a token on this rank, and the number of
    tokens that the group alone could keep in the memory. For a state group: the bytes of a snapshot, and the number of
    running requests and snapshots together."""
    arena, pages = budget.arena, [budget.num_pages - 1] * len(groups)
    if arena is not None:
        pages = [(arena.num_slabs - 1) * own for own in arena.pages]

    def sizes(group: CacheGroup, count: int) -> dict[str, int]:
        if group.kind is CacheGroupKind.STATE:
            return {"bytes_per_snapshot": stores.slot_bytes(group), "most_snapshots": count}
        return {"bytes_per_token": stores.page_bytes(group, 1).page, "most_tokens": count * page_size}

    return [
        {"kind": str(group.kind), "window": group.window, "layers": group.num_layers, **sizes(group, count)}
        for group, count in zip(groups, pages, strict=True)
    ]


def _too_little(config: Config, needs: Needs, allowed: int, page: int, free: int, total: int) -> str:
    memory = config.memory
    text = (
        f"the memory for the KV pool is {max(allowed, 0) / GIB:.2f} GiB; it needs at least two pages of {memory.page_size} "
        f"tokens, {2 * page / GIB:.4f} GiB"
    )
    if memory.kv_gib is not None:
        return f"{text}; raise memory.kv_gib ({memory.kv_gib:g}), or lower memory.page_size"
    return f"{text}{_spent(config, needs, free, total)}" if total else f"{text}; set memory.kv_gib"


def _too_much(config: Config, needs: Needs, pool: int, free: int, total: int) -> str:
    memory = config.memory
    given = (
        f"memory.num_pages is {memory.num_pages}"
        if memory.num_pages is not None
        else f"memory.kv_gib is {memory.kv_gib}"
    )
    return (
        f"{given}, a KV pool of {pool / GIB:.2f} GiB, which does not fit; lower it{_spent(config, needs, free, total)}"
    )


def _spent(config: Config, needs: Needs, free: int, total: int) -> str:
    """Return the part of an error message that explains what uses the memory and how to get more."""
    others = total - free - needs.weights
    return (
        f" (of {total / GIB:.1f} GiB, {free / GIB:.1f} GiB are free: {needs.text()}, {size_text(others)} in use by CUDA and "
        f"other processes on this device). To get more memory: stop other processes on the device; raise memory.fraction "
        f"({config.memory.fraction:g}); lower scheduler.chunk_size ({config.scheduler.chunk_size}) for smaller activations, or "
        "graphs.max_rows for fewer graphs"
    )
