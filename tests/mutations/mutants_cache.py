"""Define broken prefix caches: a radix tree with one fault each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import Phase, settings
from mutant import Mutant, Suite

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache
from dovetail.interfaces.features import Feature
from dovetail.testing.cache import PrefixCacheSuite
from dovetail.types import IntArray
from dovetail_cache.config import RadixConfig
from dovetail_cache.node import TOKEN_BYTES, Handle, Node
from dovetail_cache.radix import RadixCache


class LosesAPageAtSplit(RadixCache):
    """Lose the page before a branch, and forget that the branch had it."""

    def _end_at(self, path: list[Node], length: int) -> Node:
        node = super()._end_at(path, length)
        if node.end == length and node.num_pages > 1 and len(node.children) == 1:
            node.key, node.pages = node.key[: -self._page_size * TOKEN_BYTES], node.pages[:, :-1]
            self._total -= 1
        return node


class IgnoresNamespaces(RadixCache):
    """Keep all namespaces in one tree."""

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        return super().match(tokens)

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        return super().insert(tokens, pages, "", priority, states)


class EvictsWhatIsLocked(RadixCache):
    """Count locks, but protect nothing."""

    def lock(self, handle: Handle) -> None:
        super().lock(handle)
        self.unlock_path(handle)

    def unlock(self, handle: Handle) -> None:
        if handle.length:
            self._settle(handle)

    def unlock_path(self, handle: Handle) -> None:
        super().unlock(handle)


class UnlocksTheLastNodeOnly(RadixCache):
    """Unlock only the last node of a path."""

    def unlock(self, handle: Handle) -> None:
        if handle.length and handle.node is not None:
            handle.node.locks -= 1
            self._locked -= handle.node.num_pages if handle.node.locks == 0 else 0
            self._queue.push(handle.node)


class KeepsTheDuplicate(RadixCache):
    """Keep the offered pages even where the tree has its own."""

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        result = super().insert(tokens, pages, namespace, priority, states)
        return result._replace(pages=pages.copy())


class KeepsTheCallersArrays(RadixCache):
    """Keep the caller's arrays, to which the caller may write again."""

    def _grow(self, parent: Node, tokens: IntArray, pages: IntArray) -> Node:
        leaf = super()._grow(parent, tokens, pages)
        leaf.pages = pages
        return leaf


class MatchesHalfPages(RadixCache):
    """Ignore the last token of a page."""

    def _but_last(self, tokens: IntArray) -> IntArray:
        return np.where(np.arange(len(tokens)) % self._page_size == self._page_size - 1, np.int32(0), tokens)

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        return super().match(self._but_last(tokens), namespace)

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        return super().insert(self._but_last(tokens), pages, namespace, priority, states)


class FreesTwice(RadixCache):
    """Return the last evicted page once more with the next eviction."""

    _last = np.empty(0, np.int32)

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        (freed,) = super().evict(short)
        again, self._last = self._last, freed[-1:]
        return [np.concatenate([freed, again])]


class LosesTheRestOfALeaf(RadixCache):
    """Evict a whole leaf, but return only the requested number of pages."""

    def _shrink(self, leaf: Node, count: int) -> IntArray:
        return super()._shrink(leaf, leaf.num_pages)[:, :count]


class SharesByTheLastNode(RadixCache):
    """Group only rows that end at the same node."""

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        ends: dict[Node, list[int]] = {}
        for i, handle in enumerate(handles):
            if handle.node is not None:
                ends.setdefault(handle.node, []).append(i)
        return [(rows, node.end) for node, rows in ends.items() if len(rows) > 1]


class SharesWithAllBelow(RadixCache):
    """Return one group for each first page, as long as its longest row."""

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        tops: dict[Node, list[int]] = {}
        for i, handle in enumerate(handles):
            node = handle.node
            while node is not None and node.parent is not None and node.parent.parent is not None:
                node = node.parent
            if node is not None:
                tops.setdefault(node, []).append(i)
        return [(rows, max(handles[row].length for row in rows)) for rows in tops.values() if len(rows) > 1]


class SharesWholeBranches(RadixCache):
    """Leave rows that do not share the deepest prefix of a branch without a group."""

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        return super().shared_prefixes(handles)[-1:]


