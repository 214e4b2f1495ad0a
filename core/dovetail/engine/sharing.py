"""Decide for each decode step in which cache groups rows read the prefixes that they share once."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.engine.grouped import backends_of
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.registry.sharing import shares_windows, why_not_shared
from dovetail.types import SharedPrefixes

if TYPE_CHECKING:
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.cache import CacheGroup
    from dovetail.registry.resolution import Resolved
    from dovetail.types import Batch, IntArray


class PrefixSharing:
    """Describe in which cache groups rows may read shared prefixes once.

    A step has a *level*: the number of groups in which they do. These are the first of ``order``, which begins with the groups
    whose rows see the most of a prefix.
    """

    def __init__(self, windows: Sequence[int | None], order: Sequence[int]) -> None:
        """``windows`` has the window of the layers of each cache group with pages, None for full and latent ones. ``order`` has
        the groups that may share, the first group first; without any, no step shares."""
        self.windows, self.order = tuple(windows), tuple(order)
        self.levels = tuple(range(len(self.order) + 1))

    @classmethod
    def of(cls, resolved: Resolved, groups: Sequence[CacheGroup]) -> PrefixSharing:
        """Return what ``resolved`` allows for a model with these cache groups."""
        windows = [group.window for group in groups if group.kind is not CacheGroupKind.STATE]
        if why_not_shared(resolved) is not None:
            return NO_SHARING
        others = [number for number, window in enumerate(windows) if number and shares_windows(resolved, window)]
        return cls(windows, (0, *sorted(others, key=lambda number: -(windows[number] or math.inf))))

    def may_share(self, group: int) -> bool:
        """Return True if rows may read shared prefixes of this group once."""
        return group in self.order

    def at(self, level: int, starts: IntArray, lens: IntArray, positions: IntArray) -> SharedPrefixes | None:
        """Return ``Batch.shared`` of a step of this level, None at level 0. For the arrays see ``SharedPrefixes``; ``positions``
        has an entry for each row."""
        own = {group: self._of(group, SharedPrefixes(starts, lens), positions) for group in self.order[:level]}
        return self._joined(own)

    def choose(self, batch: Batch, backend: AttentionBackend) -> SharedPrefixes | None:
        """Return ``Batch.shared`` of a decode batch: what all groups could share, as far as the attention backend of each group
        finds that it pays. The host does this in every step."""
        given, members = batch.shared, backends_of(backend)
        assert given is not None
        view, own = batch, dict[int, SharedPrefixes]()
        for group in self.order:
            if group:
                view = copy.copy(batch)
            view.shared = shared = self._of(group, given, batch.prefix_lens)
            if not members[group].shares(view):
                break
            own[group] = shared
        return self._joined(own)

    def _of(self, group: int, shared: SharedPrefixes, positions: IntArray) -> SharedPrefixes:
        """Return what a cache group shares of the groups of rows in ``shared``, which is what it shares without a window."""
        window = self.windows[group]
        return shared if window is None else SharedPrefixes(shared.starts, shared.lens, window, positions)

    def _joined(self, own: dict[int, SharedPrefixes]) -> SharedPrefixes | None:
        """Return what the first cache group shares, with what the others share if they do."""
        if len(own) > 1:
            own[0].others = tuple(own.get(group) for group in range(1, len(self.windows)))
        return own.get(0)


NO_SHARING = PrefixSharing((), ())
