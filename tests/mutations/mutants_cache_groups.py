"""Define broken prefix caches of several kinds of groups: a radix tree with one fault each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import Phase, settings
from mutant import Mutant, Suite

from dovetail.interfaces.cache import CacheContext, Match
from dovetail.interfaces.features import Feature
from dovetail.testing.cache import PrefixCacheSuite
from dovetail.testing.cache_groups import MIXED
from dovetail.types import IntArray
from dovetail_cache.config import RadixConfig
from dovetail_cache.grouped import Freed, GroupedRadixTree
from dovetail_cache.node import Handle, Node
from dovetail_cache.radix import RadixCache
from dovetail_cache.tree import RadixTree


class OtherWindows(GroupedRadixTree):
    """Keep groups whose windows are other than those of the context."""

    def changed(self, window: int) -> int:
        raise NotImplementedError

    def __init__(self, config: RadixConfig, context: CacheContext) -> None:
        groups = [g if g.window is None else replace(g, window=self.changed(g.window)) for g in context.groups]
        super().__init__(config, replace(context, groups=tuple(groups)))


class TakesWindowsToBeShorter(OtherWindows):
    def changed(self, window: int) -> int:
        return max(2, window - 4)


class TakesWindowsToBeEndless(OtherWindows):
    def changed(self, window: int) -> int:
        return 1 << 20


class TakesHolesForPages(GroupedRadixTree):
    """Resume where pages of sliding groups are missing."""

    def _accepted(self, path: list[Node], pages: IntArray) -> tuple[np.ndarray, tuple[int, ...]]:
        return super()._accepted(path, np.where(pages == 0, np.int32(1), pages))


class FindsTheWholePath(GroupedRadixTree):
    """Return the pages behind the windows too, which no lock protects."""

    def _result(self, path: list[Node], length: int, pages: IntArray, reached: tuple[int, ...]) -> Match:
        return super()._result(path, length, self._pages_of(path, length), reached)


class FillsNoHole(GroupedRadixTree):
    def _fill(self, path: list[Node], held: IntArray, offered: IntArray) -> None:
        return


class ReplacesPages(GroupedRadixTree):
    """Take the offered pages of sliding groups where the cache has some already."""

    def _fill(self, path: list[Node], held: IntArray, offered: IntArray) -> None:
        for part in self._sliding:
            for node in path:
                start = node.start // self._page_size
                row = node.pages[part.row, : max(0, held.shape[1] - start)]
                row[:] = np.where(row != 0, offered[part.row, start : start + len(row)], row)
            both = (held[part.row] != 0) & (offered[part.row, : held.shape[1]] != 0)
            held[part.row] = np.where(both, offered[part.row, : held.shape[1]], held[part.row])
        super()._fill(path, held, offered)


class ResumesAnywhere(GroupedRadixTree):
    """Take a snapshot to be good at every greater length."""

    def __init__(self, config: RadixConfig, context: CacheContext) -> None:
        super().__init__(config, context)
        for part in self._states:
            part.present = self._after(part.present)

    def _after(self, present: Any) -> Any:
        return lambda path, pages: np.maximum.accumulate(present(path, pages))


class ReplacesSnapshots(GroupedRadixTree):
    """Take a later snapshot in place of the first."""

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        result = super().insert(tokens, pages, namespace, priority, states)
        if states is None or not result.length:
            return result
        self._settle(result.handle).parts.states[:] = states.tolist()
        return result._replace(states=states.copy())


class LocksTheFullGroupsOnly(GroupedRadixTree):
    def lock(self, handle: Handle) -> None:
        RadixTree.lock(self, handle)

    def unlock(self, handle: Handle) -> None:
        RadixTree.unlock(self, handle)


class LocksTheLastNodeOfWindows(GroupedRadixTree):
    """Protect windows only as far as they are in the last run."""

    def lock(self, handle: Handle) -> None:
        self._alone(super().lock, handle)

    def unlock(self, handle: Handle) -> None:
        self._alone(super().unlock, handle)

    def _alone(self, call: Any, handle: Handle) -> None:
        windows = [(part, part.group) for part in self._sliding]
        node = self._settle(handle) if handle.length else None
        for part, group in windows if node is not None else ():
            part.group = replace(group, window=min(group.window or 0, node.num_tokens if node is not None else 0))
        call(handle)
        for part, group in windows:
            part.group = group


class LosesPagesAtSplits(GroupedRadixTree):
    """Forget the last page of a sliding group where a run is split."""

    def _split(self, node: Node, length: int) -> Node:
        upper = super()._split(node, length)
        for part in self._sliding:
            part.total -= int(upper.pages[part.row, -1] != 0)
            upper.pages[part.row, -1] = 0
        return upper


class KeepsDroppedSnapshots(GroupedRadixTree):
    """Do not give back the snapshots of dropped leaves."""

    def _drop_tail(self, leaf: Node, count: int, freed: Freed) -> None:
        for part in self._states:
            part.clear(leaf, 0)
        super()._drop_tail(leaf, count, freed)


class GivesSnapshotsBackTwice(GroupedRadixTree):
    _last: IntArray = np.empty(0, np.int32)

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        freed = super().evict(short)
        number = self._states[0].number
        again, self._last = self._last, freed[number][-1:]
        freed[number] = np.concatenate([freed[number], again])
        return freed


class ResumesAtMultiplesOfTheWindow(GroupedRadixTree):
    """Find whole blocks of the size of a window only."""

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        block = min((part.group.window or 1) for part in self._sliding)
        return super().match(tokens[: len(tokens) // block * block], namespace)


class SharesNothing(GroupedRadixTree):
    """Report no shared prefixes."""

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        return []


def suite(cache_class: type[GroupedRadixTree] | None = None) -> Suite:
    class GroupedSuite(PrefixCacheSuite):
        name = "radix"

        def make_for(self, context: CacheContext) -> RadixTree:
            return (cache_class or RadixCache)(RadixConfig(), context)

        def offers(self, feature: Feature) -> bool:
            return True

        def history_settings(self) -> settings:
            return settings(super().history_settings(), phases=[Phase.generate])

    return GroupedSuite


def _of(fault: str, cache_class: type[GroupedRadixTree], case: str, *arguments: Any) -> Mutant:
    silent = type(f"Silent{cache_class.__name__}", (cache_class,), {"check_integrity": lambda self: None})
    return Mutant(fault, case, suite(silent), suite(), [arguments])


MACHINE = "test_groups_agree_with_a_dictionary"
TRAFFIC = "test_requests_lose_no_page"
WINDOW, HOLE = "test_no_page_behind_the_window_is_needed", "test_a_hole_is_filled"
SNAPSHOT, LOCK = "test_a_snapshot_is_found_at_exactly_its_length", "test_a_lock_protects_the_window_and_the_snapshot"
SHARED = "test_rows_share_the_pages_of_their_paths"
SIMILAR = "test_similar_prompts_find_what_they_share"

MUTANTS = [
    _of("takes windows to be shorter than they are", TakesWindowsToBeShorter, MACHINE, "full, sliding", 4),
    _of("takes holes for pages", TakesHolesForPages, MACHINE, "sliding", 4),
    _of("hands out pages behind the window, which no lock protects", FindsTheWholePath, SIMILAR, 40),
    _of("replaces pages of sliding groups", ReplacesPages, MACHINE, MIXED, 4),
    _of("resumes after a snapshot", ResumesAnywhere, MACHINE, "full, state", 4),
    _of("protects neither windows nor snapshots", LocksTheFullGroupsOnly, MACHINE, MIXED, 4),
    _of("protects windows in the last run only", LocksTheLastNodeOfWindows, MACHINE, "full, sliding", 1),
    _of("loses a window's page where a run is split", LosesPagesAtSplits, MACHINE, "full, sliding", 4),
    _of("keeps snapshots of dropped leaves", KeepsDroppedSnapshots, MACHINE, "full, state", 4),
    _of("needs pages behind the window", TakesWindowsToBeEndless, WINDOW),
    _of("resumes where a page of the window is missing", TakesHolesForPages, WINDOW),
    _of("takes windows to be shorter than they are", TakesWindowsToBeShorter, WINDOW),
    _of("never fills a hole", FillsNoHole, HOLE),
    _of("resumes after a snapshot", ResumesAnywhere, SNAPSHOT),
    _of("replaces a snapshot", ReplacesSnapshots, SNAPSHOT),
    _of("protects neither windows nor snapshots", LocksTheFullGroupsOnly, LOCK),
    _of("protects a shorter window", TakesWindowsToBeShorter, LOCK),
    _of("finds whole windows only", ResumesAtMultiplesOfTheWindow, SIMILAR, 100),
    _of("shares nothing if another group slides", SharesNothing, SHARED, "full, sliding"),
    _of("shares nothing if no group is full", SharesNothing, SHARED, "sliding, state"),
    _of("loses a window's page where a run is split", LosesPagesAtSplits, TRAFFIC, "full, sliding"),
    _of("takes holes for pages", TakesHolesForPages, TRAFFIC, MIXED),
    _of("gives snapshots back twice", GivesSnapshotsBackTwice, TRAFFIC, MIXED),
    _of("keeps snapshots of dropped leaves", KeepsDroppedSnapshots, TRAFFIC, MIXED),
    _of("protects neither windows nor snapshots", LocksTheFullGroupsOnly, TRAFFIC, MIXED),
]
