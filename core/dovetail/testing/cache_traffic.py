"""Simulate requests at the level of prefix cache and allocators, without a scheduler or an engine.

Every page number has one owner: its allocator, a request, or the cache. Every page and snapshot remembers for which
tokens it was computed, and each match is checked against that, so a lost, a doubly owned or a stale page is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.interfaces.cache import CacheContext, PrefixCache, first_needed
from dovetail.types import IntArray

_FREE, _CACHED = 0, -1
_PAGE_0 = -2


class Allocator:
    """Hand out the pages or snapshots 1 to ``count`` of one group, and remember owners and contents."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count, 0, -1))
        self.owner = np.full(count + 1, _FREE)  # a request's number, _FREE or _CACHED
        self.owner[0] = _PAGE_0
        self.content: list[int | None] = [None] * (count + 1)  # the prefix that ends with a page or snapshot

    def take(self, owner: int) -> int:
        """Return a free page, which belongs to ``owner`` from now on."""
        page = self.free.pop()
        assert self.owner[page] == _FREE, "a page has two owners"
        self.owner[page], self.content[page] = owner, None
        return page

    def give(self, page: int, owner: int) -> None:
        """Take back a page from its owner."""
        assert self.owner[page] == owner, f"a page of {self.owner[page]} was given back by {owner}"
        self.owner[page] = _FREE
        self.free.append(page)

    def pass_on(self, page: int, owner: int, to: int) -> None:
        """Record a new owner."""
        assert self.owner[page] == owner, f"a page of {self.owner[page]} was passed on by {owner}"
        self.owner[page] = to


@dataclass(eq=False)
class Simulated:
    """Hold a request that runs: its tokens, of which ``computed`` are computed, and its row of pages, 0 for holes.
    ``own`` are the entries of the row that belong to the request and not to the cache. ``prefixes[c]`` identifies the
    namespace and the tokens of the first c pages. ``hit`` is the length of the match, and ``common`` is what the key
    has in common with the cached ones."""

    number: int
    tokens: IntArray
    namespace: str
    prefixes: list[int]
    computed: int
    row: IntArray  # [paged groups, columns]
    own: np.ndarray
    handle: Any
    hit: int
    common: int
    snapshots: dict[int, list[int]] = field(default_factory=dict)  # by length, one for each state group


