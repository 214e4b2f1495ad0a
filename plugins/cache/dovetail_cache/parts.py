"""Keep the pages of sliding groups and the snapshots of state groups at the nodes of a radix tree.

Nodes can lose these parts while the prefixes below them stay. Each group has a ``Part``, which counts what the group
holds, protects what locked handles need, and chooses what is evicted first.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dovetail.interfaces.cache import GroupDescriptor, first_needed
from dovetail.interfaces.cache_groups import acceptable
from dovetail.types import IntArray
from dovetail_cache.node import Node, PartRank

_SOONEST: PartRank = (-1.0,)
_NOTHING = sys.maxsize
_LEAST_ENTRIES = 64


class PartQueue:
    """Order the nodes of which a part can evict something.

    The heap is updated only when something is evicted. A node whose rank may have fallen is pushed again with the
    lowest rank; a rank that has risen is corrected when its entry comes up. Only the entry that ``NodeParts.entries``
    names is valid.
    """

    def __init__(self, index: int, rank: Callable[[Node], PartRank | None]) -> None:
        self._index, self._rank = index, rank
        self._heap: list[tuple[PartRank, int, Node]] = []
        self._tie = itertools.count()
        self._limit = _LEAST_ENTRIES

    def push(self, node: Node, rank: PartRank = _SOONEST) -> None:
        """Add ``node``, unless it has an entry that comes up earlier."""
        entry = node.parts.entries[self._index]
        if entry is not None and entry <= rank:
            return
        node.parts.entries[self._index] = rank
        heapq.heappush(self._heap, (rank, next(self._tie), node))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)
            self._limit = max(_LEAST_ENTRIES, 2 * len(self._heap))

    def pop(self) -> Node | None:
        """Remove and return the node of the lowest rank; return None if nothing can be evicted."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if not self._is_valid(entry):
                continue
            node = entry[-1]
            node.parts.entries[self._index] = None
            rank = self._rank(node)
            if rank is not None and rank > entry[0]:
                self.push(node, rank)
            elif rank is not None:
                return node
        return None

    def _is_valid(self, entry: tuple[PartRank, int, Node]) -> bool:
        rank, _, node = entry
        return node.parent is not None and node.parts.entries[self._index] == rank


