"""Keep prefixes of models with sliding or state groups in a radix tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dovetail.interfaces.cache import CacheContext, Match, first_needed
from dovetail.types import IntArray
from dovetail_cache.config import RadixConfig
from dovetail_cache.eviction import RANKS, Rank
from dovetail_cache.node import Handle, Node, NodeParts, Root, child_key
from dovetail_cache.parts import Part, SlidingPart, StatePart
from dovetail_cache.tree import RadixTree


class Freed:
    """Collect the pages and snapshots of each group that are dropped."""

    def __init__(self, num_groups: int) -> None:
        self._pages: list[list[IntArray]] = [[np.empty(0, np.int32)] for _ in range(num_groups)]
        self.counts = [0] * num_groups

    def add(self, group: int, pages: IntArray) -> None:
        """Add ``pages [n]`` of a group."""
        self._pages[group].append(pages)
        self.counts[group] += len(pages)

    def result(self) -> list[IntArray]:
        """Return an array for each group."""
        return [np.concatenate(pages) for pages in self._pages]


class GroupedRadixTree(RadixTree):
    """Keep one tree per namespace, whose nodes can have holes in sliding groups and snapshots of state groups.

    Every column of a node has a page in each full and latent group. A lock protects the path in these groups; what it
    protects in the other groups is counted by their parts. When a leaf can no longer be resumed at, it is dropped.
    """

    def __init__(self, config: RadixConfig, context: CacheContext) -> None:
        """Create an empty cache. ``config.eviction`` orders what is needed equally likely: ``lru`` by recompute saved
        per byte and recency alone, ``lfu`` and ``priority`` by uses or priority first."""
        super().__init__(config, context)
        self._num_groups = context.num_paged
        paged = [number for number, group in enumerate(context.groups) if group.paged]
        dense = [number for number in paged if context.groups[number].dense]
        self._dense = [(number, paged.index(number)) for number in dense]
        rank = RANKS[config.eviction]
        order = _without_recency(rank)
        sliding = [number for number in paged if number not in dense]
        states = [number for number, group in enumerate(context.groups) if not group.paged]
        self._sliding = [
            SlidingPart(number, paged.index(number), index, context.groups[number], self._page_size, order)
            for index, number in enumerate(sliding)
        ]
        self._states = [
            StatePart(number, row, len(sliding) + row, context.groups[number], self._page_size, order)
            for row, number in enumerate(states)
        ]
        for part in self._states:
            part.windows = self._sliding
        self._parts: list[Part] = [*self._sliding, *self._states]
        self._num_all = len(context.groups)
        self._queue.rank = lambda node: (not self._is_dead(node), *rank(node))
        self._bare: list[Node] = []  # leaves of trees without full pages that may be dead since they were unlocked

    @property
    def total(self) -> tuple[int, ...]:
        """Return the number of pages or snapshots of each group."""
        counts = [self._total] * self._num_all
        for part in self._parts:
            counts[part.number] = part.total
        return tuple(counts)

    @property
    def evictable(self) -> tuple[int, ...]:
        """Return the number of pages or snapshots of each group that no lock protects."""
        counts = [self._total - self._locked] * self._num_all
        for part in self._parts:
            counts[part.number] = part.total - part.locked
        return tuple(counts)

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return the longest prefix at which all groups can resume. Does not split nodes."""
        root = self._roots.get(namespace)
        path, length = self._walk(root, tokens) if root is not None else ([], 0)
        pages = self._pages_of(path, length)
        common, reached = self._accepted(path, pages)
        columns, known = int(np.flatnonzero(common)[-1]), length
        length = columns * self._page_size
        self._use(path, length)
        pages = pages[:, :columns]
        for part in self._sliding:
            pages[part.row, : first_needed(part.group, length, self._page_size)] = 0
        return self._result(path, length, pages, reached)._replace(common=known)

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        """Add what is not cached yet, fill holes, and take snapshots; see ``PrefixCache.insert``."""
        offered = len(tokens) // self._page_size
        assert pages.shape == (self._num_groups, offered), f"{pages.shape} pages for {len(tokens)} tokens"
        offers_states = states is not None and bool(np.any(states))
        root = self._roots.get(namespace)
        path, length = self._walk(root, tokens) if root is not None else ([], 0)
        end = offered * self._page_size
        if not self._dense and not offers_states:  # columns after the last page would hold nothing
            kept = np.flatnonzero(pages.any(axis=0))
            end = max(length, (int(kept[-1]) + 1 if len(kept) else 0) * self._page_size)
        if end == 0:
            return self._result([], 0, pages[:, :0].copy(), (0,) * self._num_all)
        root = root or self._roots.setdefault(namespace, Root(namespace, self._num_groups))
        held = self._pages_of(path, length)
        self._fill(path, held, pages)
        if length < end:
            parent = self._end_at(path, length) if path else root
            columns = pages[:, length // self._page_size : end // self._page_size]
            held = np.concatenate([held, columns], axis=1)
            path.append(self._grow(parent, tokens[length:end].tobytes(), columns))
        if states is not None and offers_states:
            node = self._end_at(path, end)
            for part in self._states:
                part.put(node, int(states[part.row]))
        for node in path:
            node.priority = max(node.priority, priority)
        self._use(path, end)
        return self._result(path, end, held, self._reached(path, held))

    def lock(self, handle: Handle) -> None:
        """Protect what is needed to resume at the end of ``handle``. If the handle ends inside a node, split it."""
        super().lock(handle)
        if handle.length:
            assert handle.node is not None
            for part in self._parts:
                part.lock(handle.node)

    def unlock(self, handle: Handle) -> None:
        """Undo one ``lock`` of this same handle."""
        super().unlock(handle)
        if handle.length:
            node = handle.node
            assert node is not None
            for part in self._parts:
                part.unlock(node)
            if not self._dense and not node.locks and not node.children and self._is_dead(node):
                self._bare.append(node)

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        """Drop unlocked leaves until the full and latent groups have enough, then parts of any nodes."""
        freed = Freed(self._num_all)
        goals = [min(count, most) for count, most in zip(short, self.evictable, strict=True)]
        for node in self._bare:
            self._drop_dead(node, freed)
        self._bare.clear()
        while (missing := max((goals[g] - freed.counts[g] for g, _ in self._dense), default=0)) > 0:
            leaf = self._queue.pop()
            assert leaf is not None, "there are evictable pages and no evictable leaf"
            self._drop_tail(leaf, min(missing, leaf.num_pages), freed)
        for part in self._parts:
            while (missing := goals[part.number] - freed.counts[part.number]) > 0:
                node = part.queue.pop()
                assert node is not None, "there is something to evict and no node that has it"
                freed.add(part.number, part.take(node, missing))
                part.queue.push(node)
                for child in list(node.children.values()):
                    self._drop_dead(child, freed)  # no request can resume there without what was dropped
                self._drop_dead(node, freed)
        return freed.result()

    def evict_unneeded(self, most: Sequence[int]) -> list[IntArray]:
        """Drop pages behind the windows of leaves and forks, and snapshots between them; see ``PrefixCache``."""
        freed = Freed(self._num_all)
        for part in self._parts:
            while (count := most[part.number] - freed.counts[part.number]) > 0:
                taken = part.take_unneeded(count)
                if taken is None:
                    break
                node, dropped = taken
                freed.add(part.number, dropped)
                if part.is_dead(node):
                    self._drop_dead(node, freed)
        return freed.result() if any(freed.counts) else []

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        """Return the groups of paths, if they have pages (see ``RadixTree``). Two rows with the same path have the same page
        of a sliding group where both see it, because locks protect it."""
        return super().shared_prefixes(handles) if self._dense or self._sliding else []

    def _accepted(self, path: list[Node], pages: IntArray) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return at which of the columns of a path all groups can resume, and how far each group alone can."""
        reached = [pages.shape[1] * self._page_size] * self._num_all
        common = np.ones(pages.shape[1] + 1, np.bool_)
        for part in self._parts:
            accepted = part.accepted(path, pages)
            reached[part.number] = int(np.flatnonzero(accepted)[-1]) * self._page_size
            common &= accepted
        return common, tuple(reached)

    def _reached(self, path: list[Node], pages: IntArray) -> tuple[int, ...]:
        """Return how far each group alone can resume, as ``_accepted`` does."""
        reached = [pages.shape[1] * self._page_size] * self._num_all
        for part in self._parts:
            reached[part.number] = part.reached(path, pages)
        return tuple(reached)

    def _pages_of(self, path: list[Node], length: int) -> IntArray:
        """Return a copy of the pages of the first ``length`` tokens of a path."""
        if not path:
            return np.empty((self._num_groups, 0), np.int32)
        return np.concatenate([node.pages for node in path], axis=1)[:, : length // self._page_size]

    def _result(self, path: list[Node], length: int, pages: IntArray, reached: tuple[int, ...]) -> Match:
        handle = Handle(path[-1], length) if length else Handle(None, 0)
        states = np.zeros(len(self._states), np.int32) if self._states else None
        if states is not None:
            for node in path:
                if node.end == length:
                    states[:] = node.parts.states
        return Match(length, pages, handle, states, reached, length)

    def _use(self, path: list[Node], length: int) -> None:
        """Record a use of the prefix of ``length`` tokens. It saves the tokens after the last fork before it, up to
        which other prefixes keep the path."""
        if length:
            fork = max((node.end for node in path if node.end < length and len(node.children) > 1), default=0)
            for part in self._parts:
                part.use(path, length, length - fork)

    def _fill(self, path: list[Node], held: IntArray, offered: IntArray) -> None:
        """Take offered pages where the path, whose pages are ``held``, has holes. Writes them to ``held`` too."""
        for part in self._sliding:
            row, mine = offered[part.row, : held.shape[1]], held[part.row]
            columns = np.flatnonzero((mine == 0) & (row != 0))
            if not len(columns):
                continue
            mine[columns] = row[columns]
            for node in path:
                start = node.start // self._page_size
                if start <= columns[-1] and node.end > columns[0] * self._page_size:
                    part.fill(node, row[start : start + node.num_pages])

    def _split(self, node: Node, length: int) -> Node:
        upper = super()._split(node, length)
        upper.parts = NodeParts(len(self._sliding), len(self._states))
        upper.parts.worth = list(node.parts.worth)
        column = upper.end // self._page_size
        for mine, all_of_it in zip(upper.parts.begins, node.parts.begins, strict=True):
            mine.update((first, locks) for first, locks in all_of_it.items() if first < column)
        for part in self._parts:
            part.queue.push(upper)
        return upper

    def _grow(self, parent: Node, key: bytes, pages: IntArray) -> Node:
        leaf = Node(parent, key, pages.copy())
        leaf.parts = NodeParts(len(self._sliding), len(self._states))
        leaf.last_used = self._clock
        parent.children[child_key(key, self._page_size)] = leaf
        self._total += leaf.num_pages
        self._queue.push(leaf)
        for part in self._sliding:
            part.add(leaf)
        for part in self._parts:
            part.requeue(parent)
        return leaf

    def _is_dead(self, leaf: Node) -> bool:
        """Return True if no request can resume within ``leaf``, because a group has nothing there."""
        return any(part.is_dead(leaf) for part in self._parts)

    def _drop_dead(self, node: Node, freed: Freed) -> None:
        """Drop a node, and those above it, as long as they are unlocked leaves that no request can resume at."""
        while node.parent is not None and not node.children and not node.locks and self._is_dead(node):
            parent = node.parent
            self._queue.forget(node)
            self._drop_tail(node, node.num_pages, freed)
            node = parent

    def _drop_tail(self, leaf: Node, count: int, freed: Freed) -> None:
        """Drop the last ``count`` columns of an unlocked leaf in all groups."""
        keep, parent = leaf.num_pages - count, leaf.parent
        assert parent is not None
        for number, row in self._dense:
            freed.add(number, leaf.pages[row, keep:].copy())
        for part in self._parts:
            freed.add(part.number, part.clear(leaf, keep))
        self._total -= count
        self._shrink(leaf, count)
        for part in self._parts:
            part.requeue(leaf if keep else parent)

    def _check_nodes(self, nodes: list[Node]) -> None:
        for part in self._parts:
            counts = [part.count(node) for node in nodes]
            assert part.total == sum(held for held, _ in counts), "total is wrong"
            assert part.locked == sum(locked for _, locked in counts), "evictable is wrong"
            assert all(not sum(node.parts.state_locks) or node.locks for node in nodes), "a lock has no path"
        for part in self._sliding:
            self._check_pages([node.pages[part.row][node.pages[part.row] != 0] for node in nodes])
        for _, row in self._dense:
            self._check_pages([node.pages[row] for node in nodes])
        for part in self._states:
            self._check_pages([np.array([n.parts.states[part.row]]) for n in nodes if n.parts.states[part.row]])


def _without_recency(rank: Callable[[Node], Rank]) -> Callable[[Node], Rank]:
    """Return the part of a rank before the recency, which ``worth`` replaces."""
    return lambda node: rank(node)[:-1]