class InventsAPage(RadixCache):
    """Report a match in an empty cache."""

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        found = super().match(tokens, namespace)
        return found if found.length else found._replace(pages=np.zeros((found.pages.shape[0], 1), np.int32))


class CountsWhatItDidNotKeep(RadixCache):
    """Count the offered pages instead of those that were kept."""

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        self._total += 1
        return super().insert(tokens, pages, namespace, priority, states)


class MatchesTheNextPage(RadixCache):
    """Match the page with the first different token as well."""

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        found = super().match(tokens, namespace)
        whole = super().match(np.zeros(found.length + self._page_size, np.int32), namespace)
        return whole if whole.length > found.length else found


class MatchesWholeRunsOnly(RadixCache):
    """Match nothing of a run in which a key ends."""

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        found = super().match(tokens, namespace)
        return found if found.length in (0, 16) else super().match(tokens[:0], namespace)


class NeverSplits(RadixCache):
    """Return a whole branch to the caller."""

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        known = super().match(tokens, namespace)
        return known if 0 < known.length < len(tokens) else super().insert(tokens, pages, namespace, priority, states)


class EvictsOneAtMost(RadixCache):
    """Stop after one eviction."""

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        return super().evict([min(count, 1) for count in short])


class GivesBackWhatItKeeps(RadixCache):
    """Keep the end of the pages, and report that it was the beginning."""

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        return [np.flip(pages) - 2 for pages in super().evict(short)]


class CountsOneLock(RadixCache):
    """Release a path that was locked twice at the first unlock."""

    def lock(self, handle: Handle) -> None:
        if handle.node is None or not handle.node.locks:
            super().lock(handle)

    def unlock(self, handle: Handle) -> None:
        if handle.node is not None and handle.node.locks:
            super().unlock(handle)


class LocksTheBranchesToo(RadixCache):
    """Lock what is inserted next to a locked prefix."""

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        return super().evict([0 if self._locked else count for count in short])