class Part(ABC):
    """Keep what one group has at the nodes. ``total`` and ``locked`` count pages or snapshots.

    The order of eviction is that of GreedyDual-Size (Cao and Irani, 1997): ``worth`` of a node is the clock at its last
    use plus the recompute saved per byte, and the clock is the largest worth evicted so far. What no likely match
    needs comes before everything else: prefixes are likely to be matched up to a leaf or a fork.
    """

    def __init__(
        self,
        number: int,
        row: int,
        index: int,
        group: GroupDescriptor,
        page_size: int,
        order: Callable[[Node], tuple[int, ...]],
    ) -> None:
        """Describe the group ``number`` of the context, which is the one number ``row`` of those with pages or of those
        with snapshots. ``index`` is the part's place in ``NodeParts``; ``order`` returns the first elements of ranks."""
        self.number, self.row, self.index = number, row, index
        self.group, self.page_size = group, page_size
        self.total = self.locked = 0
        self.queue = PartQueue(index, self._rank)
        self._order = order
        self._clock = 0.0

    @abstractmethod
    def present(self, path: Sequence[Node], pages: IntArray) -> NDArray[np.bool_]:
        """Return what ``acceptable`` takes, for a path whose first columns are ``pages [paged groups, n]``."""

    def accepted(self, path: Sequence[Node], pages: IntArray) -> NDArray[np.bool_]:
        """Return at which of the columns of a path the group can resume, see ``acceptable``."""
        return acceptable(self.group, self.present(path, pages), self.page_size)

    def reached(self, path: Sequence[Node], pages: IntArray) -> int:
        """Return the largest length at which the group can resume."""
        return int(np.flatnonzero(self.accepted(path, pages))[-1]) * self.page_size

    @abstractmethod
    def use(self, path: Sequence[Node], length: int, saved: int) -> None:
        """Record that a request resumes at ``length``, or can, without which it would compute ``saved`` tokens."""

    @abstractmethod
    def lock(self, node: Node) -> None:
        """Protect what is needed to resume at the end of ``node``."""

    @abstractmethod
    def unlock(self, node: Node) -> None:
        """Undo one ``lock``."""

    @abstractmethod
    def is_dead(self, leaf: Node) -> bool:
        """Return True if no request can resume within ``leaf``, whatever the other groups have."""

    @abstractmethod
    def take(self, node: Node, count: int) -> IntArray:
        """Drop what is worth least of a node that came from the queue: ``count`` pages, or more if less would be of no
        use. Return it."""

    @abstractmethod
    def clear(self, leaf: Node, keep: int) -> IntArray:
        """Drop everything after the first ``keep`` columns of an unlocked leaf. Return it."""

    @abstractmethod
    def count(self, node: Node) -> tuple[int, int]:
        """Return how much a node holds and how much of it is locked, for ``check_integrity``."""

    @abstractmethod
    def _tier(self, node: Node) -> float | None:
        """Return 0 if a node has something that no likely match needs, 1 if all of it is needed, and None if nothing can
        be evicted."""

    def take_unneeded(self, count: int) -> tuple[Node, IntArray] | None:
        """Drop something that no likely match needs: up to ``count`` pages, or a snapshot. Return it and its node; None if there
        is nothing of the kind."""
        node = self.queue.pop()
        if node is None:
            return None
        dropped = self.take(node, count) if self._tier(node) == 0 else None
        self.queue.push(node)
        return None if dropped is None else (node, dropped)

    def requeue(self, node: Node) -> None:
        """Correct the queue after the number of children of ``node`` has changed."""
        if node.parent is not None:
            self.queue.push(node)

    def _rank(self, node: Node) -> PartRank | None:
        tier = self._tier(node)
        return None if tier is None else (tier, *self._order(node), node.parts.worth[self.index])

    def _raise_worth(self, node: Node, saved: int, num_bytes: int) -> None:
        worth = node.parts.worth
        worth[self.index] = max(worth[self.index], self._clock + saved / num_bytes)

    def _advance_clock(self, node: Node) -> None:
        self._clock = max(self._clock, node.parts.worth[self.index])


