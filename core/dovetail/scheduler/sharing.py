"""Decode rows that share a prefix stand side by side, so that attention may read it once for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dovetail.types import SharedPrefixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.interfaces.cache import PrefixCache
    from dovetail.types import IntArray, Req


class Grouping(NamedTuple):
    """Rows in the order of their groups. Without ``lens`` there is no group, and the order is as it was."""

    reqs: list[Req]
    starts: IntArray  # [groups + 1]
    lens: IntArray  # [groups]

    @property
    def shared(self) -> SharedPrefixes | None:
        """For a batch of these rows: its own object, as the engine writes to it; the arrays stay the same."""
        return SharedPrefixes(self.starts, self.lens) if len(self.lens) else None


_NONE = np.zeros(0, np.int32)


class Sharing:
    """Asks the prefix cache which rows begin alike."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def group(self, reqs: list[Req]) -> Grouping:
        """``reqs`` with the rows of a group behind its first one, otherwise in the order they have."""
        groups = self._cache.shared_prefixes([r.cache_handle for r in reqs]) if len(reqs) > 1 else []
        if not groups:
            return Grouping(reqs, _NONE, _NONE)
        leader, lens = _leaders(groups, len(reqs))
        order = np.argsort(leader, kind="stable")
        starts = np.flatnonzero(leader[order] == order)
        bounds = np.append(starts, len(reqs)).astype(np.int32)
        return Grouping([reqs[row] for row in order.tolist()], bounds, lens[order[starts]])


def _leaders(groups: Sequence[tuple[list[int], int]], rows: int) -> tuple[IntArray, IntArray]:
    """The first row of each row's group, int32 ``[rows]``, and at that row the group's length."""
    leader, lens = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    for members, length in groups:
        first = min(members)
        leader[members] = first
        lens[first] = length
    return leader, lens