class ChangesKeys(RadixCache):
    """Compare what ``changed`` makes of the keys."""

    def changed(self, tokens: IntArray) -> IntArray:
        raise NotImplementedError

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        return super().match(self.changed(tokens), namespace)

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        return super().insert(self.changed(tokens), pages, namespace, priority, states)

    def by_page(self, tokens: IntArray) -> IntArray:
        return tokens[: len(tokens) // self._page_size * self._page_size].reshape(-1, self._page_size)


class CutsIds(ChangesKeys):
    def changed(self, tokens: IntArray) -> IntArray:
        return tokens.astype(np.uint16).astype(np.int32)


class SumsPages(ChangesKeys):
    def changed(self, tokens: IntArray) -> IntArray:
        pages = self.by_page(tokens)
        sums = np.zeros_like(pages)
        sums[:, 0] = pages.sum(1, dtype=np.int64).astype(np.int32)
        return sums.reshape(-1)


class SortsPages(ChangesKeys):
    def changed(self, tokens: IntArray) -> IntArray:
        return np.sort(self.by_page(tokens), axis=1).reshape(-1)


class CountsPagesOn(RadixCache):
    """Remember the first page of a match and count on from it."""

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        found = super().match(tokens, namespace)
        count = found.pages.shape[1]
        return found._replace(pages=found.pages[:, :1] + np.arange(count, dtype=np.int32)) if count else found


class SharesWithItself(RadixCache):
    """Return a group of one for every row."""

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        return [([row], handle.length) for row, handle in enumerate(handles)]


class SharesAcrossNamespaces(RadixCache):
    """Let rows of one length share all of it."""

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        return [(list(range(len(handles))), handles[0].length)]


def suite(cache_class: type[PrefixCache]) -> Suite:
    class Suite(PrefixCacheSuite):
        name = "radix"

        def make_for(self, context: CacheContext) -> PrefixCache:
            return cache_class(RadixConfig(), context)

        def offers(self, feature: Feature) -> bool:
            return True

        def history_settings(self) -> settings:
            return settings(super().history_settings(), phases=[Phase.generate])

    return Suite


class Silent(RadixCache):
    """Do not check its own consistency."""

    def check_integrity(self) -> None:
        return


def silent(cache_class: type[RadixCache]) -> type[RadixCache]:
    """Return ``cache_class`` without its own checks, so that the suite must find the fault."""
    return type(f"Silent{cache_class.__name__}", (cache_class,), {"check_integrity": Silent.check_integrity})


SOUND = suite(RadixCache)
MACHINE = "test_agrees_with_a_dictionary"


def _of(fault: str, cache_class: type[RadixCache], case: str, *arguments: Any, says: str = "") -> Mutant:
    return Mutant(fault, case, suite(silent(cache_class)), SOUND, [arguments], says)


MUTANTS = [
    _of("leaks a page where a run is split", LosesAPageAtSplit, MACHINE, 4, 1),
    _of("matches across namespaces", IgnoresNamespaces, MACHINE, 4, 1),
    _of("evicts what is locked", EvictsWhatIsLocked, MACHINE, 4, 1),
    _of("unlocks the last node only", UnlocksTheLastNodeOnly, MACHINE, 4, 1),
    _of("keeps a duplicate's pages", KeepsTheDuplicate, MACHINE, 4, 1, says="insert replaced a page"),
    _of("keeps the caller's arrays", KeepsTheCallersArrays, MACHINE, 4, 1),
    _of("does not compare a page's last token", MatchesHalfPages, MACHINE, 4, 1),
    _of("frees a page twice", FreesTwice, MACHINE, 4, 1),
    _of("leaks the rest of an evicted leaf", LosesTheRestOfALeaf, MACHINE, 4, 1),
    _of("finds a page in an empty cache", InventsAPage, "test_an_empty_cache_finds_nothing", 4, 1),
    _of(
        "counts pages that it did not keep",
        CountsWhatItDidNotKeep,
        "test_pages_that_are_not_kept_belong_to_the_caller",
        4,
        1,
    ),
    _of("matches one page too many", MatchesTheNextPage, "test_finds_whole_pages_of_a_prefix", 4, 1),
    _of("finds whole runs only", MatchesWholeRunsOnly, "test_a_key_may_end_inside_a_run"),
    *(
        _of(fault, broken, "test_keys_of_a_large_vocabulary_are_compared_in_full", 4, 1)
        for fault, broken in (
            ("cuts token ids to 16 bits", CutsIds),
            ("compares the sums of pages", SumsPages),
            ("ignores the order of the tokens of a page", SortsPages),
            ("takes pages to be consecutive", CountsPagesOn),
        )
    ),
    _of("claims a duplicate's pages", KeepsTheDuplicate, "test_duplicate_pages_belong_to_the_caller"),
    _of("keeps no second branch", NeverSplits, "test_branches_share_their_beginning"),
    _of("finds prefixes of another namespace", IgnoresNamespaces, "test_namespaces_are_separate"),
    _of("evicts too little", EvictsOneAtMost, "test_evicts_leaves_first_and_enough"),
    _of("gives back pages that it keeps", GivesBackWhatItKeeps, "test_evicts_leaves_first_and_enough"),
    _of("counts no more than one lock", CountsOneLock, "test_a_lock_protects_its_path_until_the_last_unlock"),
    _of("evicts a locked path", EvictsWhatIsLocked, "test_a_lock_protects_its_path_until_the_last_unlock"),
    _of("locks later branches too", LocksTheBranchesToo, "test_a_lock_holds_after_later_inserts"),
    _of(
        "groups only rows that end at one node",
        SharesByTheLastNode,
        "test_random_paths_share_as_much_as_they_can",
        4,
        1,
    ),
    _of(
        "forms one group for each first page",
        SharesWithAllBelow,
        "test_random_paths_share_as_much_as_they_can",
        4,
        1,
    ),
    _of("groups only the deepest prefix", SharesWholeBranches, "test_random_paths_share_as_much_as_they_can", 4, 1),
    _of("forms no group of the remaining rows", SharesWholeBranches, "test_remaining_rows_share_a_shorter_prefix"),
    _of("has groups of one", SharesWithItself, "test_empty_prefixes_share_nothing"),
    _of("shares pages across namespaces", SharesAcrossNamespaces, "test_namespaces_share_nothing"),
]
