"""Make decode rows that share a prefix adjacent, so that attention can read the prefix once for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dovetail.types import SharedPrefixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.interfaces.cache import PrefixCache
    from dovetail.types import IntArray, Req


class Grouping(NamedTuple):
    """Hold rows in the order of their groups. If ``lens`` is empty, there is no group and the order is unchanged."""

    reqs: list[Req]
    starts: IntArray  # [groups + 1] the first row of each group, and the number of rows
    lens: IntArray  # [groups] the length of the shared prefix in tokens, 0 for a row that shares none

    @property
    def shared(self) -> SharedPrefixes | None:
        """Return a ``SharedPrefixes`` for a batch of these rows, or None if there is no group. Each call returns a new
        object, because the engine writes to it; the arrays are the same."""
        return SharedPrefixes(self.starts, self.lens) if len(self.lens) else None


_NONE = np.zeros(0, np.int32)


def group_rows(reqs: list[Req], cache: PrefixCache) -> Grouping:
    """Return ``reqs`` with the rows that share a prefix in ``cache`` directly after the first of them. The order is
    otherwise unchanged."""
    groups = cache.shared_prefixes([r.cache_handle for r in reqs]) if len(reqs) > 1 else []
    if not groups:
        return Grouping(reqs, _NONE, _NONE)
    leader, lens = _leaders(groups, len(reqs))
    order = np.argsort(leader, kind="stable")
    starts = np.flatnonzero(leader[order] == order)
    bounds = np.append(starts, len(reqs)).astype(np.int32)
    return Grouping([reqs[row] for row in order.tolist()], bounds, lens[order[starts]])


def _leaders(groups: Sequence[tuple[list[int], int]], rows: int) -> tuple[IntArray, IntArray]:
    """Return the first row of each row's group, and an array that holds the length of the group's prefix at that first
    row; both are int32 ``[rows]``."""
    leader, lens = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    for members, length in groups:
        first = min(members)
        leader[members] = first
        lens[first] = length
    return leader, lens
