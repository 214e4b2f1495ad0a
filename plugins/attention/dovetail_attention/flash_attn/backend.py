"""Run FlashAttention's kernels as an attention backend: decide which rows go into which call."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.ops.merge import merge_states
from dovetail_attention.flash_attn.providers import AttentionCall, open_first, open_schedule

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail.types import Batch
    from dovetail_attention.config import FlashAttnConfig

log = logging.getLogger(__name__)

MAX_SPLITS = 32

SHARED_SPLITS = 8
"""The largest number of parts in which a group's keys are read at the same time. A few groups must still keep the
device busy, and the number of groups is not known when a graph is captured."""

QUERY_TILE = 128
BUSY_TILES = 2
"""The number of query tiles per multiprocessor from which on keys are not split. The kernel's own rule would split long
prompts."""

BYTES_PER_SECOND = 3.6e12
SHARING_SECONDS = 14e-6
"""What reading shared prefixes costs in addition to the bytes it reads: one more call and the merge. In seconds per
layer, on H200."""


class CallRows(NamedTuple):
    """Describe rows of a batch that one call serves: their tokens, and arguments of ``AttentionCall``."""

    tokens: slice
    cu_q: torch.Tensor | None
    used_k: torch.Tensor
    table: torch.Tensor
    max_q: int
    max_k: int
    splits: int = 0


class FlashAttention(AttentionBackend):
    """Run prompt rows in one call and decode rows in another, because there is a separate kernel for one query per row.

    With ``batch_invariant`` it serves all rows by one call that is the same in every step. FlashAttention-3 chooses its
    tiles by the bounds it is given, not by the lengths on the device. Its tiles of keys begin at multiples of their
    size, except where a window hides the first keys: there they begin with the first query of a tile.
    """

    latents = False
    """Hold True if only providers are opened that also attend over latents."""

    def __init__(self, config: FlashAttnConfig, context: AttentionContext) -> None:
        capability = torch.cuda.get_device_capability(context.device)
        opened, reasons = open_first(
            capability,
            context.pool.page_size,
            config.provider,
            config.library,
            batch_invariant=context.batch_invariant,
            latents=self.latents,
        )
        if opened is None:
            raise ConfigError(f"attention {config.kind} has no kernels: {'; '.join(reasons)}")
        self.provider, self._attend = opened
        self._make_schedule = open_schedule(self.provider, config.library)
        self._schedules: dict[tuple[int, bool], tuple[int, torch.Tensor]] = {}
        """The divisions of keys of the present plan, each with the layer that computes it."""
        log.info("attention %s uses the kernels of %s", config.kind, self.provider)
        self._pool = context.pool
        self._heads, self._kv_heads, self._head_dim = context.num_heads, context.num_kv_heads, context.head_dim
        self._max_context = context.max_context
        self._invariant = context.batch_invariant
        self._processors = torch.cuda.get_device_properties(context.device).multi_processor_count
        self._parts: list[CallRows] = []

    def shares(self, batch: Batch) -> bool:
        """Return True if reading the saved bytes would take longer than one more call and the merge."""
        assert batch.shared is not None
        return batch.shared.saved * self._token_bytes() / BYTES_PER_SECOND > SHARING_SECONDS

    def _token_bytes(self) -> int:
        """Return the bytes that a layer reads of one token."""
        return 2 * self._kv_heads * self._head_dim * self._pool.keys(0).element_size()

    def plan(self, batch: Batch) -> None:
        """Divide the rows into calls. Copies nothing and does not wait for the device."""
        self._schedules = {}
        if self._invariant:
            self._parts = [self._all_rows(batch)]
            return
        rows, split = len(batch.slots), batch.num_extend
        if 0 < split < rows and batch.extend_lens[split:].max() > 1:
            split = rows  # drafts are verified in the same step as prompts: one ragged call for all rows
        tokens = int(batch.extend_lens[:split].sum())
        self._parts = []
        if split:
            self._parts.append(self._ragged(batch, split, tokens))
        if split < rows:
            one_each = batch.extend_lens[split:].max() == 1
            max_k = int((batch.prefix_lens + batch.extend_lens)[split:].max())
            self._parts.append(
                CallRows(
                    slice(tokens, None),
                    None if one_each else batch.qo_indptr,
                    batch.kv_lens[split:],
                    batch.page_table[split:],
                    int(batch.extend_lens[split:].max()),
                    max_k,
                    self._splits(rows - split) if one_each else 0,
                )
            )

    def _ragged(self, batch: Batch, rows: int, tokens: int) -> CallRows:
        """Describe the call for the first rows, with several queries each. Enough queries keep the device busy without
        splitting keys."""
        max_q, max_k = (int(lens[:rows].max()) for lens in (batch.extend_lens, batch.prefix_lens + batch.extend_lens))
        splits = 1 if tokens * self._heads >= BUSY_TILES * QUERY_TILE * self._processors else 0
        cu_q, used_k, table = batch.qo_indptr[: rows + 1], batch.kv_lens[:rows], batch.page_table[:rows]
        return CallRows(slice(0, tokens), cu_q, used_k, table, max_q, max_k, splits)

    def _all_rows(self, batch: Batch) -> CallRows:
        """Describe the call for all rows, with bounds that hold for every batch. The kernel would not be causal if
        ``max_q`` were 1."""
        longest = max(2, self._max_context)
        return CallRows(slice(None), batch.qo_indptr, batch.kv_lens, batch.page_table, longest, longest, splits=1)

    def _splits(self, rows: int) -> int:
        """Return the number of parts for the keys of rows with one query each, so that the device is busy."""
        return min(MAX_SPLITS, max(1, self._processors // (rows * self._kv_heads)))

    def plan_capture(self, batch: Batch) -> None:
        """Plan one call for all rows and the longest context.

        The number of parts is chosen so that the smallest number of verify rows that the tokens can form keeps the
        device busy.
        """
        self._schedules = {}
        if self._invariant:
            self._parts = [self._all_rows(batch)]
            return
        rows, cu_q, max_q = len(batch.slots), None, 1
        if batch.drafts is not None:
            cu_q, max_q = batch.qo_indptr, int(batch.extend_lens.max())
            rows = -(-len(batch.positions) // max_q)
        table, splits = batch.page_table, self._splits(rows)
        self._parts = [CallRows(slice(None), cu_q, batch.kv_lens, table, max_q, self._max_context, splits)]

    def plan_replay(self, batch: Batch) -> None:
        """Do nothing: the kernels read lengths and tables on the device."""

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        if batch.shared is not None:
            return self._forward_shared(q, layer, batch)
        outs = [self._call(q[rows.tokens], layer, rows, causal=True)[0] for rows in self._parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _forward_shared(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        groups, (whole,) = batch.shared, self._parts
        assert groups is not None
        shared = CallRows(
            slice(None),
            groups.indptr,
            groups.group_lens,
            groups.group_table,
            len(batch.slots),
            whole.max_k,
            SHARED_SPLITS,
        )
        own = whole._replace(cu_q=batch.qo_indptr, used_k=groups.own_lens, table=groups.own_table)
        of_shared, of_own = (
            self._call(q, layer, shared, causal=False, sinks=False),
            self._call(q, layer, own, causal=True),
        )
        return merge_states(*of_shared, *of_own)

    def _call(
        self, q: torch.Tensor, layer: AttentionLayer, rows: CallRows, *, causal: bool, sinks: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run(
            AttentionCall(
                q,
                self._pool.keys(layer.layer_id),
                self._pool.values(layer.layer_id),
                rows.cu_q,
                rows.used_k,
                rows.table,
                rows.max_q,
                rows.max_k,
                layer.scale,
                causal,
                layer.window,
                layer.soft_cap,
                layer.sinks.to(q.dtype) if sinks and layer.sinks is not None else None,
                rows.splits,
            ),
            layer,
        )

    def _run(self, call: AttentionCall, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a call. If it has one query per row and reads keys in several parts, the first layer of a plan computes how
        the keys are divided, and the other layers use that: a microsecond less in each layer on H200. Other calls would
        gain nothing."""
        if self._make_schedule is None or call.cu_q is not None or call.splits <= 1 or call.window is not None:
            return self._attend(call)
        key = call.used_k.data_ptr(), call.soft_cap is not None
        found = self._schedules.get(key)
        if found is None or found[0] == layer.layer_id:
            found = self._schedules[key] = layer.layer_id, self._make_schedule(call)
        return self._attend(call._replace(schedule=found[1]))


def probe(section: FlashAttnConfig, config: Config) -> str | None:
    """Return why no provider that ``section`` allows can be used on the current device, or None if one can."""
    capability = torch.cuda.get_device_capability()
    opened, reasons = open_first(
        capability,
        config.memory.page_size,
        section.provider,
        section.library,
        batch_invariant=config.batch_invariant,
    )
    return None if opened else "; ".join(reasons)
