"""Which rows of a batch attend together, and how their keys are reached. Done once a step, for all layers.

Queries of one row that need several keys ranges or masks are cut into spans; spans that fit one kernel call make a group:

    in place   one row whose pages are consecutive: its keys are a view of the pool, nothing is copied
    gathered   one long row, or several short ones of similar length: keys are copied next to each other first

Gathered rows are filled up to the longest with their own last key, behind a mask, so that nothing is ever read from
places the row does not own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dovetail.types import Batch, IntArray

_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class Limits:
    """What is worth doing on a kind of device. ``in_place``: bytes of keys from which a view beats one more row in a
    gathered group. ``gather``: bytes of keys gathered at a time. ``mask``: elements of one mask. ``short``: queries up
    to which rows are grouped. ``spread``: how many times longer the longest row of a group may be than the shortest."""

    in_place: int
    gather: int
    mask: int
    short: int
    spread: float


CPU = Limits(in_place=96 << 10, gather=4 << 20, mask=1 << 20, short=32, spread=1.3)
CUDA = Limits(in_place=0, gather=256 << 20, mask=1 << 24, short=64, spread=4.0)


@dataclass(slots=True)
class Group:
    """Rows that attend in one kernel call: ``rows`` of ``queries`` each over ``keys`` each.

    ``tokens`` are their places in the batch. The keys are the pool's places from ``start`` on, or those of ``places``,
    int64 ``[rows * keys]``. ``mask`` and ``causal`` as in ``kernels.attend``.
    """

    tokens: slice | torch.Tensor
    rows: int
    queries: int
    keys: int
    start: int = 0
    places: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    causal: bool = False


@dataclass(slots=True)
class Spans:
    """Runs of queries, one array element each: queries ``[first, first + queries)`` of the batch, of ``row``, the first at
    ``position`` (of a tree: of its root), over keys ``[begin, end)`` of the row."""

    row: IntArray
    first: IntArray
    queries: IntArray
    position: IntArray
    begin: IntArray
    end: IntArray

    def __getitem__(self, which: IntArray) -> Spans:
        return Spans(*(getattr(self, name)[which] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.row)


class Planner:
    """The groups of one batch, for any window."""

    def __init__(self, batch: Batch, page_size: int, bytes_per_key: int, dtype: torch.dtype, limits: Limits) -> None:
        self._batch = batch
        self._page_size = page_size
        self._bytes_per_key = bytes_per_key
        self._dtype = dtype
        self._limits = limits
        self._device = batch.page_table.device
        on_host = self._device.type == "cpu"
        self._host_table: IntArray | None = batch.page_table.numpy() if on_host else None
        self._place_table: torch.Tensor | None = None

    def groups(self, window: int | None) -> list[Group]:
        """The groups that together attend for every token once."""
        batch = self._batch
        queries = batch.extend_lens
        first = np.cumsum(queries) - queries
        if batch.tree_mask is None and int(queries.max()) == 1:
            return self._grouped(self._spans(np.arange(len(queries)), first, window), window)
        tree = np.arange(len(queries)) >= (len(queries) if batch.tree_mask is None else batch.num_extend)
        short = tree | (queries <= self._limits.short)
        groups = [group for row in np.flatnonzero(~short) for group in self._long(int(row), int(first[row]), window)]
        for length in np.unique(queries[short]):
            for kind in (tree, ~tree):
                rows = np.flatnonzero(short & kind & (queries == length))
                if len(rows):
                    groups += self._grouped(self._spans(rows, first, window), window, is_tree=kind is tree)
        return groups

    def _spans(self, rows: IntArray, first: IntArray, window: int | None) -> Spans:
        prefix = self._batch.prefix_lens[rows]
        queries = self._batch.extend_lens[rows]
        begin = np.zeros_like(prefix) if window is None else np.maximum(prefix - window + 1, 0)
        return Spans(rows, first[rows], queries, prefix, begin, prefix + queries)

    def _long(self, row: int, first: int, window: int | None) -> list[Group]:
        """The groups of one row with many queries, cut so that masks stay small and windows skip what they hide."""
        prefix, queries = int(self._batch.prefix_lens[row]), int(self._batch.extend_lens[row])
        end = prefix + queries
        if prefix == 0 and (window is None or window >= end):
            return [self._single(row, first, queries, 0, end, None)]
        step = max(16, self._limits.mask // end)
        if window is not None:
            step = min(step, max(64, window))
        groups: list[Group] = []
        for done in range(0, queries, step):
            count = min(step, queries - done)
            position = prefix + done
            begin = 0 if window is None else max(0, position - window + 1)
            mask = self._band(count, position, begin, window)
            groups.append(self._single(row, first + done, count, begin, position + count, mask))
        return groups

    def _single(self, row: int, first: int, queries: int, begin: int, end: int, mask: torch.Tensor | None) -> Group:
        group = Group(slice(first, first + queries), 1, queries, end - begin, mask=mask, causal=mask is None)
        if self._host_table is not None and self._consecutive(np.array([row]), np.array([begin]), np.array([end]))[0]:
            group.start = self._place(row, begin)
        else:
            group.places = self._places()[row, begin:end]
        return group

    def _band(self, queries: int, position: int, begin: int, window: int | None) -> torch.Tensor:
        """Mask of queries from ``position`` on over keys from ``begin`` on: ``[1, 1, queries, keys]``."""
        shape = (queries, position + queries - begin)
        mask = torch.full(shape, _INF, dtype=self._dtype, device=self._device).triu_(position - begin + 1)
        if window is not None:
            hidden = torch.full(shape, _INF, dtype=self._dtype, device=self._device)
            mask += hidden.tril_(position - window - begin)
        return mask[None, None]

    def _grouped(self, spans: Spans, window: int | None, is_tree: bool = False) -> list[Group]:
        """Groups of spans with equally many queries."""
        keys = spans.end - spans.begin
        groups: list[Group] = []
        if self._host_table is not None:
            in_place = self._consecutive(spans.row, spans.begin, spans.end)
            if len(spans) > 1:
                in_place &= keys * self._bytes_per_key >= self._limits.in_place
            for index in np.flatnonzero(in_place):
                one = spans[[index]]
                group = self._group(one, window, is_tree)
                group.start = self._place(int(one.row[0]), int(one.begin[0]))
                groups.append(group)
            if in_place.any():
                spans, keys = spans[~in_place], keys[~in_place]
        for part in self._buckets(keys):
            some = spans[part]
            group = self._group(some, window, is_tree)
            group.places = self._gathered(some, group.keys)
            groups.append(group)
        return groups

    def _buckets(self, keys: IntArray) -> list[IntArray]:
        """Rows that may share a gathered group: of similar length, and not too many bytes. Keeps order if one will do."""
        if not len(keys):
            return []
        most = max(1, self._limits.gather // self._bytes_per_key)
        spread = self._limits.spread
        longest = int(keys.max())
        if longest <= int(keys.min()) * spread + 32 and longest * len(keys) <= most:
            return [np.arange(len(keys))]
        order = np.argsort(-keys, kind="stable")
        buckets: list[IntArray] = []
        start, lens = 0, keys[order].tolist()
        for i, length in enumerate(lens):
            if lens[start] > length * spread + 32 or lens[start] * (i - start + 1) > most:
                buckets.append(np.sort(order[start:i]))
                start = i
        return [part for part in (*buckets, np.sort(order[start:])) if len(part)]

    def _group(self, spans: Spans, window: int | None, is_tree: bool) -> Group:
        rows, queries = len(spans), int(spans.queries[0])
        keys = spans.end - spans.begin
        first = int(spans.first[0])
        if (spans.first == first + queries * np.arange(rows)).all():
            tokens: slice | torch.Tensor = slice(first, first + rows * queries)
        else:
            tokens = self._tensor((spans.first[:, None] + np.arange(queries)).reshape(-1))
        group = Group(tokens, rows, queries, int(keys.max()))
        if queries > 1 and rows == 1 and not is_tree:
            group.mask = self._band(queries, int(spans.position[0]), int(spans.begin[0]), window)
        elif queries > 1:
            group.mask = self._mask(spans, group, window, is_tree)
        elif int(keys.min()) < group.keys:
            hidden = torch.arange(group.keys, device=self._device) >= self._tensor(keys)[:, None]
            group.mask = self._additive(~hidden)[:, None, None]
        return group

    def _mask(self, spans: Spans, group: Group, window: int | None, is_tree: bool) -> torch.Tensor:
        """Mask of several rows or of trees, ``[rows, 1, queries, keys]``."""
        key = self._tensor(spans.begin)[:, None] + torch.arange(group.keys, device=self._device)  # [rows, keys]
        own = key - self._tensor(spans.position)[:, None]  # among the row's queries; negative: before them
        inside = (key < self._tensor(spans.end)[:, None])[:, None]
        if not is_tree:
            query = torch.arange(group.queries, device=self._device)[:, None]
            distance = query - own[:, None]  # [rows, queries, keys]
            seen = distance >= 0
        else:
            tree_mask = self._batch.tree_mask
            assert tree_mask is not None
            tree = tree_mask[group.tokens].view(group.rows, group.queries, -1)[:, :, : group.queries]
            index = own.clamp(0, group.queries - 1)
            seen = tree.gather(2, index[:, None].expand(-1, group.queries, -1)) | (own < 0)[:, None]
            position = self._batch.positions[group.tokens].view(group.rows, group.queries)
            key_position = torch.where(own < 0, key, position.gather(1, index))
            distance = position[:, :, None] - key_position[:, None]
        if window is not None:
            seen = seen & (distance < window)
        return self._additive(seen & inside)[:, None]

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(seen.shape, dtype=self._dtype, device=self._device).masked_fill_(~seen, _INF)

    def _gathered(self, spans: Spans, keys: int) -> torch.Tensor:
        places = self._places()
        if len(spans) < len(places):
            places = places.index_select(0, self._tensor(spans.row))
        lens = spans.end - spans.begin
        if int(lens.min()) == keys and not spans.begin.any():
            return places[:, :keys].reshape(-1)
        steps = torch.arange(keys, device=self._device) + self._tensor(spans.begin)[:, None]
        return places.gather(1, torch.minimum(steps, self._tensor(spans.end - 1)[:, None])).view(-1)

    def _places(self) -> torch.Tensor:
        """The pool's place of every token of every row: int64 ``[rows, tokens of the longest]``."""
        if self._place_table is None:
            longest = int((self._batch.prefix_lens + self._batch.extend_lens).max())
            pages = self._batch.page_table[:, : -(-longest // self._page_size)].long()
            if self._page_size > 1:
                steps = torch.arange(self._page_size, device=self._device)
                pages = (pages[:, :, None] * self._page_size + steps).flatten(1)
            self._place_table = pages
        return self._place_table

    def _consecutive(self, row: IntArray, begin: IntArray, end: IntArray) -> np.ndarray:
        """Whether the pages of keys ``[begin, end)`` of each row follow each other in the pool."""
        assert self._host_table is not None
        low, high = begin // self._page_size, (end - 1) // self._page_size
        if len(row) == 1:
            pages = self._host_table[row[0], low[0] : high[0] + 1]
            return np.array([(pages[1:] - pages[:-1] == 1).all()])
        table = self._host_table[row, : int(high.max()) + 1]
        column = np.arange(1, table.shape[1])
        outside = (column <= low[:, None]) | (column > high[:, None])
        return ((table[:, 1:] - table[:, :-1] == 1) | outside).all(1)

    def _place(self, row: int, token: int) -> int:
        assert self._host_table is not None
        return int(self._host_table[row, token // self._page_size]) * self._page_size + token % self._page_size

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
