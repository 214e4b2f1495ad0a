"""Compute the lengths at which cache groups can resume, from the columns and snapshots that exist. The rule itself is
``cache.first_needed``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dovetail.interfaces.cache import GroupDescriptor


def limiting_group(reached: Sequence[int]) -> int | None:
    """Return the index of the cache group that had the fewest tokens of a prompt in the prefix cache, or None if all groups had
    the same number. ``reached`` has the tokens that each group alone had."""
    return reached.index(min(reached)) if reached and min(reached) < max(reached) else None


def acceptable(group: GroupDescriptor, present: NDArray[np.bool_], page_size: int) -> NDArray[np.bool_]:
    """Return for n columns which of the lengths 0, ``page_size``, ..., ``n * page_size`` the group can resume at:
    bool ``[n + 1]``, of which the first is always True.

    ``present`` is bool ``[n]`` for a paged group: which columns exist. For a state group it is bool ``[n + 1]``: at
    which of these lengths there is a snapshot.
    """
    if not group.paged:
        accepted = present.copy()
        accepted[0] = True
        return accepted
    columns = np.arange(1, len(present) + 1)
    last_hole = np.maximum.accumulate(np.where(present, 0, columns))  # plus 1; 0 if there is none
    accepted = np.ones(len(present) + 1, np.bool_)
    if group.dense:
        accepted[1:] = last_hole == 0
    else:
        assert group.window is not None, "a sliding group has a window"
        lengths = columns * page_size
        first = np.minimum(np.maximum(lengths - group.window + 1, 0), lengths) // page_size
        accepted[1:] = last_hole <= first
    return accepted


def resumable(
    groups: Sequence[GroupDescriptor], present: Sequence[NDArray[np.bool_]], page_size: int
) -> tuple[int, tuple[int, ...]]:
    """Return the largest length that every group can resume at, and for each group the largest length that this group
    alone could resume at. ``present`` has for each group what ``acceptable`` takes, for the same number of columns."""
    each = [acceptable(group, have, page_size) for group, have in zip(groups, present, strict=True)]
    reached = tuple(int(np.flatnonzero(accepted)[-1]) * page_size for accepted in each)
    common = np.logical_and.reduce(each)
    return int(np.flatnonzero(common)[-1]) * page_size, reached
