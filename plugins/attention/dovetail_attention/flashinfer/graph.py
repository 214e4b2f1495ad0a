"""Hold what decode graphs read: memory that keeps its address and is updated before each replay."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flashinfer import fast_decode_plan  # pyright: ignore[reportMissingImports]

from dovetail.errors import EngineError
from dovetail_attention.flashinfer.pages import PageRows, count_pages, gather, pinned

if TYPE_CHECKING:
    from dovetail.interfaces.attention import AttentionContext
    from dovetail.types import IntArray

MOST_PAGES = 1 << 24
"""The largest number of page numbers that graphs can hold for the rows of a step, unless the pool has more pages: 64
MiB. A page that several rows share counts once for each of them."""

PLAN_BYTES = 2 << 20
"""The memory of a decode plan: a few int32 for each row and for each multiprocessor of the device."""

TILE_BYTES = 7 * 4
"""The additional memory of a plan for prompts, for each query head and tile of queries."""


class GraphMemory:
    """Hold the memory that all graphs use in turn."""

    def __init__(self, context: AttentionContext) -> None:
        self.page_size = context.pool.page_size
        self.device = context.device
        of_rows = context.max_rows * -(-context.max_context // self.page_size)
        self._size = min(of_rows, max(MOST_PAGES, context.pool.num_pages + context.max_rows))
        tiles = 2 * context.max_rows * context.num_heads if context.batch_invariant else 0
        self._plan_bytes = PLAN_BYTES + tiles * TILE_BYTES
        self._pages: torch.Tensor | None = None
        self._plans: dict[Hashable, torch.Tensor] = {}

    @property
    def pages(self) -> torch.Tensor:
        """Return an int32 tensor that can hold the pages of all rows of a step."""
        if self._pages is None:
            self._pages = torch.zeros(self._size, dtype=torch.int32, device=self.device)
        return self._pages

    def first(self, count: int) -> torch.Tensor:
        """Return the first ``count`` elements of ``pages``. Raises ``EngineError`` if there are fewer."""
        if count > self._size:
            raise EngineError(
                f"the rows of this step have {count} pages; attention flashinfer supports {self._size} in a graph. "
                "Set memory.page_size higher, scheduler.max_running lower, or graphs.decode to false"
            )
        return self.pages[:count]

    def plan_memory(self, layer_options: Hashable) -> torch.Tensor:
        """Return the memory in which layers with these options are planned, in all graphs."""
        if layer_options not in self._plans:
            self._plans[layer_options] = torch.zeros(self._plan_bytes, dtype=torch.uint8, device=self.device)
        return self._plans[layer_options]


class GraphRows:
    """Hold what the graphs of one number of rows read, and one wrapper for each ``LayerOptions`` of their layers."""

    def __init__(self, rows: int, memory: GraphMemory) -> None:
        self.memory = memory
        self.indptr = torch.zeros(rows + 1, dtype=torch.int32, device=memory.device)
        self.last_page_len = torch.ones(rows, dtype=torch.int32, device=memory.device)
        self.wrappers: dict[Any, Any] = {}
        self.now: PageRows
        self._first_layer: int | None = None

    def send(self, kv_lens: IntArray) -> None:
        """Send the lengths of a step to the device. Raises ``EngineError`` if the step has more pages than a graph
        supports."""
        device = self.memory.device
        indptr, last_page_len = count_pages(kv_lens, self.memory.page_size)
        pages = self.memory.first(int(indptr[-1]))
        lens = kv_lens.astype(np.int32)
        self.now = PageRows(pinned(indptr, device), pinned(last_page_len, device), pinned(lens, device), pages)
        self.indptr.copy_(self.now.indptr, non_blocking=True)
        self.last_page_len.copy_(self.now.last_page_len, non_blocking=True)

    def read(self, table: torch.Tensor, layer_id: int) -> None:
        """Gather the pages before the first layer of each step.

        The gather is part of the graph, because what fills ``table`` may be part of it too.
        """
        if self._first_layer is None:
            self._first_layer = layer_id
        if layer_id == self._first_layer:
            gather(table, self.indptr, self.memory.pages)

    def buffers(self) -> dict[str, Any]:
        """Return the keywords for the constructor of a wrapper."""
        return {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self.indptr,
            "paged_kv_indices_buffer": self.memory.pages,
            "paged_kv_last_page_len_buffer": self.last_page_len,
        }

    def plan(self, wrapper: Any, **options: Any) -> None:
        """Plan a wrapper for the first time."""
        indptr, last_page_len, kv_lens, indices = self.now
        wrapper.plan(indptr, indices, last_page_len, seq_lens=kv_lens, **options)

    def plan_again(self, wrapper: Any, **options: Any) -> None:
        """Plan a wrapper that was planned before. Unlike ``plan``, does not copy what is already in place."""
        indptr, last_page_len, _, indices = self.now
        fast_decode_plan(wrapper, indptr, indices, last_page_len, global_override_indptr_cpu=indptr, **options)


class PromptGraphRows(GraphRows):
    """Do the same with wrappers for prompts, for which each row has one query.

    What such a wrapper launches, and where it reads its plan, depends on the number of rows and not on their lengths.
    Its plan copies from host memory. It also copies the pages onto themselves, which has no effect.
    """

    def __init__(self, rows: int, memory: GraphMemory) -> None:
        super().__init__(rows, memory)
        self._on_host = pinned(np.arange(rows + 1, dtype=np.int32), memory.device)
        self._queries = self._on_host.to(memory.device)

    def buffers(self) -> dict[str, Any]:
        """See ``GraphRows``."""
        return {
            "use_cuda_graph": True,
            "qo_indptr_buf": self._queries,
            "paged_kv_indptr_buf": self.indptr,
            "paged_kv_indices_buf": self.memory.pages,
            "paged_kv_last_page_len_buf": self.last_page_len,
        }

    def plan(self, wrapper: Any, *, head_dim: int, **options: Any) -> None:
        """See ``GraphRows``."""
        indptr, last_page_len, kv_lens, indices = self.now
        wrapper.plan(
            self._on_host,
            indptr,
            indices,
            last_page_len,
            head_dim_qk=head_dim,
            seq_lens=kv_lens,
            max_token_per_sequence=1,
            causal=True,
            **options,
        )

    def plan_again(self, wrapper: Any, **options: Any) -> None:
        """Do the same as ``plan``: there is no faster plan for prompts."""
        self.plan(wrapper, **options)
