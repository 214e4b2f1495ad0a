"""Hold the decode rows of a step. They are kept from one step to the next while no request joins or leaves."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dovetail.scheduler.sharing import Grouping
    from dovetail.types import IntArray, Req


_versions = itertools.count(1)


class DecodeRows:
    """Hold the requests that decode, in the order of their rows, with arrays over them.

    ``reqs``, ``slots``, ``prefix_lens``, ``ones``, ``samples`` and ``draft_limits`` are put into plans without a copy
    and are never written to afterwards: plans with the same ``version`` have the same rows. ``constrained`` is True if
    one of the requests has a grammar. ``prefix_lens`` follows the requests' cursors: it is the number of tokens before
    the one that enters the next step. ``ends`` are the lengths at which the requests end, and ``capacity`` is the
    number of tokens for which each row has pages. Every row can take at least ``steps_left`` more tokens and has pages
    for at least ``spare`` more. These two numbers are lower bounds, which can be updated without reading the arrays;
    ``recount_steps`` and ``recount_spare`` make them exact.
    """

    __slots__ = (
        "_limits_of_width",
        "capacity",
        "constrained",
        "draft_lens",
        "draft_limits",
        "ends",
        "grouping",
        "ones",
        "page_size",
        "prefix_lens",
        "reqs",
        "samples",
        "slots",
        "spare",
        "steps_left",
        "version",
    )

    def __init__(self, reqs: list[Req], page_size: int, grouping: Grouping | None = None) -> None:
        """Build the arrays from the cursors of ``reqs``. Each request must have a token that enters the next step, and
        may still get at least one more token."""
        n = len(reqs)
        self.version = next(_versions)
        self.reqs = reqs
        self.page_size = page_size
        self.grouping = grouping
        self.slots = np.fromiter([r.slot for r in reqs], np.int32, n)
        self.constrained = any(map(needs_host, reqs))
        self.ones, self.samples = np.ones(n, np.int32), np.ones(n, np.bool_)
        self.prefix_lens = np.fromiter([r.device_len - 1 for r in reqs], np.int32, n)
        self.ends = np.fromiter([len(r.token_ids) for r in reqs], np.int32, n)
        self.draft_lens = np.fromiter([r.draft_len for r in reqs], np.int32, n)
        self.draft_limits = np.zeros(n, np.int32)
        # a draft width, and the draft limits for it while no request is near its end
        self._limits_of_width: tuple[int, IntArray] | None = None
        self.capacity = np.fromiter([r.num_pages for r in reqs], np.int32, n) * page_size
        self.recount_steps()
        self.recount_spare()

    @property
    def lens(self) -> IntArray:
        """Return the length of each row with the token that enters the next step."""
        return self.prefix_lens + self.ones  # an array, because numpy takes twice as long to add a number

    @property
    def remain(self) -> IntArray:
        """Return the number of tokens that each row may still get."""
        return self.ends - self.lens

    def recount_steps(self) -> None:
        """Compute ``steps_left`` from the arrays."""
        self.steps_left = int(self.remain.min(initial=np.iinfo(np.int32).max))

    def recount_spare(self) -> None:
        """Compute ``spare`` from the arrays."""
        self.spare = int((self.capacity - self.lens).min(initial=np.iinfo(np.int32).max))

    def set_draft_limits(self, draft_width: int) -> None:
        """Set ``draft_limits`` to the number of drafts that each row may have, at most ``draft_width``. One token of a
        row's remaining length is kept for the bonus token."""
        if self._limits_of_width is None or self._limits_of_width[0] != draft_width:
            self._limits_of_width = draft_width, _read_only(np.minimum(self.draft_lens, draft_width))
        self.draft_limits = self._limits_of_width[1]
        if self.steps_left <= draft_width:
            self.recount_steps()
            self.draft_limits = _read_only(np.minimum(self.remain - 1, self.draft_limits))

    def limit_drafts_to_pages(self) -> None:
        """Reduce ``draft_limits`` to the number of drafts for which each row has pages."""
        self.draft_limits = _read_only(np.minimum(self.draft_limits, self.capacity - self.lens))

    def short_of_pages(self, draft_width: int = 0) -> list[int]:
        """Return the rows that have too few pages for the token that enters now and, if ``draft_width`` is given, for
        their drafts. ``draft_width`` must be the one given to the last call of ``set_draft_limits``."""
        if self.spare >= draft_width:
            return []
        lens = self.lens + self.draft_limits if draft_width else self.lens
        short = (lens > self.capacity).nonzero()[0].tolist()
        if not short:
            self.recount_spare()
        return short

    def update_capacity(self, rows: list[int]) -> None:
        """Recompute the capacity of ``rows``, whose pages have changed."""
        page_size = self.page_size
        self.capacity[rows] = [self.reqs[row].num_pages * page_size for row in rows]
        self.recount_spare()

    def advance(self) -> None:
        """Advance the cursors of every row by the token that enters a step. The next token of each row is then in
        flight."""
        self.prefix_lens = self.prefix_lens + self.ones
        self.steps_left -= 1
        self.spare -= 1
        for req in self.reqs:
            req.cached_len += 1
            req.device_len += 1
            req.in_flight += 1

    def draft(self, counts: IntArray, most: int) -> None:
        """Advance the lengths by ``counts`` drafts of each row, which enter the same step. ``most`` is the largest
        count. The caller must call ``settle`` once it is known which drafts are accepted."""
        self.prefix_lens = self.prefix_lens + counts
        self.steps_left -= most
        self.spare -= most

    def settle(self, *, adapted: bool) -> None:
        """Copy the requests' cursors, which have moved back to the last accepted draft. If ``adapted``, also copy the
        numbers of drafts that the requests get from now on."""
        self.prefix_lens = np.fromiter([r.device_len - 1 for r in self.reqs], np.int32, len(self.reqs))
        if adapted:
            self.draft_lens[:] = [r.draft_len for r in self.reqs]
            self._limits_of_width = None


def needs_host(req: Req) -> bool:
    """Return True if the request is sampled with what the host knows of the step before: with bitmasks, or by logits
    processors."""
    return req.matcher is not None or bool(req.params.logits_processors)


def _read_only(array: IntArray) -> IntArray:
    array.flags.writeable = False  # plans share it, and drafters see them
    return array
