"""Capture and replay the passes of a drafter's model as CUDA graphs. One copy sends what the host provides for all
passes of a step; then the passes are replayed one after the other.

A graph is captured for each kind of pass and each number of rows of a ladder. It has a fixed number of tokens. Each
token that the rows of a pass do not use becomes a separate row after them, which reads page 0 and writes to page 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dovetail.engine.captures import NO_UPDATES, CaptureOnDemand, GraphRecorder, ladder
from dovetail.engine.draft_layout import Placed, one_each, padding, seen_by, set_lens, wide, wide_shape
from dovetail.engine.draft_pages import DraftPages
from dovetail.engine.graph_keys import fewest_rows
from dovetail.engine.grouped import backends_of, pools_of
from dovetail.engine.inputs import Inputs, pack, unpack
from dovetail.engine.own_drafts import OwnDraftRows, OwnPass, OwnShape, own_bytes, own_padding
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.ops.transfer import to_device
from dovetail.types import Batch

if TYPE_CHECKING:
    from dovetail.engine.draft_layout import Bytes
    from dovetail.engine.grouped import Pools
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.speculative import DraftPass, DraftSteps
    from dovetail.types import IntArray

log = logging.getLogger(__name__)

LIKELY_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Passes of these numbers of rows, and those of the most rows, launch nearly all kernels that passes of other numbers of rows
launch: products have kernels for these sizes, and other kernels fewer."""

State = tuple[torch.Tensor, ...]


class DraftKey(NamedTuple):
    """Identify a captured pass by the index of its ``DraftSteps`` in the cache, its kind, its number of rows, the attention
    backend's variant, and, with data-parallel attention, the level of its own rows, an index in ``OwnDraftRows.levels``."""

    steps: int
    kind: int
    rows: int
    variant: int = 0
    own: int = 0


class DraftLimits(NamedTuple):
    """Describe what graphs must hold: at most ``rows`` rows in a step, ``tokens`` tokens in a pass, and ``context_len``
    tokens of a request. With ``wide``, steps whose passes have several tokens in a row are captured too; the backend
    must then offer attention.verify_graph."""

    rows: int
    tokens: int
    context_len: int
    wide: bool


class CapturedPass(NamedTuple):
    """Hold a pass of ``tokens`` tokens that can be replayed, with up to ``width`` of them in each row. ``batch`` is planned: it has the
    lengths on the host, and tensors of fixed address. With data-parallel attention it has the ``own`` rows. ``kept`` holds
    other tensors that the graph reads, which must stay allocated: also the batch of all rows, if that is not ``batch``."""

    batch: Batch
    tokens: int
    width: int
    own: OwnShape | None
    graph: torch.cuda.CUDAGraph
    kept: tuple[Any, ...]


