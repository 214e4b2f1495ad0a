"""The decode rows of a step, kept from one step to the next while nobody joins or leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduler.sharing import Grouping
    from dovetail.types import IntArray, Req


class DecodeRows:
    """Requests that decode, in the order of their rows, with arrays over them.

    ``reqs`` and ``slots`` go into batches as they are and are never changed: as long as a batch has the same list as the
    one before, it has the same rows. The other arrays follow the requests' cursors.
    """

    __slots__ = ("capacity", "grouping", "lens", "remain", "reqs", "slots", "steps_left")

    def __init__(self, reqs: list[Req], page_size: int, grouping: Grouping | None = None) -> None:
        """``reqs`` each have a token to enter, and room for at least one more."""
        n = len(reqs)
        self.reqs = reqs
        self.grouping = grouping
        self.slots = np.fromiter([r.slot for r in reqs], np.int32, n)
        self.lens = np.fromiter([r.device_len for r in reqs], np.int32, n)
        self.remain = np.fromiter([len(r.token_ids) for r in reqs], np.int32, n) - self.lens
        self.capacity = np.fromiter([r.num_pages for r in reqs], np.int32, n) * page_size
        self.steps_left = int(self.remain.min(initial=np.iinfo(np.int32).max))

    def draft_room(self, width: int) -> IntArray:
        """Draft tokens that each row may verify, ``width`` at most: the next token of its own needs room too."""
        return np.minimum(self.remain - 1, width)

    def short_of_pages(self, draft_width: int) -> Sequence[int]:
        """Rows whose pages do not hold the token that enters now and its drafts."""
        lens = self.lens + self.draft_room(draft_width) if draft_width else self.lens
        return np.flatnonzero(lens > self.capacity).tolist()

    def advance(self) -> None:
        """One token of each row enters a step, and its next one is on its way."""
        self.lens += 1
        self.remain -= 1
        self.steps_left -= 1
        for req in self.reqs:
            req.cached_len += 1
            req.device_len += 1
            req.in_flight += 1