class SlidingPart(Part):
    """Keep the pages of a sliding group: the row ``row`` of the nodes' pages, in which 0 is a hole."""

    def add(self, leaf: Node) -> None:
        """Count the pages of a new leaf."""
        self.total += int(np.count_nonzero(leaf.pages[self.row]))
        self.queue.push(leaf)

    def fill(self, node: Node, offered: IntArray) -> None:
        """Take the pages of ``offered``, the first columns of ``node``, where the node has holes."""
        row = node.pages[self.row, : len(offered)]
        columns = np.flatnonzero((row == 0) & (offered != 0))
        if len(columns):
            row[columns] = offered[columns]
            self.total += len(columns)
            self.locked += int(np.count_nonzero(columns >= self._protected(node) - self._first(node)))
            self.queue.push(node)

    def present(self, path: Sequence[Node], pages: IntArray) -> NDArray[np.bool_]:
        return pages[self.row] != 0

    def use(self, path: Sequence[Node], length: int, saved: int) -> None:
        begin = first_needed(self.group, length, self.page_size) * self.page_size
        num_bytes = self.group.num_bytes * max(1, (length - begin) // self.page_size)
        for node in reversed(path):
            if node.end <= begin:
                break
            if node.start < length:
                self._raise_worth(node, saved, num_bytes)

    def lock(self, node: Node) -> None:
        first = first_needed(self.group, node.end, self.page_size)
        while node.parent is not None and node.end > first * self.page_size:
            protected = self._protected(node)
            begins = node.parts.begins[self.index]
            begins[first] = begins.get(first, 0) + 1
            self.locked += self._held(node, first, protected)
            node = node.parent

    def unlock(self, node: Node) -> None:
        first = first_needed(self.group, node.end, self.page_size)
        while node.parent is not None and node.end > first * self.page_size:
            begins = node.parts.begins[self.index]
            begins[first] -= 1
            if not begins[first]:
                del begins[first]
                self.locked -= self._held(node, first, self._protected(node))
                self.queue.push(node)
            node = node.parent

    def is_dead(self, leaf: Node) -> bool:
        return self.group.window != 1 and not leaf.pages[self.row].any()

    def take(self, node: Node, count: int) -> IntArray:
        free = self._free(node)
        behind = free[: np.searchsorted(free, self._needed(node))]
        if not len(behind):
            self._advance_clock(node)
        return self._drop(node, behind[:count] if len(behind) else free)

    def clear(self, leaf: Node, keep: int) -> IntArray:
        return self._drop(leaf, keep + np.flatnonzero(leaf.pages[self.row, keep:]))

    def count(self, node: Node) -> tuple[int, int]:
        free = self._free(node)
        assert not len(free) or node.parts.entries[self.index] is not None, "a page that can be evicted is not queued"
        held = int(np.count_nonzero(node.pages[self.row]))
        return held, held - len(free)

    def requeue(self, node: Node) -> None:
        """Correct the queue: what the nodes above were needed for may have been the window of ``node``, or that of the
        last place before at which requests can resume. What is after such a place may not be needed any more."""
        if node.parent is not None:
            for step in _chain(node):
                self.queue.push(step)
                if step is not node and _has_states(step):
                    break
        begin = None
        while node.parent is not None and (begin is None or node.end > begin):
            if begin is None and _has_states(node):
                begin = node.end - (self.group.window or 0)
            self.queue.push(node)
            node = node.parent
            if len(node.children) > 1:
                break

    def _tier(self, node: Node) -> float | None:
        free = self._free(node)
        return (0.0 if free[0] < self._needed(node) else 1.0) if len(free) else None

    def _first(self, node: Node) -> int:
        return node.start // self.page_size

    def _protected(self, node: Node) -> int:
        return min(node.parts.begins[self.index], default=_NOTHING)

    def _held(self, node: Node, first: int, end: int) -> int:
        """Return the number of pages of a node in the columns from ``first`` to ``end`` of the whole path."""
        start = self._first(node)
        return int(np.count_nonzero(node.pages[self.row, max(first - start, 0) : max(end - start, 0)]))

    def _free(self, node: Node) -> NDArray[np.intp]:
        """Return the columns of a node that can be evicted."""
        return np.flatnonzero(node.pages[self.row, : max(self._protected(node) - self._first(node), 0)])

    def _needed(self, node: Node) -> int:
        """Return the first column of a node that is needed at the next leaf or fork. With state groups, requests resume at
        the last snapshots before it, and what is after the last snapshots of a text is not needed."""
        last, step, far = None, node, node.end + (self.group.window or 0)
        for step in _chain(node):
            if _has_states(step):
                last = step.end
                if last >= far:
                    break
        if last is None and not step.children and _follows_states(node):
            return node.num_pages
        return first_needed(self.group, last or step.end, self.page_size) - self._first(node)

    def _drop(self, node: Node, columns: NDArray[np.intp]) -> IntArray:
        pages = node.pages[self.row, columns]
        node.pages[self.row, columns] = 0
        self.total -= len(pages)
        return pages


class StatePart(Part):
    """Keep the snapshots of a state group. They are at the ends of nodes. Set ``windows`` to the sliding groups: which of
    their pages are needed depends on the snapshots."""

    windows: Sequence[SlidingPart] = ()

    def put(self, node: Node, snapshot: int) -> None:
        """Take a snapshot at the end of ``node`` if the node has none."""
        parts = node.parts
        if snapshot and not parts.states[self.row]:
            parts.states[self.row] = snapshot
            self.total += 1
            self.locked += parts.state_locks[self.row] > 0
            self.queue.push(node)
            self.requeue(node)
            assert node.parent is not None
            for window in self.windows:
                window.requeue(node)
                window.requeue(node.parent)

    def present(self, path: Sequence[Node], pages: IntArray) -> NDArray[np.bool_]:
        present = np.zeros(pages.shape[1] + 1, np.bool_)
        for node in path:
            if node.parts.states[self.row] and node.end <= pages.shape[1] * self.page_size:
                present[node.end // self.page_size] = True
        return present

    def reached(self, path: Sequence[Node], pages: IntArray) -> int:
        end = pages.shape[1] * self.page_size
        return next((node.end for node in reversed(path) if node.end <= end and node.parts.states[self.row]), 0)

    def use(self, path: Sequence[Node], length: int, saved: int) -> None:
        for node in reversed(path):
            if node.end == length:
                self._raise_worth(node, saved, self.group.num_bytes)
            if node.end <= length:
                break

    def lock(self, node: Node) -> None:
        locks = node.parts.state_locks
        locks[self.row] += 1
        self.locked += locks[self.row] == 1 and node.parts.states[self.row] != 0

    def unlock(self, node: Node) -> None:
        locks = node.parts.state_locks
        locks[self.row] -= 1
        if not locks[self.row] and node.parts.states[self.row]:
            self.locked -= 1
            self.queue.push(node)

    def is_dead(self, leaf: Node) -> bool:
        return not leaf.parts.states[self.row]

    def take(self, node: Node, count: int) -> IntArray:
        if self._tier(node):
            self._advance_clock(node)
        return self._drop(node)

    def clear(self, leaf: Node, keep: int) -> IntArray:
        return self._drop(leaf)

    def count(self, node: Node) -> tuple[int, int]:
        held = node.parts.states[self.row] != 0
        locked = held and node.parts.state_locks[self.row] > 0
        queued = node.parts.entries[self.index] is not None
        assert queued or locked or not held, "a snapshot that can be evicted is not queued"
        return int(held), int(locked)

    def _tier(self, node: Node) -> float | None:
        if not node.parts.states[self.row] or node.parts.state_locks[self.row]:
            return None
        return 0.0 if self._has_later(node) else 1.0

    def requeue(self, node: Node) -> None:
        """Correct the queue: there may be a later snapshot now for the one before ``node``."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            if step.parts.states[self.row]:
                self.queue.push(step)
                if step is not node:
                    break
            step = step.parent

    def _has_later(self, node: Node) -> bool:
        """Return True if there is another snapshot between the one of ``node`` and the next leaf or fork."""
        while len(node.children) == 1:
            (node,) = node.children.values()
            if node.parts.states[self.row]:
                return True
        return False

    def _drop(self, node: Node) -> IntArray:
        snapshot, node.parts.states[self.row] = node.parts.states[self.row], 0
        self.total -= snapshot != 0
        if snapshot:
            for window in self.windows:
                window.requeue(node)
        return np.array([snapshot] if snapshot else [], np.int32)


def _chain(node: Node) -> Iterator[Node]:
    """Yield ``node`` and the nodes below it, up to the next leaf or fork."""
    yield node
    while len(node.children) == 1:
        (node,) = node.children.values()
        yield node


def _has_states(node: Node) -> bool:
    """Return True if all state groups have snapshots at the end of ``node``, or if there are no such groups."""
    return all(node.parts.states)


def _follows_states(node: Node) -> bool:
    """Return True if there are snapshots at the end of a node above ``node``, and no fork between the two."""
    above = node.parent
    while above is not None and above.parent is not None and len(above.children) == 1:
        if _has_states(above):
            return True
        above = above.parent
    return False
