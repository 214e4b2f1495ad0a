"""CUDA graphs of a drafter's own passes: what the host knows of all of them travels in one copy, then each is replayed.

A graph is captured for each kind of pass and each of a ladder of row counts. It holds a fixed number of tokens; those that the
rows do not have are rows of their own behind them, which read page 0 and write to page 0.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.engine.captures import NEEDED_BEFORE_CAPTURE, NO_UPDATES, Recorder, ladder, try_capture
from dovetail.engine.inputs import Inputs, pack, unpack
from dovetail.ops.transfer import to_device
from dovetail.types import Batch, DraftTree

if TYPE_CHECKING:
    from dovetail.engine.inputs import Array
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.speculative import DraftPass, DraftSteps
    from dovetail.memory.pool import PagedKVPool
    from dovetail.types import IntArray

log = logging.getLogger(__name__)

State = tuple[torch.Tensor, ...]


class DraftKey(NamedTuple):
    """A captured pass: of which steps of the room, which kind, for how many rows, and the attention backend's variant."""

    steps: int
    kind: int
    rows: int
    variant: int = 0


class DraftLimits(NamedTuple):
    """What graphs must hold: ``rows`` of a step, ``tokens`` of a pass, places of a text. ``wide``: also passes of several tokens a
    row, for which the backend offers attention.verify_graph."""

    rows: int
    tokens: int
    context_len: int
    wide: bool


def pass_arrays(
    inputs: Inputs, table: IntArray, given: DraftPass, tokens: int, stride: int
) -> tuple[Array, Array, Array, Array, Array]:
    """What a pass needs of the host, filled up to ``tokens`` tokens and as many rows: the index of each token among ``stride`` of
    each row, positions and places in the pool (int64 ``[tokens]``), ``kv_lens [tokens]`` and ``qo_indptr [tokens + 1]``. ``table`` has the
    pages of the rows."""
    counts = given.counts[given.counts > 0]
    rows, total = len(counts), int(counts.sum())
    ends = np.cumsum(counts)
    row_of = np.repeat(np.arange(rows), counts)
    nth = np.arange(total) - np.repeat(ends - counts, counts)
    places = given.starts[row_of] + nth
    index, positions, out_loc = np.zeros((3, tokens), np.int64)
    index[:total] = row_of * stride + nth
    positions[:total] = places if given.positions is None else given.positions
    out_loc[:total] = inputs.locate(row_of, places, table)
    kv_lens, indptr = np.ones(tokens, np.int32), np.full(tokens + 1, tokens, np.int32)
    kv_lens[:rows] = given.starts[:rows] + counts
    indptr[0], indptr[1 : rows + 1] = 0, ends
    indptr[rows + 1 : rows + 1 + tokens - total] = np.arange(total + 1, tokens + 1)
    return index, positions, out_loc, kv_lens, indptr


def set_lens(static: Batch, given: DraftPass) -> None:
    """Set the host's lengths of a captured batch to those of a pass, filled up."""
    rows = int((given.counts > 0).sum())
    fill = len(static.positions) - int(given.counts.sum())
    static.prefix_lens[:rows], static.prefix_lens[rows:] = given.starts[:rows], 0
    static.extend_lens[:rows], static.extend_lens[rows : rows + fill] = given.counts[:rows], 1
    static.extend_lens[rows + fill :] = 0


def wide_shape(counts: IntArray) -> DraftTree:
    """That rows have so many queries; how they hang together is in the mask."""
    width = max(int(counts.max()) - 1, 1)
    nothing = np.zeros((len(counts), width), np.int32)
    return DraftTree(nothing, nothing + np.arange(-1, width - 1, dtype=np.int32), (counts - 1).astype(np.int32))


class Captured(NamedTuple):
    """A pass that can be replayed. ``batch`` holds the host's lengths, and tensors of fixed address; ``size`` is that of its
    arrays in bytes."""

    batch: Batch
    size: int
    graph: torch.cuda.CUDAGraph