class Traffic:
    """Run requests against ``cache``. ``sizes`` are the pages and snapshots of each group."""

    def __init__(self, cache: PrefixCache, context: CacheContext, sizes: tuple[int, ...]) -> None:
        self.cache, self.page_size, self.groups = cache, context.page_size, context.groups
        self.allocators = [Allocator(size) for size in sizes]
        self.paged = [number for number, group in enumerate(context.groups) if group.paged]
        self.states = [number for number, group in enumerate(context.groups) if not group.paged]
        self.running: list[Simulated] = []
        self.prompt_tokens = self.hit_tokens = self.num_requests = 0

    def admit(self, tokens: IntArray, namespace: str = "") -> Simulated:
        """Start a request at its longest cached prefix, which ends before its last token."""
        self.num_requests += 1
        match = self.cache.match(tokens[: len(tokens) - 1], namespace)
        self.cache.lock(match.handle)
        columns = -(-len(tokens) // self.page_size)
        row = np.zeros((len(self.paged), columns), np.int32)
        row[:, : match.pages.shape[1]] = match.pages
        own = np.zeros(row.shape, np.bool_)
        prefixes, size, common = [hash(namespace)], self.page_size, match.common
        for column in range(len(tokens) // size):
            prefixes.append(hash((prefixes[-1], tokens[column * size : (column + 1) * size].tobytes())))
        number, handle, length = self.num_requests, match.handle, match.length
        req = Simulated(number, tokens, namespace, prefixes, length, row, own, handle, length, common)
        self._check_resumable(req)
        if self.states and match.length:
            assert match.states is not None
            for group, snapshot in zip(self.states, match.states.tolist(), strict=True):
                expected = prefixes[match.length // size]
                assert self._content(group, snapshot) == expected, "a snapshot of other tokens"
        self.running.append(req)
        self.prompt_tokens += len(tokens)
        self.hit_tokens += match.length
        return req

    def compute(self, req: Simulated, length: int, *, snapshot: bool = True) -> bool:
        """Compute the tokens up to ``length``, offer them to the cache, and give back what the windows have left behind.
        Return False if pages are missing; then nothing has changed. With ``snapshot``, offer a snapshot of each state
        group at the last multiple of the page size."""
        length = min(length, len(req.tokens))
        begin, end = -(-req.computed // self.page_size), -(-length // self.page_size)
        at = length // self.page_size * self.page_size
        snapshots = snapshot and at > req.computed and bool(self.states)
        need = [end - begin if group.paged else int(snapshots) for group in self.groups]
        if not self._make_free(need):
            return False
        self._check_resumable(req)
        for row, group in enumerate(self.paged):
            for column in range(begin, end):
                req.row[row, column] = self.allocators[group].take(req.number)
                req.own[row, column] = True
            for column in range(req.computed // self.page_size, length // self.page_size):
                if req.own[row, column] and req.row[row, column]:
                    self.allocators[group].content[req.row[row, column]] = req.prefixes[column + 1]
        if snapshots:
            req.snapshots[at] = [self.allocators[group].take(req.number) for group in self.states]
            for group, number in zip(self.states, req.snapshots[at], strict=True):
                self.allocators[group].content[number] = req.prefixes[at // self.page_size]
        req.computed = length
        self.share(req)
        return True

    def share(self, req: Simulated) -> None:
        """Offer the full pages and the snapshot to the cache, and give back what is not needed any more."""
        count = req.computed // self.page_size
        at = count * self.page_size
        offered = req.row[:, :count].copy()
        snapshots = req.snapshots.pop(at, None)
        states = None if snapshots is None else np.array(snapshots, np.int32)
        result = self.cache.insert(req.tokens[:at], offered, req.namespace, 0, states)
        kept = result.pages.shape[1]
        for row, group in enumerate(self.paged):
            for column in np.flatnonzero(offered[row, :kept]).tolist():
                self._settle(req, group, row, column, int(result.pages[row, column]))
        if snapshots is not None:
            assert result.states is not None
            for row, (group, number) in enumerate(zip(self.states, snapshots, strict=True)):
                if kept == count and result.states[row] == number:
                    self.allocators[group].pass_on(number, req.number, _CACHED)
                else:
                    self.allocators[group].give(number, req.number)
        self.cache.lock(result.handle)
        self.cache.unlock(req.handle)
        req.handle = result.handle
        self._leave_behind(req)

    def stop(self, req: Simulated, *, share: bool = True) -> None:
        """Remove a request, which has ended, was retracted, or, without ``share``, was aborted."""
        if share:
            self.share(req)
        for row, group in enumerate(self.paged):
            for column in np.flatnonzero(req.own[row] & (req.row[row] != 0)).tolist():
                self.allocators[group].give(int(req.row[row, column]), req.number)
        for snapshots in req.snapshots.values():
            for group, number in zip(self.states, snapshots, strict=True):
                self.allocators[group].give(number, req.number)
        self.cache.unlock(req.handle)
        self.running.remove(req)

    def serve(self, tokens: IntArray, chunk: int, namespace: str = "") -> int:
        """Run a request alone from its prompt to its end, and return the number of tokens that were cached. Of models
        with state groups, it stops for a snapshot where other prompts branch."""
        req = self.admit(tokens, namespace)
        while req.computed < len(tokens):
            stop = req.common if self.states and req.computed < req.common else len(tokens)
            assert self.compute(req, min(req.computed + chunk, stop)), "the pool is too small for the request"
        self.stop(req)
        return req.hit

    def check(self) -> None:
        """Assert that the counters of the cache are right, and that each page has exactly one owner."""
        self.cache.check_integrity()
        assert self.cache.total == tuple(int((a.owner == _CACHED).sum()) for a in self.allocators), "pages were lost"
        for allocator in self.allocators:
            assert len(allocator.free) == int((allocator.owner == _FREE).sum()), "pages were lost"
        for row, group in enumerate(self.paged):
            numbers = [req.row[row][req.own[row]] for req in self.running]
            held = np.concatenate(numbers) if numbers else np.zeros(0, np.int32)
            assert len(held[held != 0]) == int((self.allocators[group].owner > 0).sum()), "pages were lost"

    def close(self) -> None:
        """Abort what runs, drop all that is cached, and assert that every page is free."""
        for req in list(self.running):
            self.stop(req, share=False)
        self._take_back(self.cache.reset())
        self.check()
        assert all(len(a.free) == len(a.owner) - 1 for a in self.allocators), "pages were lost"

    def _settle(self, req: Simulated, group: int, row: int, column: int, held: int) -> None:
        """Note whose the page of an entry is after an insert that has returned ``held`` for it."""
        page, allocator = int(req.row[row, column]), self.allocators[group]
        if not req.own[row, column]:
            assert held == page, "the cache has replaced a page that is locked"
        elif held == page:
            allocator.pass_on(page, req.number, _CACHED)
            req.own[row, column] = False
        elif held:
            assert self._content(group, held) == allocator.content[page], "the cache's page holds other tokens"
            allocator.give(page, req.number)
            req.row[row, column], req.own[row, column] = held, False

    def _leave_behind(self, req: Simulated) -> None:
        """Make holes of the entries behind the windows. Own pages are free from then on."""
        for row, group in enumerate(self.paged):
            length = req.computed // self.page_size * self.page_size
            first = first_needed(self.groups[group], length, self.page_size)
            for column in np.flatnonzero(req.row[row, :first]).tolist():
                if req.own[row, column]:
                    self.allocators[group].give(int(req.row[row, column]), req.number)
                req.row[row, column], req.own[row, column] = 0, False

    def _make_free(self, need: list[int]) -> bool:
        short = [max(0, count - len(a.free)) for count, a in zip(need, self.allocators, strict=True)]
        if any(count > most for count, most in zip(short, self.cache.evictable, strict=True)):
            return False
        if any(short):
            self._take_back(self.cache.evict(short))
        return True

    def _take_back(self, freed: list[IntArray]) -> None:
        for allocator, pages in zip(self.allocators, freed, strict=True):
            for page in pages.tolist():
                allocator.give(page, _CACHED)

    def _check_resumable(self, req: Simulated) -> None:
        """Assert that the row has what the next token sees: pages that were computed for these tokens."""
        columns = req.computed // self.page_size
        for row, group in enumerate(self.paged):
            first = first_needed(self.groups[group], columns * self.page_size, self.page_size)
            for column in range(first, columns):
                page = int(req.row[row, column])
                assert page, "a page that is needed is a hole"
                assert self._content(group, page) == req.prefixes[column + 1], "a page was computed for other tokens"
                owner = req.number if req.own[row, column] else _CACHED
                assert self.allocators[group].owner[page] == owner, "a page that is read belongs to something else"

    def _content(self, group: int, page: int) -> int | None:
        return self.allocators[group].content[page]
