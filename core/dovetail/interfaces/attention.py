"""Attention backends: plan once per step, forward once per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from dovetail.interfaces.cache import KVPool
    from dovetail.types import Batch


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What a backend is built for: one cache group of one model on one device.

    With ``batch_invariant`` the bits of a query's output depend on nothing but the query, the keys and values of its row up to
    it, and the layer: not on other rows or padding, on how many queries of its row are in the step, on the phase (extend, decode,
    verify), on whether it is replayed from a graph, or on which pages are the row's. Batches then have neither ``tree_mask`` nor
    ``shared``. Only backends that offer ``attention.batch_invariant`` are asked for it.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    pool: KVPool
    max_rows: int
    max_context: int
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one attention layer.

    ``layer_id`` is its index in its cache group's pool. ``window=w`` lets position i see positions (i - w, i].
    ``soft_cap=c`` turns logits s into c * tanh(s / c) (Gemma 2). ``sinks`` float32 ``[num_heads]`` are logits of an extra
    key without a value that takes part in the softmax (GPT-OSS).
    """

    layer_id: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(ABC):
    """Attention over a paged KV pool. One instance per cache group and process.

    Query token t of row r stands at ``batch.positions[t]`` and sees keys ``[0, position]`` of its own row, narrowed by
    the layer's window. Keys and values of the step itself are already in the pool when ``forward`` is called. Pages
    that no row owns may hold anything, NaN included, and must not influence a result.
    """

    def __init__(self, config: BaseModel, context: AttentionContext) -> None:
        """``config`` is this backend's own section. May allocate workspaces; must not read the pool."""

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Prepare this step from the batch's ``*_lens`` (host) and ``qo_indptr / kv_lens / page_table`` (device).

        Called once per step, before the first layer. With ``batch.tree_mask``, bool ``[tokens, w]``: of the last
        ``extend_lens[r]`` keys of row r, query t sees key j (counted from the row's first query) only where
        ``tree_mask[t, j]``; earlier keys it sees as usual. Only backends that offer ``attention.tree_mask`` get one.
        """

    @abstractmethod
    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """Attend. ``q`` is ``[tokens, num_heads, head_dim]``; returns the same shape and dtype. Mutates nothing."""

    def shares(self, batch: Batch) -> bool:
        """Whether reading ``batch.shared`` once per group is faster than reading every row's whole past, for this decode
        batch: a cost model on host numbers. Where it answers False the engine clears ``batch.shared``. Only backends that
        offer ``attention.shared_prefix`` are asked, and see ``batch.shared`` in ``plan`` and ``forward``. A batch of a model
        with windowed layers never has it."""
        return False

    def variant(self, batch: Batch) -> int:
        """Which of several ways to attend serves this decode batch best, by host lengths: kernels for rows of like lengths, or
        of very different ones. The answer is in ``batch.variant`` when ``plan`` and ``plan_capture`` are called; each variant
        that is met gets graphs of its own. 0 is the usual one."""
        return 0

    def plan_capture(self, batch: Batch) -> None:
        """Plan a decode batch whose device tensors keep their addresses, for a graph of ``len(batch.slots)`` rows (and one
        more where ``batch.shared`` is set). Called before the capture; ``forward`` is then captured, and must neither
        synchronize nor depend on host numbers that change from step to step. ``kv_lens`` on the host are those of the
        longest context at this time. Needs ``attention.graph``.

        With ``attention.verify_graph`` also a batch of verify rows (``batch.drafts`` is set), for a graph of
        ``len(batch.positions)`` tokens and as many rows. ``extend_lens`` on the host are the most queries that a row can have;
        how the tokens are divided among rows is in ``qo_indptr``, and changes from step to step: rows may have no query at
        all, and all tokens are some row's. ``tree_mask [tokens, most queries]`` keeps its address too; a graph has one for
        all its steps, or for none."""
        raise NotImplementedError(f"{type(self).__name__} does not offer attention.graph")

    def plan_replay(self, batch: Batch) -> None:
        """Called before each replay, with the batch of ``plan_capture``, whose host lengths now hold this step's values; rows
        that pad it have ``prefix_lens`` 0 and read page 0, with one query or (verify rows) none. Its device tensors get
        theirs within the graph, before the first layer. Brings up to date what the backend keeps on the host for the graph of this many rows. Needs
        ``attention.graph``."""
        raise NotImplementedError(f"{type(self).__name__} does not offer attention.graph")