class DraftGraphs:
    """Captures and replays passes of one room on one attention backend. Not thread-safe."""

    def __init__(
        self,
        steps: Sequence[DraftSteps],
        inputs: Inputs,
        pool: PagedKVPool,
        backend: AttentionBackend,
        limits: DraftLimits,
    ) -> None:
        self.refused: set[DraftKey] = set()
        self.seconds = 0.0  # spent on captures
        self._steps = [one for one in steps if limits.wide or max(one.widths) == 1]
        self._inputs, self._pool, self._backend = inputs, pool, backend
        self._context_len = limits.context_len
        self._sizes = [ladder(rows) if (rows := _most_rows(one, limits)) else [] for one in self._steps]
        most = max(
            [sizes[-1] * max(one.widths) for one, sizes in zip(self._steps, self._sizes, strict=True) if sizes] + [1]
        )
        widest = max([width for one in self._steps for width in one.widths] + [1])
        device = inputs.device
        self._buffer = torch.zeros(len(pack(self._padding(most))), dtype=torch.uint8, device=device)
        self._table = torch.zeros(most, inputs.pages.shape[1], dtype=torch.int32, device=device)
        self._mask = torch.zeros(most * widest, dtype=torch.bool, device=device)
        self._states: dict[int, State] = {}
        self._captured: dict[DraftKey, Captured] = {}
        self._needed: Counter[DraftKey] = Counter()
        self._recorder = Recorder(device)

    @property
    def num_captured(self) -> int:
        """Graphs there are now."""
        return len(self._captured)

    def missing(self) -> Iterator[DraftKey]:
        """The graphs that are still to be captured, those of few rows first."""
        wanted = (
            DraftKey(at, kind, rows)
            for at, (one, sizes) in enumerate(zip(self._steps, self._sizes, strict=True))
            for rows in sizes
            for kind in range(len(one.widths))
        )
        return (key for key in wanted if key not in self._captured and key not in self.refused)

    def is_captured(self, key: DraftKey) -> bool:
        """True if the graph can be replayed at once."""
        return key in self._captured

    def run(self, steps: DraftSteps, slots: IntArray, passes: Sequence[DraftPass], state: State) -> State | None:
        """See ``DraftRoom.run``. None, with nothing done, where a graph is missing: it is captured once it has been needed often
        enough."""
        keys = self._keys(steps, slots, passes)
        if keys is None:
            return None
        ready = [self._is_ready(key) for key in dict.fromkeys(keys)]  # each of them counts
        if not all(ready):
            return None
        static = self._state(keys[0].steps)
        own = tuple(tensor[: len(slots)] for tensor in static)
        for target, source in zip(own, state, strict=True):
            target.copy_(source)
        self._replay(keys, slots, passes, max(steps.widths))
        return own

    def _replay(self, keys: Sequence[DraftKey], slots: IntArray, passes: Sequence[DraftPass], stride: int) -> None:
        longest = max(int((one.starts + one.counts).max()) for one in passes)
        table = self._inputs.page_table[slots, : -(-longest // self._inputs.page_size)]
        captured = [self._captured[key] for key in keys]
        arrays = [
            array
            for one, given in zip(captured, passes, strict=True)
            for array in pass_arrays(self._inputs, table, given, len(one.batch.positions), stride)
        ]
        packed = pack([table, *arrays])
        sent = to_device(packed, self._inputs.device)
        self._table[: len(slots), : table.shape[1]].copy_(unpack(sent, [table])[0])
        self._table[len(slots) :, 0].zero_()
        at = len(packed) - sum(one.size for one in captured)
        for one, given in zip(captured, passes, strict=True):
            self._buffer[: one.size].copy_(sent[at : at + one.size])
            at += one.size
            set_lens(one.batch, given)
            self._backend.plan_replay(one.batch)
            one.graph.replay()

    def _keys(self, steps: DraftSteps, slots: IntArray, passes: Sequence[DraftPass]) -> list[DraftKey] | None:
        """The graphs of ``passes``; None if there are more rows than graphs hold."""
        if steps not in self._steps:
            return None
        at = self._steps.index(steps)
        if len(slots) > max(self._sizes[at], default=0):
            return None
        keys: list[DraftKey] = []
        for given in passes:
            needed = int((given.counts > 0).sum())
            rows = next(size for size in self._sizes[at] if size >= needed)
            one_each = steps.widths[given.kind] == 1
            keys.append(DraftKey(at, given.kind, rows, self._variant(slots, given, needed) if one_each else 0))
        return keys

    def _variant(self, slots: IntArray, given: DraftPass, rows: int) -> int:
        ones = given.counts[:rows]
        batch = Batch([], 0, slots[:rows], given.starts[:rows], ones, ones > 0, NO_UPDATES)
        return self._backend.variant(batch)

    def _is_ready(self, key: DraftKey) -> bool:
        if key in self._captured:
            return True
        self._needed[key] += 1
        return self._needed[key] >= NEEDED_BEFORE_CAPTURE and key not in self.refused and try_capture(self, key)

    def _state(self, at: int) -> State:
        if at not in self._states:
            self._states[at] = self._steps[at].state(self._sizes[at][-1])
        return self._states[at]

    @torch.inference_mode()
    def capture(self, key: DraftKey) -> None:
        """Capture a pass. Takes a fraction of a second."""
        start, steps = time.perf_counter(), self._steps[key.steps]
        width = steps.widths[key.kind]
        arrays = self._padding(key.rows * width)
        state = tuple(tensor[: key.rows] for tensor in self._state(key.steps))
        batch, index = self._static_batch(key, width, arrays)
        mask = steps.mask(state)
        if mask is not None:
            batch.tree_mask = self._mask[: len(index) * width].view(len(index), width)
        self._backend.plan_capture(batch)

        def run() -> torch.Tensor:
            if mask is not None:
                assert batch.tree_mask is not None
                batch.tree_mask.copy_(seen_by(mask, index, width))
            steps.run(key.kind, batch, index, state)
            return index

        packed = pack(arrays)
        self._buffer[: len(packed)].copy_(to_device(packed, self._inputs.device))
        self._table[:, 0].zero_()
        graph, _ = self._recorder.record(run)
        self._captured[key] = Captured(batch, len(packed), graph)
        self.seconds += time.perf_counter() - start
        log.debug("captured a pass of a drafter, %s: %.2f s", key, time.perf_counter() - start)

    def _static_batch(self, key: DraftKey, width: int, arrays: Sequence[Array]) -> tuple[Batch, torch.Tensor]:
        """The batch that is planned and captured, each row with the most tokens and the longest text on the host, and the index
        of its tokens."""
        index, positions, out_loc, kv_lens, indptr = unpack(self._buffer, arrays)
        tokens = len(positions)
        lens, slots = np.full(tokens, width, np.int32), np.zeros(tokens, np.int32)
        batch = Batch([], 0, slots, self._context_len - lens, lens, slots == 0, NO_UPDATES, variant=key.variant)
        batch.positions, batch.out_loc, batch.kv_lens, batch.qo_indptr = positions, out_loc, kv_lens, indptr
        batch.page_table = self._table[:tokens]
        batch.attn, batch.kv = (self._backend,), (self._pool,)
        if width > 1:
            batch.drafts = wide_shape(lens)
        return batch, index

    def _padding(self, tokens: int) -> tuple[Array, ...]:
        """The arrays of a pass in which every token fills up."""
        positions, lens = np.zeros(tokens, np.int64), np.ones(tokens, np.int32)
        return positions, positions, positions, lens, np.arange(tokens + 1, dtype=np.int32)


def seen_by(mask: torch.Tensor, index: torch.Tensor, width: int) -> torch.Tensor:
    """Of ``mask [rows, n, n]`` what the tokens ``index`` see of the first ``width`` tokens of their rows: ``[tokens, width]``."""
    return mask.flatten(0, 1).index_select(0, index)[:, :width]


def _most_rows(steps: DraftSteps, limits: DraftLimits) -> int:
    return min(limits.rows, limits.tokens // max(steps.widths))
