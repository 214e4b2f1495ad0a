"""Run the Triton kernels as an attention backend: decide which rows form which launch, and how large the schedules are.

Lengths on the host decide sizes only.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, ProjectedRows
from dovetail.ops.triton import decode_projected
from dovetail.ops.triton.decode import (
    FEW_TILES,
    LARGE_TILE,
    LARGE_TILE_8_BITS,
    MIDDLE_TILE,
    RESIDENT,
    SMALL_TILE,
    decode_splits,
    is_measured,
    long_splits,
    paged_decode,
    tiling,
)
from dovetail.ops.triton.sizes import next_power_of_2
from dovetail_attention.triton import tiles
from dovetail_attention.triton.attend import PartialResults, attend
from dovetail_attention.triton.expanded import ExpandedPrompts
from dovetail_attention.triton.latent import LatentPages, attend_latents
from dovetail_attention.triton.merge import merge, merge_into
from dovetail_attention.triton.schedule import Schedule, ScheduleEntries, fill

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dovetail.types import Batch, SharedPrefixes
    from dovetail.types.arrays import IntArray

SHARING_BYTES, LATENT_SHARING_BYTES = 128 << 20, 24 << 20
"""The bytes of keys and values, or of latents, that must be saved to pay for a second launch and the merge of every row. Rows that
read the same pages find most of them in the L2 cache, at about 6 TB/s on H200: steps that would save 20 to 60 MB of keys and values
take up to 11 us longer in each layer if they share, and those that save 250 MB are 12 us faster."""

EVEN, UNEVEN = 0, 1
"""The variants of decode steps. ``EVEN`` reads all rows in the same number of parts, which is a seventh faster if the rows have similar lengths.
``UNEVEN`` uses a schedule. For few rows it reads each row in as many parts as fill the device instead, with more bytes in flight than ``EVEN``: this is
faster for long contexts too (H200: one row of 32,768 keys takes 43 us per layer instead of 55)."""

SECONDS_PER_KEY = {LARGE_TILE: 30e-9, LARGE_TILE_8_BITS: 30e-9, MIDDLE_TILE: 42e-9, SMALL_TILE: 63e-9}
OTHER_SECONDS_PER_KEY = 42e-9
BYTES_PER_SECOND = 4e12
EVEN_SLACK, UNDIVIDED_SLACK, PROJECTED_SLACK = 8e-6, 16e-6, {16: 3e-6, 32: 12e-6}
"""Numbers for the choice of the variant (H200, head_dim 128, 16 bits). A single program takes ``SECONDS_PER_KEY`` of its tile for each key of one head,
``OTHER_SECONDS_PER_KEY`` for keys of other sizes. The whole device reads ``BYTES_PER_SECOND``. If a step waits longer for its longest rows than this slack
(few rows in one part: ``UNDIVIDED_SLACK``; ``forward_projected``: by the number of rows times key heads), ``UNEVEN`` is worth its time."""

LONG_BYTES = 64 << 20
"""The bytes of KV of a layer from which on few rows are read by ``UNEVEN``. With fewer bytes, its programs would hold shared memory in which the next kernel fetches its weights."""
FEW_ROWS = 4
"""Rows are few if their number times the key heads times this number is at most the number of multiprocessors. More rows keep the device busy with any tile."""

FEW_LATENT_ROWS = 4
"""The largest number of rows over latents for which ``tiles.FEW_LATENTS_TILE`` was faster on H200."""

SHARED_PAIRS = 64
"""The number of pairs of a row and a head that read a shared prefix together."""
ROWS_PER_GROUP = 16
"""The group size for which launches for shared prefixes are sized. If groups are smaller, programs compute several items."""

CPU_PROCESSORS = 2

CHUNK = 256
"""The number of keys of a chunk with ``batch_invariant``. Shorter chunks would keep the device busier with few rows, and make the merge longer."""
INVARIANT_PAIRS = 64
"""The number of pairs of a query and a head in the only tile that ``batch_invariant`` uses."""
CUT_TOKENS, CUT_BYTES = 64, 128 << 20
"""Limits with ``batch_invariant``. The chunks of a row are divided among programs in steps of up to ``CUT_TOKENS``
queries, or fewer if the partial results for the merge would take more than ``CUT_BYTES``."""

MIN_VERIFY_TOKENS = 64
"""The smallest number of tokens for which memory for graphs of verify rows is allocated. Larger sizes are powers of two."""


class Memory:
    """Hold what one launch writes for its merge, and its schedules by window. The addresses never change."""

    def __init__(
        self, items: int, tokens: int, partial_rows: int, kv_heads: int, value_dim: int, device: torch.device
    ) -> None:
        self.partial = PartialResults.empty(partial_rows, kv_heads, value_dim, device)
        self._size = items, tokens, device
        self._schedules: dict[int | None, Schedule] = {}

    def schedule(self, window: int | None) -> Schedule:
        """Return the schedule for layers with this window."""
        if window not in self._schedules:
            self._schedules[window] = Schedule.empty(*self._size)
        return self._schedules[window]


class Launch(NamedTuple):
    """Describe one launch: its entries and the memory for them."""

    entries: ScheduleEntries
    memory: Memory


class AttendGroup(NamedTuple):
    """Describe the tokens of one launch for their own keys and, if groups share a prefix, one launch for the keys of
    these prefixes."""

    tokens: range
    own: Launch
    shared: Launch | None = None


def keys_of_places(lens: IntArray, places: int) -> IntArray:
    """Return the number of keys that is read in each of the ``places`` in which rows of ``lens`` keys run at the same time, int32
    ``[min(rows, places)]``: rows start in their order, each in the place that becomes free first."""
    places = max(1, places)
    keys = lens[:places]
    for start in range(places, len(lens), places):
        more = lens[start : start + places]
        keys = np.sort(keys)
        keys[: len(more)] += more
    return keys


class TritonAttention(AttentionBackend):
    """Run the Triton kernels. All work that depends on a value is computed on the device, so graphs need nothing from
    the host.

    The first layer of each window makes the schedule of a step, and the other layers read it. The pool's values may
    have another size than its keys, and may be a view of them (latent attention); the output has the size of the
    values. Latents have kernels of their own, and steps of latents that need not be cut at fixed places are divided
    into equal spans (``ScheduleEntries.level``). Keys and values with scales are always read by a schedule.

    With ``batch_invariant`` there is one kind of launch for all rows, with one tile and fixed chunks.
    """

    def __init__(self, config: BaseModel, context: AttentionContext) -> None:
        self._pool, self._device = context.pool, context.device
        self._dtype, self._max_rows = context.dtype, context.max_rows
        self._kv_heads, self._head_dim = context.num_kv_heads, context.head_dim
        self._group = context.num_heads // context.num_kv_heads
        self._value_dim = context.pool.values(0).shape[3]
        pool_itemsize = context.pool.keys(0).element_size()
        self._key_bytes, self._eight_bits = self._head_dim * pool_itemsize, pool_itemsize == 1
        self._row_bytes = context.dtype.itemsize * max(self._head_dim, self._value_dim)
        self._measured = is_measured(self._head_dim, self._value_dim, context.dtype.itemsize, pool_itemsize)
        self._latent = context.value_dim is not None and self._kv_heads == 1
        self._scaled = context.pool.tensors(0).scales is not None
        self._token_bytes = self._key_bytes if self._latent else 2 * self._kv_heads * self._key_bytes
        self._processors, self._large_memory = CPU_PROCESSORS, False
        if context.device.type == "cuda":
            found = torch.cuda.get_device_properties(context.device)
            self._processors = found.multi_processor_count
            self._large_memory = found.shared_memory_per_multiprocessor >= tiles.LARGE_SHARED_MEMORY
        self._invariant = context.batch_invariant
        self._chunks = -(-(context.max_context + 1) // CHUNK)
        bytes_a_token = 4 * self._chunks * context.num_heads * self._value_dim
        self._cut_tokens = min(CUT_TOKENS, CUT_BYTES // bytes_a_token)
        self._invariant_tile = tiles.choose(INVARIANT_PAIRS, self._head_dim, self._value_dim, self._dtype)
        self._invariant_tile = self._invariant_tile._replace(num_stages=2)
        if self._latent:
            self._invariant_tile = self._latent_tile(INVARIANT_PAIRS, two=True)
        self._kept: dict[tuple[str, tiles.AttentionTile, int], Memory] = {}
        if self._invariant:  # allocated now, because there may not be enough memory later
            self._invariant_memory(self._cut_tokens, self._chunks)
        self._steps: list[AttendGroup] = []
        self._sizes: list[int] = []  # the numbers of rows of the decode steps that were captured, ascending
        self._even = 0  # the parts of every row's keys in a step that reads them in parts; 0: another kind of step
        rotates = decode_projected.fits(context.num_heads, self._kv_heads, self._head_dim)
        self._projects = rotates and self._head_dim == self._value_dim and context.pool.keys(0).dtype == context.dtype
        self._long = False  # whether such a step is of the variant UNEVEN
        self._shared: Launch | None = None  # the launch for the prefixes that groups share, in such a step
        self._prompts: ExpandedPrompts | None = None  # those of the last ``plan_expanded``
        self._leaders: dict[int | None, int] = {}  # for each window, the layer that makes the schedule

    def shares(self, batch: Batch) -> bool:
        """Return True if the rows share more bytes of KV per layer than the second launch and the merge cost."""
        assert batch.shared is not None
        least = LATENT_SHARING_BYTES if self._latent else SHARING_BYTES
        return batch.shared.saved * self._token_bytes > least

    def variant(self, batch: Batch) -> int:
        """Return ``UNEVEN`` if the device would wait too long for the program that reads the longest row, and for few
        rows with long contexts. Otherwise return ``EVEN``.

        Only a row's own keys count, because shared prefixes are always read by a schedule.
        """
        if self._invariant or self._latent or self._scaled:
            return UNEVEN
        lens, rows = batch.prefix_lens + 1, len(batch.slots)
        if batch.shared is not None:
            lens = lens - np.repeat(batch.shared.lens, np.diff(batch.shared.starts))
        long = int(lens.sum()) * self._token_bytes >= LONG_BYTES and self._few(rows)
        return UNEVEN if long or self._waits(lens, self._projects and batch.shared is None) else EVEN

    def _waits(self, lens: IntArray, projects: bool) -> bool:
        """Return True if a schedule is worth its time, because a step of the variant ``EVEN`` with rows of ``lens [rows]`` keys takes longer than
        the device needs to read all keys: at its end, the few programs that are left do not use the whole bandwidth. With ``projects``, ``forward_projected`` computes few rows."""
        rows = next((size for size in self._sizes if size >= len(lens)), len(lens))
        parts, tiles = decode_splits(rows, self._kv_heads, self._processors, self._measured), rows * self._kv_heads
        tile = tiling(self._row_bytes, self._key_bytes, tiles, self._processors, eight_bits=self._eight_bits)
        slack = EVEN_SLACK
        if projects and tiles <= decode_projected.MOST_TILES and self._few(rows):
            slack = PROJECTED_SLACK.get(next_power_of_2(tiles), EVEN_SLACK)
            projected = decode_projected.tile_of(tiles, self._group)
            tile = LARGE_TILE if projected.more_keys == LARGE_TILE.keys else MIDDLE_TILE
            parts = projected.splits - 1  # without the part of the token itself
        seconds = SECONDS_PER_KEY.get(tile, OTHER_SECONDS_PER_KEY) if self._measured else OTHER_SECONDS_PER_KEY
        each, keys = self._token_bytes / BYTES_PER_SECOND, lens
        if parts == 1 and self._measured and tile in RESIDENT:
            keys = keys_of_places(lens, RESIDENT[tile] * self._processors // self._kv_heads)
            busy = int(seconds / each)
            if busy < len(keys):  # until this number of places is left, all share the bandwidth
                keys = np.partition(keys, -busy - 1)[-busy - 1 :]
                keys = keys - keys[0]
        if parts == 1 and tiles <= FEW_TILES * self._processors and self._measured and not self._eight_bits:
            slack = UNDIVIDED_SLACK
        return int(keys.max()) / parts * seconds - int(keys.sum()) * each >= slack

    def _few(self, rows: int) -> bool:
        """Return True if ``UNEVEN`` reads these rows in parts instead of using a schedule."""
        return FEW_ROWS * rows * self._kv_heads <= self._processors and self._measured

    def plan(self, batch: Batch) -> None:
        """Divide the rows into those that extend and those that decode or verify. Copies nothing and does not wait."""
        self._leaders = {}
        rows, split = len(batch.slots), batch.num_extend
        self._even = 0
        if not split and batch.drafts is None:
            self._plan_decode(batch)
            return
        if self._invariant:
            self._steps = [self._invariant_step(batch, captured=False)]
            return
        parts = [part for part in (slice(0, split), slice(split, rows)) if part.start < part.stop]
        self._steps = [self._ragged_step(batch, part) for part in parts]

    def plan_capture(self, batch: Batch) -> None:
        """Plan the launches of this number of rows. All decode steps that have the same tile use the same memory."""
        if batch.drafts is None and len(batch.slots) not in self._sizes:
            insort(self._sizes, len(batch.slots))
        self._plan_decode(batch)

    def _plan_decode(self, batch: Batch) -> None:
        self._leaders = {}
        if self._invariant:
            self._even, self._steps, self._shared = 0, [self._invariant_step(batch, captured=True)], None
            return
        if batch.drafts is not None:
            self._even, self._steps = 0, [self._verify_step(batch)]
            return
        rows = len(batch.slots)
        in_parts = not self._latent and not self._scaled
        self._long = batch.variant == UNEVEN and self._few(rows) and in_parts
        if self._long:
            self._even = long_splits(self._kv_heads, self._processors)
        elif batch.variant == EVEN and in_parts:
            self._even = decode_splits(rows, self._kv_heads, self._processors, self._measured)
        else:
            self._even = 0
        shared = None if batch.shared is None else self._shared_launch(batch.shared, rows)
        self._steps, self._shared = ([], shared) if self._even else ([self._decode_step(batch, shared)], None)

    def plan_replay(self, batch: Batch) -> None:
        """Do nothing: the kernels read lengths and tables on the device."""

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

    def forward_projected(self, rows: ProjectedRows, layer: AttentionLayer, batch: Batch) -> torch.Tensor | None:
        """See ``AttentionBackend.forward_projected``. There are kernels for few rows, read in parts and not shared, and full attention."""
        plain = layer.window is None and layer.soft_cap is None and layer.sinks is None and self._shared is None
        projects = self._projects and len(rows.qkv) * self._kv_heads <= decode_projected.MOST_TILES
        if not projects or not plain or self._long or not self._even:
            return None
        keys, values = self._pool.keys(layer.layer_id), self._pool.values(layer.layer_id)
        return decode_projected.attend_rows(
            rows, keys, values, batch.page_table, batch.kv_lens, layer.scale, leads=self._leads(layer)
        )

    def plan_expanded(self, batch: Batch, kv_indptr: torch.Tensor) -> None:
        """See ``ExpandedAttention.plan_expanded``. Copies nothing and does not wait."""
        self._prompts = ExpandedPrompts(batch, kv_indptr, self._processors, large_memory=self._large_memory)

    def forward_expanded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: Batch
    ) -> torch.Tensor:
        """See ``ExpandedAttention.forward_expanded``."""
        assert self._prompts is not None, "plan_expanded comes before forward_expanded"
        return self._prompts.forward(q, k, v, layer.scale)

    def _forward_even(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """Attend to every row's own keys in the same number of parts, then to what groups share."""
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
            long=self._long,
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
        """Return True for the first layer of its window in this plan. It makes the schedule, and its kernels lead (see
        ``launch``)."""
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
        """Run one launch. If this layer ``leads``, make its schedule first. ``partial``: single chunks go to the merge
        too."""
        entries, memory = launch
        schedule = memory.schedule(layer.window)
        if leads:
            fill(schedule, entries, self._group, layer.window, partial=partial)
        kv = self._pool.tensors(layer.layer_id)
        if self._latent and layer.window is None and layer.soft_cap is None and layer.sinks is None:
            latents = LatentPages(kv.keys, self._value_dim, None if kv.scales is None else kv.scales.keys)
            attend_latents(q, latents, entries, schedule, layer.scale, out, memory.partial, leads=leads)
        else:
            attend(q, kv, entries, schedule, layer, batch.positions, out, memory.partial, leads=leads)
        return schedule, memory.partial

    def _decode_step(self, batch: Batch, shared: Launch | None) -> AttendGroup:
        """Describe a step with one query per row."""
        groups, rows = batch.shared, len(batch.slots)
        table, lens = batch.page_table, batch.kv_lens
        if groups is not None:
            table, lens = groups.own_table, groups.own_lens
        tile, most = self._tile(self._group), self._max_rows
        if self._latent and rows <= FEW_LATENT_ROWS and (few := self._latent_tile(self._group, few=True)) != tile:
            tile, most = few, FEW_LATENT_ROWS
        slots = self._slots(tile)
        entries = ScheduleEntries(batch.qo_indptr, lens, table, tile, slots, rows * self._tiles(1, tile) + slots)
        entries = self._in_spans(entries, 1)
        return AttendGroup(range(rows), Launch(entries, self._keep("own", tile, most)), shared)

    def _in_spans(self, entries: ScheduleEntries, queries: int) -> ScheduleEntries:
        """Return ``entries`` with equal work for all programs, if these are latents and all entries of up to
        ``queries`` queries have the same number of tiles."""
        tile = entries.tile
        count = self._tiles(1, tile)
        if not self._latent or self._tiles(queries, tile) > count:
            return entries
        spans = max(1, self._slots(tile) // count)
        return entries._replace(slots=spans, programs=spans * count, fewer=True, level=True)

    def _invariant_step(self, batch: Batch, *, captured: bool) -> AttendGroup:
        """Describe one launch for all rows, of any phase.

        ``captured``: the number of queries of each row is not known, only the largest number that a row can have.
        """
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
        """Return memory for steps of up to ``tokens`` tokens, allocated once. With 0 ``chunks``, keys are not cut."""
        tile = self._invariant_tile
        key = f"invariant {chunks}", tile, tokens
        if key not in self._kept:
            items, partial_rows = tokens * self._tiles(1, tile) * max(1, chunks), tokens * self._group * chunks or 1
            self._kept[key] = Memory(items, tokens, partial_rows, self._kv_heads, self._value_dim, self._device)
        return self._kept[key]

    def _shared_launch(self, groups: SharedPrefixes, rows: int) -> Launch:
        """Describe the launch for shared prefixes, with groups as entries. Only the device knows their number and their
        sizes."""
        tile = self._tile(min(SHARED_PAIRS, self._max_rows * self._group))
        slots = self._slots(tile)
        programs = slots + -(-rows // ROWS_PER_GROUP)
        indptr, lens, table = groups.indptr, groups.group_lens, groups.group_table
        first = None if groups.window is None else groups.first_positions
        entries = ScheduleEntries(
            indptr, lens, table, tile, slots, programs, fewer=True, causal=False, first_positions=first
        )
        return Launch(entries, self._keep("shared", tile, self._max_rows))

    def _verify_step(self, batch: Batch) -> AttendGroup:
        """Describe a step of verify rows.

        Only the device knows how many queries each row has. The number of programs is the smallest number for which
        there can be work; these programs compute all items.
        """
        tokens, width = len(batch.positions), int(batch.extend_lens.max())
        tree = None if batch.tree_mask is None else batch.tree_mask.view(torch.uint8)
        few = 2 * -(-tokens // width) * self._kv_heads < self._processors
        tile = self._tile(width * self._group, tree=tree is not None, few=few)
        fewest, slots = -(-tokens // width) * self._tiles(width, tile), self._slots(tile)
        cut = 0 if fewest * self._kv_heads >= tile.resident * self._processors else slots
        entries = ScheduleEntries(
            batch.qo_indptr, batch.kv_lens, batch.page_table, tile, cut, fewest + slots, fewer=True, tree=tree
        )
        entries = self._in_spans(entries, width)
        size = max(MIN_VERIFY_TOKENS, 1 << (tokens - 1).bit_length())
        return AttendGroup(range(tokens), Launch(entries, self._keep("verify", tile, size)))

    def _keep(self, name: str, tile: tiles.AttentionTile, tokens: int) -> Memory:
        """Return memory for steps of up to ``tokens`` tokens, even if each is a separate row. Allocated once: graphs
        hold its address."""
        key = name, tile, tokens
        if key not in self._kept:
            self._kept[key] = self._memory(tile, self._slots(tile), tokens * self._tiles(1, tile), tokens)
        return self._kept[key]

    def _ragged_step(self, batch: Batch, part: slice) -> AttendGroup:
        """Describe rows with several queries, and single queries in the same step. Keys are cut only if the tiles do
        not keep the device busy."""
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
        """Allocate memory for ``count`` tiles of ``tokens`` queries, cut into at most ``slots`` more items (see
        ``schedule``)."""
        partial_rows = tokens * self._group + slots * tile.rows if slots else 1
        return Memory(count + slots, tokens, partial_rows, self._kv_heads, self._value_dim, self._device)

    def _tile(self, pairs: int, *, tree: bool = False, few: bool = False) -> tiles.AttentionTile:
        if self._latent:
            return self._latent_tile(pairs)
        sizes = pairs, self._head_dim, self._value_dim, self._dtype
        return tiles.choose(*sizes, tree=tree, large_memory=self._large_memory, few=few)

    def _latent_tile(self, pairs: int, *, two: bool = False, few: bool = False) -> tiles.AttentionTile:
        dtypes = self._dtype, self._pool.keys(0).dtype
        return tiles.choose_latent(pairs, *dtypes, large_memory=self._large_memory, two=two, few=few)

    def _tiles(self, queries: int, tile: tiles.AttentionTile) -> int:
        return -(-queries * self._group // tile.rows)

    def _slots(self, tile: tiles.AttentionTile) -> int:
        return tiles.slots(tile, self._processors, self._kv_heads)
