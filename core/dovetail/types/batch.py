"""Define the engine's view of a step."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dovetail.types.arrays import BoolArray, Int64Array, IntArray
from dovetail.types.drafts import DraftTree
from dovetail.types.plan import AdmittedRequest, PageUpdates, SharedPrefixes, StateSaves, StepPlan

if TYPE_CHECKING:
    import torch


class Attends(Protocol):
    """Describe the object through which layers attend. Its contract is that of ``interfaces.attention.AttentionBackend``, whose
    ``forward_projected`` a subclass of this class need not have."""

    def forward(self, q: torch.Tensor, layer: Any, batch: Batch) -> torch.Tensor: ...

    def forward_projected(self, rows: Any, layer: Any, batch: Batch) -> torch.Tensor | None:
        """Return None: there are only kernels for the single operations."""
        return None


class StoresKV(Protocol):
    """Describe the object through which layers store K and V. ``interfaces.store.KVStore`` documents the contract."""

    def keys(self, layer_id: int) -> torch.Tensor: ...

    def tensors(self, layer_id: int) -> Any: ...

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None: ...


class Phase(enum.StrEnum):
    """Name what the rows of a batch do. A mixed batch has extend rows followed by decode (or verify) rows."""

    EXTEND = "extend"
    DECODE = "decode"
    VERIFY = "verify"
    MIXED = "mixed"


@dataclass(slots=True, eq=False)
class Batch:
    """Hold the engine's view of a step: the arrays of its ``StepPlan``, its requests, and tensors on the device.

    ``Batch.of`` sets the first block of fields, except ``variant``, which the engine sets. ``Engine.launch`` sets the
    second and the third block, except ``hidden`` (set by the model). The docstring of ``engine.runners.Runner.launch``
    defines which of these fields are set when it returns. In an eager step, ``Inputs.prepare`` sets the second block.
    In a step that replays a CUDA graph, the tensors of both blocks are views of the graph's tensors.
    """

    reqs: Sequence[AdmittedRequest]  # [rows]; empty in batches that the engine makes for itself
    num_extend: int
    slots: IntArray
    prefix_lens: IntArray
    extend_lens: IntArray
    samples: BoolArray
    page_updates: PageUpdates
    draft_limits: IntArray | None = None
    shared: SharedPrefixes | None = None  # None: every row reads its own keys
    variant: int = 0  # of a decode batch, set by the engine: the result of AttentionBackend.variant
    drafts: DraftTree | None = None
    rows_version: int = 0
    known_lens: IntArray | None = None
    adapters: IntArray | None = None  # [rows] slots of adapters, set by the engine's caller; None: no row has one
    state_saves: StateSaves | None = None  # set by the engine's caller

    # set by Inputs.prepare or a graph (device tensors, int32 unless noted)
    input_ids: torch.Tensor = field(init=False)  # int64 [tokens]
    positions: torch.Tensor = field(init=False)  # int64 [tokens]
    out_loc: torch.Tensor = field(init=False)  # int64 [tokens] page * page_size + offset: where K and V are written
    qo_indptr: torch.Tensor = field(init=False)  # [rows + 1] row r owns tokens [qo_indptr[r], qo_indptr[r + 1])
    kv_lens: torch.Tensor = field(init=False)  # [rows] prefix_lens + extend_lens
    page_table: torch.Tensor = field(init=False)  # [rows, >= pages of the longest row]
    tree_mask: torch.Tensor | None = field(init=False, default=None)  # bool, see AttentionBackend.plan
    logit_rows: torch.Tensor | None = field(init=False, default=None)  # int64 tokens that need logits; None: all

    # set by the engine before the forward pass
    last: Batch | None = field(init=False, default=None)  # a row per token in ``logit_rows``: ModelArchitecture.forward
    watch: tuple[int, ...] = field(init=False, default=())  # layers whose hidden states a drafter needs
    hidden: torch.Tensor | None = field(init=False, default=None)  # set by the model: see ModelArchitecture.forward
    attn: tuple[Any, ...] = field(init=False)  # per cache group: Attends, or layers.states.StepStates of a state group
    kv: tuple[StoresKV, ...] = field(init=False)  # one pool per cache group
    views: tuple[Batch, ...] = field(init=False, default=())  # of the cache groups after the first, see ``view``
    expanded: Any = field(init=False, default=None)  # layers.latent.ExpandedRows, if prompts expand their latents
    own: Any = field(init=False, default=None)  # layers.own_rows.OwnRows, with data-parallel attention

    @classmethod
    def of(cls, plan: StepPlan, reqs: Sequence[AdmittedRequest]) -> Batch:
        """Return the batch of ``plan``. ``reqs [rows]`` are its requests. The arrays are not copied."""
        # by position, because keywords take twice as long
        return cls(reqs, plan.num_extend, plan.slots, plan.prefix_lens, plan.extend_lens, plan.samples, plan.page_updates,
            plan.draft_limits, plan.shared, 0, plan.drafts, plan.rows_version, plan.known_lens)  # fmt: skip

    def view(self, group: int) -> Batch:
        """Return this batch as a cache group sees it: with its own ``page_table`` and ``out_loc``."""
        return self.views[group - 1] if group else self

    @property
    def own_positions(self) -> torch.Tensor:
        """Return the positions of the tokens that layers of attention compute on this rank, int64 ``[tokens]``: those of ``own``,
        with data-parallel attention, otherwise of all tokens. Models give these positions to ``rotary.forward``."""
        return self.positions if self.own is None else self.own.positions

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that enter the forward pass."""
        return sum(self.extend_lens.tolist())

    @property
    def sampled_reqs(self) -> Sequence[AdmittedRequest]:
        """Return the requests of the rows that get tokens in this step. Decode and verify rows always do."""
        return list(itertools.compress(self.reqs, self.samples.tolist())) if self.num_extend else self.reqs

    @property
    def phase(self) -> Phase:
        """Return the phase of the batch, which depends on the kinds of its rows."""
        if self.num_extend:
            return Phase.MIXED if self.num_extend < len(self.slots) else Phase.EXTEND
        return Phase.DECODE if self.drafts is None else Phase.VERIFY


class LogitRows(NamedTuple):
    """Assign rows of logits to the rows of a step.

    Sampled row i is row ``rows[i]`` of the step and has logits ``[starts[i], starts[i] + spans[i])``: one row, or one
    for each node of its draft tree, the root first.
    """

    rows: Int64Array
    spans: Int64Array
    starts: Int64Array

    @classmethod
    def of(cls, step: StepPlan | Batch) -> LogitRows:
        """Return the layout of the logits of a step."""
        rows = np.flatnonzero(step.samples).astype(np.int64)
        spans = np.ones(len(rows), np.int64) if step.drafts is None else 1 + step.drafts.lens[rows].astype(np.int64)
        return cls(rows, spans, np.cumsum(spans) - spans)
