"""How many pages the KV pool gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.errors import ConfigError
from dovetail.memory.pool import PagedKVPool

if TYPE_CHECKING:
    from dovetail.config.sections import Config
    from dovetail.interfaces.cache import CacheGroup

GIB = 1 << 30


def num_pages_for(config: Config, group: CacheGroup, dtype: torch.dtype, device: torch.device, context_len: int) -> int:
    """Pages of the pool, page 0 included: ``memory.num_pages``, or as many as the memory budget holds, but no more than
    every running request could fill. Raises ``ConfigError`` if not even one page fits."""
    memory = config.memory
    if memory.num_pages is not None:
        return memory.num_pages
    budget = memory.kv_gib * GIB if memory.kv_gib is not None else _budget(device, memory.fraction)
    page_bytes = PagedKVPool.bytes_per_page(group, memory.page_size, dtype)
    useful = config.scheduler.rows * (-(-context_len // memory.page_size) + 1) + 1
    pages = min(int(budget // page_bytes), useful)
    if pages < 2:
        raise ConfigError(
            f"memory for the KV pool is {budget / GIB:.2f} GiB and one page of {memory.page_size} tokens takes "
            f"{page_bytes / GIB:.4f} GiB; raise memory.kv_gib or memory.fraction, or lower memory.page_size"
        )
    return pages


def _budget(device: torch.device, fraction: float) -> float:
    if device.type == "cpu":
        return GIB
    free, total = torch.cuda.mem_get_info(device)
    return free - (1 - fraction) * total