class DraftGraphs:
    """Capture and replay passes of one draft cache on one attention backend. Not thread-safe."""

    def __init__(
        self,
        steps: Sequence[DraftSteps],
        inputs: Inputs,
        pool: Pools,
        backend: AttentionBackend,
        limits: DraftLimits,
        mesh: Mesh = SINGLE,
        pages: DraftPages | None = None,
    ) -> None:
        """``pages`` are those of ``pool``; None means that they have the numbers of the target's."""
        self.refused: set[DraftKey] = set()
        self.seconds = 0.0  # spent on captures
        self._steps = [one for one in steps if limits.wide or max(one.widths) == 1]
        self._inputs, self._pool, self._backend = inputs, pool, backend
        self._pages = DraftPages(0) if pages is None else pages
        self._context_len = limits.context_len
        self._sizes = [ladder(rows) if (rows := _most_rows(one, limits)) else [] for one in self._steps]
        most = max(
            [sizes[-1] * max(one.widths) for one, sizes in zip(self._steps, self._sizes, strict=True) if sizes] + [1]
        )
        widest = max([width for one in self._steps for width in one.widths] + [1])
        device = inputs.device
        self._own = OwnDraftRows.of(mesh)
        self._own_levels = [0]  # those that have occurred in passes
        size = len(pack(padding(most, 2)))
        size += 0 if self._own is None else len(own_padding(OwnShape(most, 2, most, 2)))
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._table = torch.zeros(most, inputs.pages.shape[1], dtype=torch.int32, device=device)
        self._mask = torch.zeros(most * widest, dtype=torch.bool, device=device)
        self._states: dict[int, State] = {}
        self._captured: dict[DraftKey, CapturedPass] = {}
        self._captures = CaptureOnDemand(self)
        self._recorder = GraphRecorder(device, mesh)

    @property
    def num_captured(self) -> int:
        """Return the number of graphs that exist now."""
        return len(self._captured)

    def missing(self) -> Iterator[DraftKey]:
        """Return the keys that are not captured yet. For each ``DraftSteps``, keys with few rows come first."""
        keys = (
            DraftKey(at, kind, rows, own=own)
            for own in self._own_levels
            for at, (one, sizes) in enumerate(zip(self._steps, self._sizes, strict=True))
            for rows in sizes
            if own < len(self._own_counts(at, rows))
            for kind in range(len(one.widths))
        )
        return (key for key in keys if key not in self._captured and key not in self.refused)

    def likely(self, variants: Sequence[int]) -> list[DraftKey]:
        """Return the keys of passes that together launch nearly all kernels, the most rows first. ``variants`` are those
        of the backend for passes with one token in each row."""
        return [
            DraftKey(at, kind, rows, variant)
            for variant in variants
            for at, (one, sizes) in enumerate(zip(self._steps, self._sizes, strict=True))
            for rows in reversed(sizes)
            if rows in LIKELY_ROWS or rows == sizes[-1]
            for kind, width in enumerate(one.widths)
            if not variant or (width == 1 and self._backend.has_variant(variant, fewest_rows(sizes, rows)))
        ]

    def larger(self, key: DraftKey) -> Iterator[DraftKey]:
        """See ``Captures``. A pass runs only in its own graph, because all passes of a step have the same rows."""
        return iter(())

    def is_captured(self, key: DraftKey) -> bool:
        """Return True if the graph exists."""
        return key in self._captured

    def run(self, steps: DraftSteps, slots: IntArray, passes: Sequence[DraftPass], state: State) -> State | None:
        """See ``DraftCache.run``. If a graph is missing, do nothing and return None. A graph is captured once it has
        been needed often enough."""
        keys = self._keys(steps, slots, passes)
        if keys is None:
            return None
        ready = [self._captures.is_ready(key) for key in dict.fromkeys(keys)]  # no short circuit: each key is counted
        if not all(ready):
            return None
        static = self._state(keys[0].steps)
        own = tuple(tensor[: len(slots)] for tensor in static)
        for target, source in zip(own, state, strict=True):
            target.copy_(source)
        self._replay(keys, slots, passes, max(steps.widths))
        return own

    def _replay(self, keys: Sequence[DraftKey], slots: IntArray, passes: Sequence[DraftPass], stride: int) -> None:
        inputs = self._inputs
        longest = max(int(((one.starts + one.counts) * (one.counts > 0)).max()) for one in passes)
        table = self._pages.of(inputs.page_table[slots, : -(-longest // inputs.page_size)])
        captured = [self._captured[key] for key in keys]
        packed = self._packed(captured, table, passes, stride)
        if self._own is not None:
            rows = self._own.kept(slots)
            table, own_parts = table[rows], [OwnPass.of(given, rows) for given in passes]
            own_packed = own_bytes(inputs, table, own_parts, [one.own for one in captured if one.own is not None])
            packed = [np.concatenate(both) for both in zip(packed, own_packed, strict=True)]
            passes = [given for given, _ in own_parts]
        of_table = np.zeros(-(-table.nbytes // 8) * 8, np.uint8)
        of_table[: table.nbytes] = table.reshape(-1).view(np.uint8)
        sent = to_device(np.concatenate([of_table, *packed]), inputs.device)
        self._table[: len(table), : table.shape[1]].copy_(unpack(sent, [table])[0])
        self._table[len(table) :, 0].zero_()
        at = len(of_table)
        for one, given, given_bytes in zip(captured, passes, packed, strict=True):
            self._buffer[: len(given_bytes)].copy_(sent[at : at + len(given_bytes)])
            at += len(given_bytes)
            set_lens(one.batch, given)
            self._backend.plan_replay(one.batch)
            one.graph.replay()

    def _packed(
        self, captured: Sequence[CapturedPass], table: IntArray, passes: Sequence[DraftPass], stride: int
    ) -> list[Bytes]:
        """Return the bytes that the host sends for each pass."""
        ones = [given for one, given in zip(captured, passes, strict=True) if one.width == 1]
        rows = max((one.tokens for one in captured if one.width == 1), default=0)
        packed = iter(one_each(self._inputs, table, ones, rows) if ones else [])
        return [
            next(packed) if one.width == 1 else wide(self._inputs, table, given, one.tokens, stride)
            for one, given in zip(captured, passes, strict=True)
        ]

    def _keys(self, steps: DraftSteps, slots: IntArray, passes: Sequence[DraftPass]) -> list[DraftKey] | None:
        """Return the keys of the graphs for ``passes``, or None if no graph holds that number of rows. All passes with
        one token in each row run in graphs of the same size."""
        if steps not in self._steps:
            return None
        at = self._steps.index(steps)
        if len(slots) > max(self._sizes[at], default=0):
            return None
        needed = [int(np.count_nonzero(one.counts)) for one in passes]
        single = [steps.widths[one.kind] == 1 for one in passes]
        most = max((rows for rows, alone in zip(needed, single, strict=True) if alone), default=0)
        variant = self._variant(slots, passes[single.index(True)], most) if most else 0
        sizes, keys = self._sizes[at], []
        for one, rows, alone in zip(passes, needed, single, strict=True):
            count = most if alone else rows
            size = next(size for size in sizes if size >= count)
            own = 0 if self._own is None else self._own.level_for(slots[:count], sizes, size)
            keys.append(DraftKey(at, one.kind, size, variant * alone, own))
        self._own_levels += [own for own in dict.fromkeys(key.own for key in keys) if own not in self._own_levels]
        return keys

    def _own_counts(self, at: int, rows: int) -> list[int]:
        """Return the number of own rows at each level of a pass of ``rows`` rows, 0 if there are none."""
        return [0] if self._own is None else self._own.levels(self._sizes[at], rows)

    def _variant(self, slots: IntArray, given: DraftPass, rows: int) -> int:
        """Return the backend's variant for the first ``rows`` rows of a pass. The following passes use it as well,
        because their rows are only a few tokens longer."""
        ones = given.counts[:rows]
        return self._backend.variant(Batch([], 0, slots[:rows], given.starts[:rows], ones, ones > 0, NO_UPDATES))

    def _state(self, at: int) -> State:
        if at not in self._states:
            self._states[at] = self._steps[at].state(self._sizes[at][-1])
        return self._states[at]

    @torch.inference_mode()
    def capture(self, key: DraftKey) -> None:
        """Capture the pass of ``key``. This takes a fraction of a second."""
        start = time.perf_counter()
        batch, own, run, kept = self._prepared(key)
        graph, _ = self._recorder.record(run)
        width = self._steps[key.steps].widths[key.kind]
        self._captured[key] = CapturedPass(batch, key.rows * width, width, own, graph, kept)
        self.seconds += time.perf_counter() - start
        log.debug("captured a pass of a drafter, %s: %.2f s", key, time.perf_counter() - start)

    @torch.inference_mode()
    def rehearse(self, key: DraftKey) -> None:
        """Launch the kernels of the pass of ``key``, in order to note them (see ``ops.triton.ahead``). Only page 0 of the
        draft cache is written, and the state that graphs share."""
        self._prepared(key)[2]()

    def _prepared(self, key: DraftKey) -> tuple[Batch, OwnShape | None, Callable[[], torch.Tensor], tuple[Any, ...]]:
        """Return the batch of the pass of ``key`` that is planned for a capture, the shape of its own rows, a function that runs the
        pass, and what holds the tensors that it reads beside those of this object."""
        steps = self._steps[key.steps]
        width, stride = steps.widths[key.kind], max(steps.widths)
        tokens, own = key.rows * width, None
        packed = pack(padding(tokens, width))
        state = tuple(tensor[: key.rows] for tensor in self._state(key.steps))
        batch = attends = self._static_batch(tokens, width, key.variant)
        placed = Placed.of(self._buffer, tokens, width, stride)
        batch.positions, batch.out_loc, batch.kv_lens, index, batch.qo_indptr = placed
        if self._own is not None:
            own = OwnShape(self._own_counts(key.steps, key.rows)[key.own] * width, width, tokens, stride)
            attends = self._static_batch(own.tokens, width, key.variant)
            batch.own = self._own.rows(attends, self._buffer[len(packed) :], own)
            packed = np.concatenate([packed, own_padding(own)])
        mask, count = steps.mask(state), len(attends.slots)
        if mask is not None:
            attends.tree_mask = self._mask[: count * width].view(count, width)
        self._backend.plan_capture(attends)

        def run() -> torch.Tensor:
            if mask is not None:
                assert attends.tree_mask is not None
                seeing = index if batch.own is None else index.index_select(0, batch.own.tokens)
                attends.tree_mask.copy_(seen_by(mask, seeing, width))
            steps.run(key.kind, batch, index, state)
            return index

        self._buffer[: len(packed)].copy_(to_device(packed, self._inputs.device))
        self._table[:, 0].zero_()
        return attends, own, run, (batch, index, mask, *state)

    def _static_batch(self, tokens: int, width: int, variant: int) -> Batch:
        """Return a batch that is planned and captured, without the tensors of ``Placed``. On the host, each row has the largest
        number of tokens and the longest context."""
        lens, slots = np.full(tokens, width, np.int32), np.zeros(tokens, np.int32)
        batch = Batch([], 0, slots, self._context_len - lens, lens, slots == 0, NO_UPDATES, variant=variant)
        batch.page_table = self._table[:tokens]
        batch.attn, batch.kv = backends_of(self._backend), pools_of(self._pool)
        batch.views = (batch,) * (len(batch.kv) - 1)
        if width > 1:
            batch.drafts = wide_shape(lens)
        return batch


def _most_rows(steps: DraftSteps, limits: DraftLimits) -> int:
    return min(limits.rows, limits.tokens // max(steps.widths))
