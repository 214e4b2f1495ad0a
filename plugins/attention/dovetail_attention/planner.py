"""Decide which rows of a batch attend together, and how their keys are reached. This is done once per step, for all
layers.

A span is a run of queries of one row. Long rows are cut into several spans, so that masks stay small and keys outside a
window are skipped. Spans that fit one kernel call form a group, which reaches its keys in one of three ways:

- In place: one row whose pages are consecutive. Its keys are a view of the pool, and nothing is copied.
- Gathered: one long row, or several short ones of similar length. Their keys are first copied next to each other.
- Shared: rows that start with the same pages. The keys in these pages are read once for all rows, and the rest of each
  row is gathered.

If there are compiled kernels, most rows do not need any of this, because they are read through the page table
(``Planner.paged``).

Rows are gathered page by page, or key by key where a window begins within a page. A row with fewer pages than the
longest row of its group is padded with its own first page. The places of a row's last page that lie beyond the row are
cleared after gathering. A mask alone would not be enough, because zero times NaN is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dovetail.types import Batch, IntArray

_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class PlannerCosts:
    """Describe when each way to reach keys pays on a kind of device, in bytes of keys except for ``mask`` and
    ``short``.

    From ``in_place`` bytes on, a row is read in place instead of gathered with other rows. Rows share a group while the
    group gathers at most ``gather`` bytes, of which at most ``waste`` are padding of short rows. A prefix is read once
    for all of its rows where that saves ``shared`` bytes (None: never). A mask has at most ``mask`` elements. Rows of
    at most ``short`` queries are grouped. If ``paged`` is set, all of this applies to trees and shared prefixes only,
    and other rows are read through the page table.
    """

    in_place: int
    gather: int
    waste: int
    mask: int
    short: int
    shared: int | None = None
    paged: bool = False


CPU = PlannerCosts(in_place=256 << 10, gather=4 << 20, waste=256 << 10, mask=1 << 18, short=64, shared=256 << 10)
CUDA = PlannerCosts(in_place=0, gather=128 << 20, waste=64 << 20, mask=1 << 24, short=64)


class Span(NamedTuple):
    """Describe the queries ``[first, first + queries)`` of the batch, all of ``row``, over its keys ``[begin, end)``.

    ``position`` is the index of the first query in its row.
    """

    row: int
    first: int
    queries: int
    position: int
    begin: int
    end: int

    @property
    def keys(self) -> int:
        """Return the number of keys that any of the queries may see."""
        return self.end - self.begin


@dataclass(slots=True)
class Group:
    """Describe rows that attend in one kernel call: ``rows`` rows of ``queries`` queries each over ``keys`` keys each.

    ``tokens`` are the places of the queries in the batch. The keys are those in the pool from place ``start`` on, or,
    if ``index`` (int64 ``[rows * pieces]``) is set, the pieces of ``unit`` places that it names, of which each row uses
    the first ``keys``. The gathered places in ``tail`` must be cleared. ``mask`` and ``causal`` are arguments of
    ``kernels.attend``. If all rows start with the same keys, which are read once, ``shared`` describes them: one row of
    all these queries, without a mask.
    """

    tokens: slice | torch.Tensor
    rows: int
    queries: int
    keys: int
    start: int = 0
    index: torch.Tensor | None = None
    unit: int = 1
    tail: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    causal: bool = False
    shared: Group | None = None


class Planner:
    """Divide one batch into groups, for any window."""

    def __init__(
        self, batch: Batch, page_size: int, bytes_per_key: int, dtype: torch.dtype, limits: PlannerCosts
    ) -> None:
        self._batch = batch
        self._page_size = page_size
        self._bytes_per_key = bytes_per_key
        self._dtype = dtype
        self._limits = limits
        self.paged: list[Span] = []
        self._device = batch.page_table.device
        self._host_table: IntArray | None = batch.page_table.numpy() if self._device.type == "cpu" else None

    def groups(self, window: int | None, *, may_share: bool = False) -> list[Group]:
        """Return groups that attend exactly once for every token, except the tokens of the spans in ``paged``.

        Sets ``paged`` anew. If there is a single group and nothing is paged, the group contains all tokens in order.
        ``may_share`` allows groups with a ``shared`` part.
        """
        batch, limit = self._batch, self._limits.short
        first_tree = len(batch.slots) if batch.tree_mask is None else batch.num_extend
        groups: list[Group] = []
        self.paged = []
        short: dict[tuple[int, bool], list[Span]] = {}
        first = 0
        for row, (prefix, queries) in enumerate(
            zip(batch.prefix_lens.tolist(), batch.extend_lens.tolist(), strict=True)
        ):
            is_tree = row >= first_tree and queries > 1
            begin = 0 if window is None else max(0, prefix - window + 1)
            span = Span(row, first, queries, prefix, begin, prefix + queries)
            if queries <= limit or is_tree:
                short.setdefault((queries, is_tree), []).append(span)
            elif self._limits.paged:
                self.paged.append(span)
            else:
                groups += self._long(row, first, prefix, queries, window)
            first += queries
        for (queries, is_tree), spans in short.items():
            # A tile of the compiled kernel already reads a key once for many queries.
            pays = may_share and not is_tree and window is None and (queries == 1 or not self._limits.paged)
            if pays and self._limits.shared is not None:
                groups += self._sharing(spans, self._limits.shared // self._bytes_per_key)
            else:
                groups += self._unshared(spans, window, is_tree)
        return groups

    def _unshared(self, spans: list[Span], window: int | None, is_tree: bool) -> list[Group]:
        if self._limits.paged and not is_tree:
            self.paged += spans
            return []
        return self._short(spans, window, is_tree)

    def _sharing(self, spans: list[Span], enough: int) -> list[Group]:
        """Return groups of spans that have the same number of queries.

        Spans that share a prefix read it once if that saves at least ``enough`` keys.
        """
        table = self._host_table
        by_page: dict[int, list[Span]] = {}
        for span in spans:
            by_page.setdefault(int(table[span.row, 0]) if table is not None and span.position else -1, []).append(span)
        groups: list[Group] = []
        alone: list[Span] = []
        for candidates in by_page.values():
            keys = self._common_keys(candidates) if table is not None and len(candidates) > 1 else 0
            if keys * (len(candidates) - 1) < max(enough, 1):
                alone += candidates
                continue
            for bucket in self._buckets([span._replace(begin=keys) for span in candidates]):
                group = self._group(bucket, None, False)
                self._gather(group, bucket)
                whole = Group(group.tokens, 1, group.rows * group.queries, keys)
                group.shared = self._locate(whole, bucket[0]._replace(begin=0, end=keys))
                groups.append(group)
        return groups + (self._unshared(sorted(alone), None, False) if alone else [])

    def _common_keys(self, spans: list[Span]) -> int:
        """Return the number of keys in the pages that all these rows start with, before the first query of any of
        them."""
        assert self._host_table is not None
        pages = min(span.position for span in spans) // self._page_size
        rows = self._host_table[[span.row for span in spans], :pages]
        differs = (rows != rows[0]).any(axis=0)
        return (int(differs.argmax()) if differs.any() else pages) * self._page_size

    def _long(self, row: int, first: int, prefix: int, queries: int, window: int | None) -> list[Group]:
        end = prefix + queries
        if prefix == 0 and (window is None or window >= end):
            span = Span(row, first, queries, 0, 0, end)
            return [self._locate(Group(slice(first, first + queries), 1, queries, end, causal=True), span)]
        step = max(16, self._limits.mask // end)
        if window is not None:
            step = min(step, max(64, window))
        groups: list[Group] = []
        for done in range(0, queries, step):
            count, position = min(step, queries - done), prefix + done
            begin = 0 if window is None else max(0, position - window + 1)
            span = Span(row, first + done, count, position, begin, position + count)
            group = Group(slice(span.first, span.first + count), 1, count, span.keys, mask=self._band(span, window))
            groups.append(self._locate(group, span))
        return groups

    def _short(self, spans: list[Span], window: int | None, is_tree: bool) -> list[Group]:
        """Return groups of spans that have the same number of queries, without shared parts."""
        groups: list[Group] = []
        gathered: list[Span] = []
        for span in spans:
            if self._reads_in_place(span, alone=len(spans) == 1):
                group = self._group([span], window, is_tree)
                group.start = self._place(span.row, span.begin)
                groups.append(group)
            else:
                gathered.append(span)
        for bucket in self._buckets(gathered):
            group = self._group(bucket, window, is_tree)
            self._gather(group, bucket)
            groups.append(group)
        return groups

    def _buckets(self, spans: list[Span]) -> list[list[Span]]:
        """Divide spans into those that share a gathered group, each in the order of the batch."""
        if len(spans) < 2:
            return [spans] if spans else []
        most, waste_limit = (limit // self._bytes_per_key for limit in (self._limits.gather, self._limits.waste))
        buckets: list[list[Span]] = []
        longest, waste = 0, 0
        for span in sorted(spans, key=lambda span: -span.keys):
            waste += longest - span.keys
            if not buckets or waste > waste_limit or longest * (len(buckets[-1]) + 1) > most:
                buckets.append([])
                longest, waste = span.keys, 0
            buckets[-1].append(span)
        return [sorted(bucket) for bucket in buckets]

    def _group(self, spans: list[Span], window: int | None, is_tree: bool) -> Group:
        rows, queries, first = len(spans), spans[0].queries, spans[0].first
        if spans[-1].first - first == (rows - 1) * queries:
            tokens: slice | torch.Tensor = slice(first, first + rows * queries)
        else:
            tokens = self._tensor([span.first + i for span in spans for i in range(queries)])
        lens = [span.keys for span in spans]
        group = Group(tokens, rows, queries, max(lens))
        if is_tree:
            group.mask = self._tree_mask(spans, group, window)
        elif queries > 1:
            group.mask = self._band(spans[0], window) if rows == 1 else self._bands(spans, group, window)
        elif min(lens) < group.keys:
            hidden = torch.arange(group.keys, device=self._device) >= self._tensor(lens)[:, None]
            group.mask = self._additive(hidden)[:, None, None]
        return group

    def _band(self, span: Span, window: int | None) -> torch.Tensor:
        """Return the mask of one causal span, ``[1, 1, queries, keys]``."""
        shape = (span.queries, span.keys)
        mask = torch.full(shape, _INF, dtype=self._dtype, device=self._device).triu_(span.position - span.begin + 1)
        if window is not None and window < span.keys:
            hidden = torch.full(shape, _INF, dtype=self._dtype, device=self._device)
            mask += hidden.tril_(span.position - window - span.begin)
        return mask[None, None]

    def _bands(self, spans: list[Span], group: Group, window: int | None) -> torch.Tensor:
        """Return the mask of several causal spans, ``[rows, 1, queries, keys]``. It also hides the padding of rows."""
        offset = self._tensor([span.position - span.begin for span in spans])[:, None, None]
        query = torch.arange(group.queries, device=self._device)[:, None] + offset  # counted from the row's first key
        key = torch.arange(group.keys, device=self._device)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        return self._additive(hidden)[:, None]

    def _tree_mask(self, spans: list[Span], group: Group, window: int | None) -> torch.Tensor:
        """Return the mask of trees, ``[rows, 1, queries, keys]``.

        Earlier keys are seen as usual; of the row's own queries a query sees those that the tree allows.
        """
        batch, width = self._batch, group.queries
        assert batch.tree_mask is not None
        begin, prefix = (self._tensor(x)[:, None] for x in ([s.begin for s in spans], [s.position for s in spans]))
        key = torch.arange(group.keys, device=self._device) + begin  # [rows, keys]
        own = key - prefix  # the index of the key among the row's queries; negative: an earlier key
        node = own.clamp(0, width - 1)
        tree = batch.tree_mask[group.tokens].view(group.rows, width, -1)
        seen = tree.gather(2, node[:, None].expand(-1, width, -1)) | (own < 0)[:, None]
        seen &= (own < width)[:, None]
        if window is not None:
            position = batch.positions[group.tokens].view(group.rows, width)
            key_position = torch.where(own < 0, key, position.gather(1, node))
            seen &= key_position[:, None] > position[:, :, None] - window
        return self._additive(~seen)[:, None]

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, _INF)

    def _locate(self, group: Group, span: Span) -> Group:
        if self._consecutive(span.row, span.begin, span.end):
            group.start = self._place(span.row, span.begin)
        else:
            self._gather(group, [span])
        return group

    def _gather(self, group: Group, spans: list[Span]) -> None:
        """Set ``index``, ``unit`` and ``tail`` of ``group``."""
        begin = spans[0].begin
        by_page = begin % self._page_size == 0 and all(span.begin == begin for span in spans)
        group.unit = self._page_size if by_page else 1
        pieces = -(-group.keys // group.unit)
        rows = [span.row for span in spans]
        table = self._page_table if by_page else self._place_table
        if len(rows) < len(table):
            table = table[rows[0] : rows[0] + 1] if len(rows) == 1 else table.index_select(0, self._tensor(rows))
        if not by_page:
            steps = torch.arange(pieces, device=self._device) + self._tensor([span.begin for span in spans])[:, None]
            last = self._tensor([span.end - 1 for span in spans])[:, None]
            group.index = table.gather(1, torch.minimum(steps, last)).reshape(-1)
            return
        owned = [-(-span.keys // group.unit) for span in spans]
        index = table[:, begin // group.unit : begin // group.unit + pieces]
        if min(owned) < pieces:
            absent = torch.arange(pieces, device=self._device) >= self._tensor(owned)[:, None]
            index = torch.where(absent, index[:, :1], index)
        group.index = index.reshape(-1)
        if group.unit > 1 and any(span.keys < group.keys for span in spans):
            group.tail = self._tail(spans, group, pieces * group.unit)

    def _tail(self, spans: list[Span], group: Group, width: int) -> torch.Tensor | None:
        """Return the gathered places within ``keys`` that contain no key of their row, or None if there are none.

        These places are the rest of the row's last page. If a row has only one page, they are also all of its padding,
        because the padding copies that page.
        """
        tail: list[int] = []
        for row, span in enumerate(spans):
            end = group.keys if span.keys < group.unit else min(group.keys, -(-span.keys // group.unit) * group.unit)
            tail += range(row * width + span.keys, row * width + end)
        return self._tensor(tail) if tail else None

    @functools.cached_property
    def _page_table(self) -> torch.Tensor:
        """Return the page table on the device, int64 ``[rows, pages of the longest row]``."""
        longest = int((self._batch.prefix_lens + self._batch.extend_lens).max())
        return self._batch.page_table[:, : -(-longest // self._page_size)].long()

    @functools.cached_property
    def _place_table(self) -> torch.Tensor:
        """Return the pool's place of every token of every row: int64 ``[rows, >= tokens of the longest row]``."""
        offsets = torch.arange(self._page_size, device=self._device)
        return (self._page_table[:, :, None] * self._page_size + offsets).flatten(1)

    def _reads_in_place(self, span: Span, alone: bool) -> bool:
        if not alone and span.keys * self._bytes_per_key < self._limits.in_place:
            return False
        return self._consecutive(span.row, span.begin, span.end)

    def _consecutive(self, row: int, begin: int, end: int) -> bool:
        """Return whether the pages of keys ``[begin, end)`` are consecutive in the pool. False if the host has no page
        table."""
        if self._host_table is None:
            return False
        low, high = begin // self._page_size, (end - 1) // self._page_size
        pages = self._host_table[row, low : high + 1]
        return int(pages[-1]) - int(pages[0]) == high - low and bool((pages[1:] > pages[:-1]).all())

    def _place(self, row: int, token: int) -> int:
        assert self._host_table is not None
        return int(self._host_table[row, token // self._page_size]) * self._page_size + token % self._page_size

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self._device)
