"""Run FlashInfer as an attention backend: decide which rows go to which of its wrappers, and plan the wrappers."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import flashinfer  # pyright: ignore[reportMissingImports]
import numpy as np
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail_attention.flashinfer.graph import GraphMemory, GraphRows, PromptGraphRows
from dovetail_attention.flashinfer.masks import tree_mask
from dovetail_attention.flashinfer.pages import PageRows, make_rows, pinned

if TYPE_CHECKING:
    from dovetail.types import Batch
    from dovetail_attention.config import FlashInferConfig

TENSOR_CORE_GROUP = 4
"""The number of query heads per key head from which on decode rows are faster on tensor cores. The kernel that does not
use tensor cores supports no groups of 5 to 7."""


class LayerOptions(NamedTuple):
    """Hold the settings of a layer that a FlashInfer plan depends on."""

    window: int | None
    soft_cap: float | None
    scale: float

    @classmethod
    def of(cls, layer: AttentionLayer) -> LayerOptions:
        """Return the settings of ``layer``. Raises ``ConfigError`` if it has sinks."""
        if layer.sinks is not None:
            raise ConfigError(
                "attention flashinfer does not support sinks; set attention to flash_attn, triton or torch_native"
            )
        return cls(layer.window, layer.soft_cap, layer.scale)

    def keywords(self) -> dict[str, Any]:
        """Return the settings as keywords of ``plan``."""
        left = -1 if self.window is None else self.window - 1
        return {"window_left": left, "logits_soft_cap": self.soft_cap, "sm_scale": self.scale}


class RowKind(enum.Enum):
    """Enumerate the kinds of rows. Each kind uses a separate wrapper."""

    PROMPT = enum.auto()  # any number of queries, causal
    DECODE = enum.auto()  # one query each
    TREE = enum.auto()  # several queries that see what a tree mask allows


class RowPart(NamedTuple):
    """Describe rows of a batch that one call serves, and their tokens."""

    kind: RowKind
    rows: slice
    tokens: slice
    pages: PageRows


def divide(batch: Batch, *, batch_invariant: bool) -> list[tuple[RowKind, slice]]:
    """Return the rows of a batch by kind, in order. With ``batch_invariant`` all rows are prompts."""
    rows, split = len(batch.slots), batch.num_extend
    if batch_invariant:
        return [(RowKind.PROMPT, slice(0, rows))]
    if batch.extend_lens[split:].max(initial=1) == 1:
        last = RowKind.DECODE
    else:
        last = RowKind.PROMPT if batch.tree_mask is None else RowKind.TREE
    if last is RowKind.PROMPT:
        return [(last, slice(0, rows))]
    both = [(RowKind.PROMPT, slice(0, split)), (last, slice(split, rows))]
    return [(kind, part) for kind, part in both if part.stop > part.start]


def queries_indptr(batch: Batch, rows: slice, device: torch.device) -> torch.Tensor:
    """Return the index at which the queries of each of ``rows`` begin among the queries of all these rows: int32
    ``[rows + 1]`` in host memory."""
    queries = batch.extend_lens[rows]
    indptr = np.zeros(len(queries) + 1, np.int32)
    np.cumsum(queries, out=indptr[1:])
    return pinned(indptr, device)


def check_invariant(config: FlashInferConfig, context: AttentionContext, capability: tuple[int, int]) -> None:
    """Raise ``ConfigError`` if fa3 cannot be used.

    fa3 has one tile for each head_dim and does not divide keys. fa2 chooses both by the number of queries and keys in a
    step.
    """
    needed = "batch_invariant is true, for which attention flashinfer needs its kernels fa3"
    if capability != (9, 0):
        found = ".".join(map(str, capability))
        raise ConfigError(
            f"{needed}. They need compute capability 9.0; this device has {found}. Set attention to triton"
        )
    if config.variant == "fa2":
        raise ConfigError(f"{needed}; attention.variant is fa2, allowed here: auto, fa3")
    kept = context.pool.keys(0).dtype
    if kept != context.dtype:
        raise ConfigError(
            f"{needed}. They need keys of the model's dtype; the pool has {kept}, the model {context.dtype}. "
            "Set memory.kv_dtype to auto, or attention to triton"
        )


class FlashInfer(AttentionBackend):
    """Use one wrapper for each kind of row and each ``LayerOptions``, planned before the step's first such layer.

    With ``batch_invariant`` it treats all rows as prompts.

    A plan is copied from host memory that the next plan of the same wrapper overwrites. Each step therefore first waits
    until the copies of the previous step have been made. These copies come before that step's kernels, so the host
    hardly ever waits.
    """

    def __init__(self, config: FlashInferConfig, context: AttentionContext) -> None:
        capability = torch.cuda.get_device_capability(context.device)
        if config.variant == "fa3" and capability != (9, 0):
            found = ".".join(map(str, capability))
            raise ConfigError(f"attention.variant is fa3, which needs compute capability 9.0; this device has {found}")
        self._context = context
        self._variant = config.variant
        self._invariant = context.batch_invariant
        if self._invariant:
            check_invariant(config, context, capability)
            self._variant = "fa3"
        if context.pool.keys(0).dtype != context.dtype:  # fa3 multiplies operands of one dtype
            if config.variant == "fa3":
                raise ConfigError("attention.variant is fa3, which needs memory.kv_dtype auto; set it to auto or fa2")
            self._variant = "fa2"
        self._pool, self._page_size = context.pool, context.pool.page_size
        self._tensor_cores = context.num_heads // context.num_kv_heads >= TENSOR_CORE_GROUP
        self._workspace = torch.zeros(config.workspace_mib << 20, dtype=torch.uint8, device=context.device)
        self._copied = torch.cuda.Event()
        self._wrappers: dict[tuple[RowKind, LayerOptions], Any] = {}
        self._planned: set[tuple[RowKind, LayerOptions]] = set()
        self._parts: list[RowPart] = []
        self._graph_memory = GraphMemory(context)
        self._graphs: dict[int, GraphRows] = {}
        self._graph: GraphRows | None = None

    def plan(self, batch: Batch) -> None:
        """Divide the rows and gather their pages. The wrappers are planned in ``forward``."""
        self._copied.synchronize()
        self._graph = None
        self._planned.clear()
        self._parts = []
        first = 0
        for kind, rows in divide(batch, batch_invariant=self._invariant):
            tokens = slice(first, first + int(batch.extend_lens[rows].sum()))
            kv_lens = batch.prefix_lens[rows] + batch.extend_lens[rows]
            pages = make_rows(kv_lens, batch.page_table[rows], self._page_size)
            self._parts.append(RowPart(kind, rows, tokens, pages))
            first = tokens.stop

    def plan_capture(self, batch: Batch) -> None:
        """Plan with one key per row: the shape of a plan depends on the number of rows only."""
        rows = len(batch.slots)
        self._copied.synchronize()
        if rows not in self._graphs:
            kind = PromptGraphRows if self._invariant else GraphRows
            self._graphs[rows] = kind(rows, self._graph_memory)
        self._graph = self._graphs[rows]
        self._graph.send(np.ones(rows, np.int32))

    def plan_replay(self, batch: Batch) -> None:
        """Send this step's lengths, and plan the wrappers of the graph again."""
        self._copied.synchronize()
        graph = self._graphs[len(batch.slots)]
        graph.send(batch.prefix_lens + batch.extend_lens)
        for layer_options, wrapper in graph.wrappers.items():
            graph.plan_again(wrapper, **self._shape(), **layer_options.keywords())
        self._copied.record()

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        layer_options = LayerOptions.of(layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        memory = self._pool.keys(layer.layer_id), self._pool.values(layer.layer_id)
        if self._graph is not None:
            self._graph.read(batch.page_table, layer.layer_id)
            self._graph_wrapper(self._graph, layer_options).run(q, memory, out=out)
            return out
        for part in self._parts:
            self._part_wrapper(part, layer_options, batch).run(q[part.tokens], memory, out=out[part.tokens])
        return out

    def _graph_wrapper(self, graph: GraphRows, layer_options: LayerOptions) -> Any:
        if layer_options not in graph.wrappers:
            kind = RowKind.PROMPT if self._invariant else RowKind.DECODE
            wrapper = graph.wrappers[layer_options] = self._new(kind, **graph.buffers())
            wrapper.reset_workspace_buffer(self._workspace, graph.memory.plan_memory(layer_options))
            graph.plan(wrapper, **self._shape(), **layer_options.keywords())
            self._copied.record()
        return graph.wrappers[layer_options]

    def _part_wrapper(self, part: RowPart, layer_options: LayerOptions, batch: Batch) -> Any:
        key = part.kind, layer_options
        if key not in self._wrappers:
            self._wrappers[key] = self._new(part.kind)
        wrapper = self._wrappers[key]
        if key not in self._planned:
            self._planned.add(key)
            if part.kind is RowKind.DECODE:
                self._plan_decode(wrapper, part.pages, layer_options)
            else:
                self._plan_prompt(wrapper, part, layer_options, batch)
        return wrapper

    def _new(self, kind: RowKind, **buffers: Any) -> Any:
        if kind is RowKind.DECODE:  # fa2, because it divides the keys of long rows
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=self._tensor_cores, backend="fa2", **buffers
            )
        variant = "fa2" if kind is RowKind.TREE else self._variant  # fa3 does not support masks
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=variant, **buffers)

    def _plan_decode(self, wrapper: Any, pages: PageRows, layer_options: LayerOptions) -> None:
        indptr, last_page_len, kv_lens, indices = pages
        wrapper.plan(indptr, indices, last_page_len, seq_lens=kv_lens, **self._shape(), **layer_options.keywords())
        self._copied.record()

    def _plan_prompt(self, wrapper: Any, part: RowPart, layer_options: LayerOptions, batch: Batch) -> None:
        shape = self._shape()
        shape["head_dim_qk"] = shape.pop("head_dim")
        indptr, last_page_len, kv_lens, indices = part.pages
        queries = queries_indptr(batch, part.rows, indices.device)
        options = layer_options.keywords() | {"causal": True}
        if part.kind is RowKind.TREE:  # masks are packed on the device by lengths there, and the library waits for them
            queries, indptr, last_page_len = (x.to(indices.device) for x in (queries, indptr, last_page_len))
            mask = tree_mask(batch, part.rows, part.tokens, layer_options.window)
            options |= {"causal": False, "window_left": -1, "custom_mask": mask}
        longest = int(batch.extend_lens[part.rows].max())
        wrapper.plan(
            queries,
            indptr,
            indices,
            last_page_len,
            seq_lens=kv_lens,
            max_token_per_sequence=longest,
            **shape,
            **options,
        )
        self._copied.record()

    def _shape(self) -> dict[str, Any]:
        """Return the keywords of ``plan`` that never change."""
        context = self._context
        return {
            "num_qo_heads": context.num_heads,
            "num_kv_heads": context.num_kv_heads,
            "head_dim": context.head_dim,
            "page_size": self._page_size,
            "q_data_type": context.dtype,
            "kv_data_type": self._pool.keys(0).dtype,
        }
