"""The backend: which rows form which launch, and how much memory their schedules need. Host numbers decide sizes only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.ops.triton.decode import decode_splits, paged_decode
from dovetail_attention.triton import tiles
from dovetail_attention.triton.attend import PartialResults, attend
from dovetail_attention.triton.merge import merge, merge_into
from dovetail_attention.triton.schedule import Schedule, ScheduleEntries, fill

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dovetail.types import Batch, SharedPrefixes

SHARING_BYTES = 24 << 20
"""Bytes that a second launch and the merge of every row are worth: about 6 us of reading on H200."""

EVEN, SCHEDULED = 0, 1
"""Variants of decode steps: all rows in the same number of parts, a seventh faster where they are alike, or a schedule."""

SECONDS_PER_KEY = 42e-9
BYTES_PER_SECOND = 4e12
EVEN_SLACK = 10e-6
"""A program alone reads keys of one head at that rate, the device all of them at that (H200, head_dim 128, bfloat16); a step
may wait so long for its longest row before a schedule is worth its own time."""

SHARED_PAIRS = 64
"""Pairs of a row and a head that read a shared prefix together."""

ROWS_PER_GROUP = 16
"""What launches for shared prefixes are sized for; with smaller groups, programs do several items."""

CPU_PROCESSORS = 2

CHUNK = 256
"""Keys of a chunk with ``batch_invariant``: shorter ones would keep the device busier with few rows, and make the merge longer."""
INVARIANT_PAIRS = 64
"""Pairs of a query and a head of the only tile with ``batch_invariant``."""
CUT_TOKENS, CUT_BYTES = 64, 128 << 20
"""With ``batch_invariant`` the chunks of a row are divided among programs in steps of up to so many queries, fewer where what the
chunks leave for the merge would take more memory than that."""

MIN_VERIFY_TOKENS = 64
"""Memory for graphs of verify rows is made for so many tokens at least, and then for powers of two."""


class Memory:
    """What one launch writes for its merge, and its schedules by window. Addresses never change."""

    def __init__(
        self, items: int, tokens: int, partial_rows: int, kv_heads: int, value_dim: int, device: torch.device
    ) -> None:
        self.partial = PartialResults.empty(partial_rows, kv_heads, value_dim, device)
        self._size = items, tokens, device
        self._schedules: dict[int | None, Schedule] = {}

    def schedule(self, window: int | None) -> Schedule:
        """The schedule for layers of this window."""
        if window not in self._schedules:
            self._schedules[window] = Schedule.empty(*self._size)
        return self._schedules[window]


class Launch(NamedTuple):
    """Entries, and the memory for them."""

    entries: ScheduleEntries
    memory: Memory


class AttendGroup(NamedTuple):
    """Tokens that are attended to together: by their own keys and, where groups share a prefix, by what is before those."""

    tokens: range
    own: Launch
    shared: Launch | None = None


class TritonAttention(AttentionBackend):
    """Everything that depends on a value is computed on the device, so graphs need nothing from the host.

    The schedule of a step is made by the first layer of each window, and read by the others. The pool's values may be of
    another size than its keys, and be a view of them (latent attention): the output has their size.

    Asked to be ``batch_invariant``, it has one kind of launch for all rows, of one tile and fixed chunks.
    """

    def __init__(self, config: BaseModel, context: AttentionContext) -> None:
        self._pool, self._device = context.pool, context.device
        self._dtype, self._max_rows = context.dtype, context.max_rows
        self._kv_heads, self._head_dim = context.num_kv_heads, context.head_dim
        self._group = context.num_heads // context.num_kv_heads
        self._value_dim = context.pool.values(0).shape[3]
        self._token_bytes = 2 * self._kv_heads * self._head_dim * context.pool.keys(0).element_size()
        self._processors, self._roomy = CPU_PROCESSORS, False
        if context.device.type == "cuda":
            found = torch.cuda.get_device_properties(context.device)
            self._processors = found.multi_processor_count
            self._roomy = found.shared_memory_per_multiprocessor >= tiles.ROOM
        self._invariant = context.batch_invariant
        self._chunks = -(-(context.max_context + 1) // CHUNK)
        bytes_a_token = 4 * self._chunks * context.num_heads * self._value_dim
        self._cut_tokens = min(CUT_TOKENS, CUT_BYTES // bytes_a_token)
        self._invariant_tile = tiles.choose(INVARIANT_PAIRS, self._head_dim, self._value_dim, self._dtype)
        self._invariant_tile = self._invariant_tile._replace(num_stages=2)
        self._kept: dict[tuple[str, tiles.AttentionTile, int], Memory] = {}
        if self._invariant:  # now, as there may be no memory for it later
            self._invariant_memory(self._cut_tokens, self._chunks)
        self._steps: list[AttendGroup] = []
        self._even = 0  # parts of every row's keys, in a step of the variant EVEN
        self._shared: Launch | None = None  # what its groups share
        self._leaders: dict[int | None, int] = {}  # by window: the layer that makes the schedule

    def shares(self, batch: Batch) -> bool:
        """True if the rows have more bytes of KV a layer in common than the second launch and the merge are worth."""
        assert batch.shared is not None
        return batch.shared.saved * self._token_bytes > SHARING_BYTES

    def variant(self, batch: Batch) -> int:
        """``EVEN`` where no row is so long that the device would wait for the program that reads it: its own keys, as shared
        prefixes are always read by a schedule."""
        if self._invariant:
            return SCHEDULED
        lens, rows = batch.prefix_lens + 1, len(batch.slots)
        if batch.shared is not None:
            lens = lens - np.repeat(batch.shared.lens, np.diff(batch.shared.starts))
        bytes_read = int(lens.sum()) * self._token_bytes
        longest = int(lens.max()) / decode_splits(rows, self._kv_heads, self._processors) * SECONDS_PER_KEY
        return EVEN if longest < bytes_read / BYTES_PER_SECOND + EVEN_SLACK else SCHEDULED

    def plan(self, batch: Batch) -> None:
        """Divide the rows: those that extend, and those that decode or verify. No copy, no wait."""
        self._leaders = {}
        rows, split = len(batch.slots), batch.num_extend
        self._even = 0
        if not split and batch.drafts is None:
            self.plan_capture(batch)
            return
        if self._invariant:
            self._steps = [self._invariant_step(batch, captured=False)]
            return
        parts = [part for part in (slice(0, split), slice(split, rows)) if part.start < part.stop]
        self._steps = [self._ragged_step(batch, part) for part in parts]

    def plan_capture(self, batch: Batch) -> None:
        """The launches of this many rows. Their memory is that of all other decode steps too."""
        self._leaders = {}
        if self._invariant:
            self._even, self._steps, self._shared = 0, [self._invariant_step(batch, captured=True)], None
            return
        if batch.drafts is not None:
            self._even, self._steps = 0, [self._verify_step(batch)]
            return
        even = batch.variant == EVEN
        self._even = decode_splits(len(batch.slots), self._kv_heads, self._processors) if even else 0
        shared = None if batch.shared is None else self._shared_launch(batch.shared, len(batch.slots))
        self._steps, self._shared = ([], shared) if even else ([self._decode_step(batch, shared)], None)

    def plan_replay(self, batch: Batch) -> None:
        """Nothing: lengths and tables are read on the device."""

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        if self._even:
            return self._forward_even(q, layer, batch)
        leads = self._leads(layer)
        out = q.new_empty(*q.shape[:2], self._value_dim)
        for tokens, own, shared in self._steps:
            parts = [
                self._attend(q, layer, batch, launch, out, leads=leads, partial=shared is not None)
                for launch in (own, shared)
                if launch is not None
            ]
            if own.entries.slots:
                merge(out, tokens, parts, layer.sinks, one_by_one=self._invariant)
        return out

    def _forward_even(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """Every row's own keys in the same number of parts, then what groups share."""
        groups = batch.shared
        table, lens = (batch.page_table, batch.kv_lens) if groups is None else (groups.own_table, groups.own_lens)
        out, lse = paged_decode(
            q,
            self._pool.keys(layer.layer_id),
            self._pool.values(layer.layer_id),
            table,
            lens,
            layer.scale,
            splits=self._even,
            window=layer.window,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
        )
        if self._shared is not None:
            leads = self._leads(layer)
            schedule, partial = self._attend(q, layer, batch, self._shared, out, leads=leads, partial=True)
            merge_into(out, lse, schedule, partial)
        return out

    def _leads(self, layer: AttentionLayer) -> bool:
        """True for the first layer of its window in this plan: it makes the schedule, and its kernels lead (see ``launch``)."""
        return self._leaders.setdefault(layer.window, layer.layer_id) == layer.layer_id

    def _attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        batch: Batch,
        launch: Launch,
        out: torch.Tensor,
        *,
        leads: bool,
        partial: bool,
    ) -> tuple[Schedule, PartialResults]:
        """One launch, scheduled before if this layer ``leads``. ``partial``: also what is whole goes to the merge."""
        entries, memory = launch
        schedule = memory.schedule(layer.window)
        if leads:
            fill(schedule, entries, self._group, layer.window, partial=partial)
        kv = self._pool.keys(layer.layer_id), self._pool.values(layer.layer_id)
        attend(q, kv, entries, schedule, layer, batch.positions, out, memory.partial, leads=leads)
        return schedule, memory.partial

    def _decode_step(self, batch: Batch, shared: Launch | None) -> AttendGroup:
        """One query a row, for all rows."""
        groups, rows = batch.shared, len(batch.slots)
        table, lens = batch.page_table, batch.kv_lens
        if groups is not None:
            table, lens = groups.own_table, groups.own_lens
        tile = self._tile(self._group)
        slots = self._slots(tile)
        entries = ScheduleEntries(batch.qo_indptr, lens, table, tile, slots, rows * self._tiles(1, tile) + slots)
        return AttendGroup(range(rows), Launch(entries, self._keep("own", tile, self._max_rows)), shared)

    def _invariant_step(self, batch: Batch, *, captured: bool) -> AttendGroup:
        """All rows, whatever they do, in one launch. ``captured``: how the tokens are divided among rows is not known, but how
        many a row can have."""
        tokens = len(batch.positions)
        tile = self._invariant_tile
        if captured:
            width = int(batch.extend_lens.max())
            items, programs = tokens * self._tiles(1, tile), -(-tokens // width) * self._tiles(width, tile)
        else:
            items = programs = sum(self._tiles(int(queries), tile) for queries in batch.extend_lens)
        cut = tokens <= self._cut_tokens
        if cut:
            programs = min(items * self._chunks, programs + self._slots(tile))
            memory = self._invariant_memory(self._cut_tokens, self._chunks)
        elif captured:
            memory = self._invariant_memory(1 << (tokens - 1).bit_length(), 0)
        else:
            memory = Memory(items, tokens, 1, self._kv_heads, self._value_dim, self._device)
        table, lens = batch.page_table, batch.kv_lens
        entries = ScheduleEntries(batch.qo_indptr, lens, table, tile, int(cut), programs, fewer=True, chunk=CHUNK)
        return AttendGroup(range(tokens), Launch(entries, memory))

    def _invariant_memory(self, tokens: int, chunks: int) -> Memory:
        """Memory for steps of up to so many tokens, made once. 0 ``chunks``: keys are not cut."""
        tile = self._invariant_tile
        key = f"invariant {chunks}", tile, tokens
        if key not in self._kept:
            items, partial_rows = tokens * self._tiles(1, tile) * max(1, chunks), tokens * self._group * chunks or 1
            self._kept[key] = Memory(items, tokens, partial_rows, self._kv_heads, self._value_dim, self._device)
        return self._kept[key]

    def _shared_launch(self, groups: SharedPrefixes, rows: int) -> Launch:
        """Groups as entries. How many there are, and of how many rows, only the device knows."""
        tile = self._tile(min(SHARED_PAIRS, self._max_rows * self._group))
        slots = self._slots(tile)
        programs = slots + -(-rows // ROWS_PER_GROUP)
        indptr, lens, table = groups.indptr, groups.group_lens, groups.group_table
        entries = ScheduleEntries(indptr, lens, table, tile, slots, programs, fewer=True, causal=False)
        return Launch(entries, self._keep("shared", tile, self._max_rows))

    def _verify_step(self, batch: Batch) -> AttendGroup:
        """Rows of up to so many queries. How many each has only the device knows: the fewest programs there may be work for do
        it all."""
        tokens, width = len(batch.positions), int(batch.extend_lens.max())
        tree = None if batch.tree_mask is None else batch.tree_mask.view(torch.uint8)
        few = 2 * -(-tokens // width) * self._kv_heads < self._processors
        tile = self._tile(width * self._group, tree=tree is not None, few=few)
        fewest, slots = -(-tokens // width) * self._tiles(width, tile), self._slots(tile)
        cut = 0 if fewest * self._kv_heads >= tile.resident * self._processors else slots
        entries = ScheduleEntries(
            batch.qo_indptr, batch.kv_lens, batch.page_table, tile, cut, fewest + slots, fewer=True, tree=tree
        )
        room = max(MIN_VERIFY_TOKENS, 1 << (tokens - 1).bit_length())
        return AttendGroup(range(tokens), Launch(entries, self._keep("verify", tile, room)))

    def _keep(self, name: str, tile: tiles.AttentionTile, tokens: int) -> Memory:
        """Memory for steps of up to so many tokens, each a row of its own if need be, made once: graphs know its address."""
        key = name, tile, tokens
        if key not in self._kept:
            self._kept[key] = self._memory(tile, self._slots(tile), tokens * self._tiles(1, tile), tokens)
        return self._kept[key]

    def _ragged_step(self, batch: Batch, part: slice) -> AttendGroup:
        """Rows of several queries, or of one beside those of several. Where their tiles keep the device busy, no key is cut."""
        queries = batch.extend_lens[part]
        first, total = int(batch.extend_lens[: part.start].sum()), int(queries.sum())
        in_tree = part.start >= batch.num_extend and batch.tree_mask is not None
        tree = batch.tree_mask.view(torch.uint8) if in_tree else None
        tile = self._tile(int(queries.max()) * self._group, tree=in_tree)
        count = sum(self._tiles(int(n), tile) for n in queries)
        busy = count * self._kv_heads >= tile.resident * self._processors
        slots = 0 if busy else self._slots(tile)
        indptr, lens = batch.qo_indptr[part.start : part.stop + 1], batch.kv_lens[part]
        entries = ScheduleEntries(indptr, lens, batch.page_table[part], tile, slots, count + slots, tree=tree)
        return AttendGroup(
            range(first, first + total), Launch(entries, self._memory(tile, slots, count, first + total))
        )

    def _memory(self, tile: tiles.AttentionTile, slots: int, count: int, tokens: int) -> Memory:
        """Memory for ``count`` tiles of ``tokens`` queries, cut into ``slots`` more items at most (see ``schedule``)."""
        partial_rows = tokens * self._group + slots * tile.rows if slots else 1
        return Memory(count + slots, tokens, partial_rows, self._kv_heads, self._value_dim, self._device)

    def _tile(self, pairs: int, *, tree: bool = False, few: bool = False) -> tiles.AttentionTile:
        sizes = pairs, self._head_dim, self._value_dim, self._dtype
        return tiles.choose(*sizes, tree=tree, roomy=self._roomy, few=few)

    def _tiles(self, queries: int, tile: tiles.AttentionTile) -> int:
        return -(-queries * self._group // tile.rows)

    def _slots(self, tile: tiles.AttentionTile) -> int:
        return tiles.slots(tile, self._processors, self._kv_heads)
