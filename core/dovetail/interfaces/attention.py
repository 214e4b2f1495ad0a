"""Define the interface of attention backends, which plan once per step and run once per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from dovetail.interfaces.store import KVStore
    from dovetail.types import Batch


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Describe what a backend is built for: one cache group of one model on one device.

    ``max_rows`` is the largest number of rows of a batch, ``max_context`` the largest number of tokens of a row.
    ``dtype`` is the dtype of queries and outputs; the pool may have another one.

    With ``batch_invariant``, the bits of a query's output depend only on the query, on the keys and values of its row
    up to and including it, and on the layer. They do not depend on other rows or padding, on how many queries of its
    row are in the step, on the phase (extend, decode, verify), on whether the step is replayed from a graph, or on
    which pages the row has. Batches then have neither ``tree_mask`` nor ``shared``. The engine sets it only for
    backends that offer ``attention.batch_invariant``.

    ``value_dim`` is set for a latent group (see ``CacheGroup``): the values are the first ``value_dim`` numbers of the
    keys, in the same memory, and outputs have their size. Only backends that offer ``attention.latent`` get it.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    pool: KVStore
    max_rows: int
    max_context: int
    batch_invariant: bool = False
    value_dim: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Hold the constants of one attention layer.

    ``layer_id`` is the index of the layer in the pool of its cache group. Logits are multiplied by ``scale``. With
    ``window=w``, position i sees positions (i - w, i]. ``soft_cap=c`` replaces a logit s by c * tanh(s / c) (Gemma 2).
    ``sinks`` (float32 ``[num_heads]``) are the logits of one additional key per head, which has no value and takes part
    in the softmax (GPT-OSS).
    """

    layer_id: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


class ProjectedRows(NamedTuple):
    """Hold the projection ``qkv [rows, heads of q, k and v, head_dim]`` of rows with one token each, and what follows before attention, on
    CUDA. Only the stride of its first dimension may be another than that of a contiguous tensor.

    The heads of q and k are normalised if ``norm`` is set: the weights of both, ``[head_dim]``, and epsilon. Then they are
    rotated: element i becomes ``x[i] * c[i] + x[(i + head_dim / 2) % head_dim] * s[i]``, where ``c`` and ``s`` are
    ``table[positions[r]]`` for row r, of float32 ``[positions, 2, head_dim]``. K and V are written at ``out_loc`` (int64
    ``[rows]``) of the pool.
    """

    qkv: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    norm: tuple[torch.Tensor, torch.Tensor, float] | None
    out_loc: torch.Tensor


class AttentionBackend(ABC):
    """Compute attention over a paged KV pool. There is one instance per cache group and process.

    Query token t of row r has the position ``batch.positions[t]`` and sees the keys ``[0, position]`` of its own row,
    as far as the window of the layer includes them. The keys and values of the step itself are in the pool when
    ``forward`` is called. Pages that belong to no row may contain anything, NaN included, and must not influence a
    result.
    """

    def __init__(self, config: BaseModel, context: AttentionContext) -> None:
        """Build the backend. ``config`` is its own config section.

        The constructor may allocate workspaces and must not read the pool. Raises ``ConfigError`` if the backend cannot
        serve ``context``.
        """

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Prepare a step for ``forward``.

        The backend reads the batch's ``*_lens`` on the host, and ``qo_indptr``, ``kv_lens`` and ``page_table`` on the
        device. The engine calls this once per step, before the first layer. If ``batch.tree_mask`` is set, it is bool
        ``[tokens, w]`` and applies to the last ``extend_lens[r]`` keys of row r, which are the keys of the row's own
        tokens in this step. Query t sees the j-th of these keys only where ``tree_mask[t, j]`` is True. It sees earlier
        keys as usual. Only backends that offer ``attention.tree_mask`` get such a batch.
        """

    @abstractmethod
    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """Return the attention output of ``q`` (``[tokens, num_heads, head_dim]``), with its shape and dtype.

        The model calls this once per layer of a planned batch. If the pool's values have another size than its keys,
        the output has the size of the values. Does not mutate ``q`` or the pool.
        """

    def forward_projected(self, rows: ProjectedRows, layer: AttentionLayer, batch: Batch) -> torch.Tensor | None:
        """Compute all that is between the projection of a step with one token in each row and its attention output ``[rows,
        num_heads, head_dim]``, with fewer kernels than one by one. Writes K and V of the tokens to the pool.

        Return None, without writing anything, if there are no such kernels for the planned batch: the caller then does the same
        in steps, and calls ``forward``.
        """
        return None

    def shares(self, batch: Batch) -> bool:
        """Return True if reading each prefix in ``batch.shared`` once per group is faster than reading it once per row.

        The engine calls this before ``plan``, for decode batches of backends that offer ``attention.shared_prefix``.
        The method is a cost model that uses lengths on the host only; ``batch.shared.saved`` is the number of tokens that need
        not be read. If it returns False, the engine clears ``batch.shared``; otherwise ``plan`` and ``forward`` see it. If a model
        has several cache groups, the engine calls the backend of each group with what that group shares. The backend of a sliding group
        is called only if it offers ``attention.shared_window``; ``batch.shared.window`` is then the window of its layers.
        """
        return False

    def variant(self, batch: Batch) -> int:
        """Return the number of the implementation that is best for this decode batch, judged by lengths on the host.

        A backend can, for example, have one set of kernels for rows of similar lengths and another for rows of very
        different lengths. The engine stores the result in ``batch.variant`` before it calls ``plan`` or
        ``plan_capture``, and captures separate graphs for each variant that occurs. 0 is the default.
        """
        return 0

    def has_variant(self, variant: int, rows: int) -> bool:
        """Return whether ``self.variant`` can return the number ``variant`` for a decode batch of at least ``rows`` rows. The engine does
        not ask for 0, which is always possible. If the answer is False, it neither compiles kernels ahead nor captures graphs for such
        batches before one occurs."""
        return True

    def plan_capture(self, batch: Batch) -> None:
        """Plan a decode batch whose device tensors keep their addresses, for a graph of ``len(batch.slots)`` rows.

        The engine calls this before it captures ``forward``. The captured ``forward`` must not synchronise, and must
        not depend on host numbers that change from step to step. At this time, the host lengths of every row are those
        of the longest context. There is a separate graph for batches with ``batch.shared``. Needs ``attention.graph``;
        otherwise raises ``NotImplementedError``.

        For backends that offer ``attention.verify_graph``, the batch can also consist of verify rows (``batch.drafts``
        is set). The graph then has ``len(batch.positions)`` tokens and as many rows. ``extend_lens`` on the host are
        the largest number of queries that a row can have. How the tokens are divided among the rows is in ``qo_indptr``
        and changes from step to step: rows may have no query at all, and every token belongs to a row. ``tree_mask``
        (``[tokens, largest number of queries]``) also keeps its address. A graph has a tree mask in all of its steps or
        in none.
        """
        raise NotImplementedError(f"{type(self).__name__} does not offer attention.graph")

    def plan_replay(self, batch: Batch) -> None:
        """Update what the backend keeps on the host for the graph of this number of rows.

        The engine calls this before each replay, with the batch that was given to ``plan_capture``. Its lengths on the
        host are now the lengths of this step. Padding rows have ``prefix_lens`` 0 and read page 0. They have one query,
        or, in a batch of verify rows, one or none. The device tensors of the batch get the values of this step within
        the graph, before the first layer. Needs ``attention.graph``; otherwise raises ``NotImplementedError``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not offer attention.graph")
