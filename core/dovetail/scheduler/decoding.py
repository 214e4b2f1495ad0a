"""Keep the rows of the requests that decode from step to step, and reserve the pages that they need."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from dovetail.scheduler.rows import DecodeRows
from dovetail.scheduler.sharing import group_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.memory.ledger import PageLedger
    from dovetail.memory.pools import PoolLedgers
    from dovetail.scheduler.plans import Plans
    from dovetail.types import IntArray, Req, StepPlan


class Decoding:
    """Keep the decode rows, and reserve their pages.

    ``reqs`` is the scheduler's list of decoding requests. The scheduler must call ``invalidate`` whenever it changes
    this list, or changes which cached pages its requests read.
    """

    def __init__(
        self, ledger: PageLedger | PoolLedgers, plans: Plans, reqs: list[Req], *, shares_prefixes: bool
    ) -> None:
        """Store the list of decoding requests. With ``shares_prefixes``, decode rows are grouped by the prefixes that
        they share in the prefix cache, of which there is one then."""
        self.reqs = reqs
        self.rows: DecodeRows | None = None  # None: the rows must be built again
        self._ledger, self._plans, self._shares_prefixes = ledger, plans, shares_prefixes

    def invalidate(self) -> None:
        """Discard the rows, because a request has joined or left, or reads other pages of the cache."""
        self.rows = None

    def invalidate_sharing(self) -> None:
        """Discard the rows if they are grouped by shared prefixes: a request may read other pages of the cache with the
        same content."""
        if self._shares_prefixes:
            self.rows = None

    def draft(self, counts: IntArray, most: int) -> None:
        """Record that ``counts`` drafts of each row, at most ``most``, enter the same step. See
        ``DecodeRows.draft``."""
        if self.rows is not None:
            self.rows.draft(counts, most)

    def settle(self, *, adapted: bool) -> None:
        """Record that the requests' cursors have moved back to the last accepted draft. See ``DecodeRows.settle``."""
        if self.rows is not None:
            self.rows.settle(adapted=adapted)

    def plan(self, rows: DecodeRows, width: int) -> StepPlan:
        """Return the plan in which the next token of each row enters the forward pass. The caller has reserved the
        pages of up to ``width`` drafts. Makes rows that share a prefix adjacent."""
        if self._shares_prefixes and rows.grouping is None:
            grouping = group_rows(rows.reqs, self._ledger.members[0].cache)
            self.rows = rows = DecodeRows(grouping.reqs, self._ledger.page_size, grouping)
        plan = self._plans.decode(rows, self._ledger.table.take_updates(), width)
        rows.advance()
        return plan

    def reserve(self, width: int, retract: Callable[[Req], None]) -> DecodeRows:
        """Reserve pages for the next token of each row and, while pages are left, for up to ``width`` drafts of each
        row. Return the rows.

        Calls ``retract`` with a request that lacks pages until there are pages for all next tokens.
        """
        rows = self.current()
        if width:
            rows.set_draft_limits(width)
        if not rows.short_of_pages(width):
            return rows
        while (lacking := self._reserve_next(rows)) is not None:
            retract(lacking)
            rows = self.current()
        if width:
            self._reserve_drafts(rows, width)
        return rows

    def current(self) -> DecodeRows:
        """Return the rows of all requests that can take another token, the longest first.

        Attention kernels start the rows in this order, and the row that takes the longest should not start last. The
        order stays the same when a row becomes longer than the row before it, because sorting again would cost more
        than it gains.
        """
        if self.rows is not None and self.rows.steps_left < 1:
            self.rows.recount_steps()
        if self.rows is None or self.rows.steps_left < 1:
            reqs = sorted(self.reqs, key=attrgetter("device_len"), reverse=True)
            self.rows = DecodeRows([r for r in reqs if r.remain_len > 0], self._ledger.page_size)
        return self.rows

    def _reserve_next(self, rows: DecodeRows) -> Req | None:
        """Reserve a page for the next token of each row that needs one. If too few pages are left, first give back the
        pages that were reserved for drafts. Return the request of a row that is still left without a page, if there is one;
        a request must then be retracted."""
        short = rows.short_of_pages()
        reqs = [rows.reqs[row] for row in short]
        if reqs and not self._ledger.reserve_one_each(reqs):
            for req in rows.reqs:
                self._ledger.trim(req, req.device_len)
            lacking = next((r for r in reqs if not self._ledger.reserve(r, r.device_len)), None)
            if lacking is not None:
                self.rows = None
                return lacking
            short = list(range(len(rows.reqs)))
        rows.update_capacity(short)
        return None

    def _reserve_drafts(self, rows: DecodeRows, width: int) -> None:
        """Reserve pages for the drafts of each row. If too few pages are left, a row gets as many drafts as its pages
        hold."""
        rows.set_draft_limits(width)
        short = rows.short_of_pages(width)
        for row in short:
            req = rows.reqs[row]
            most = (req.num_pages + self._ledger.of(req).available) * self._ledger.page_size
            self._ledger.reserve(req, min(req.device_len + int(rows.draft_limits[row]), most))
        rows.update_capacity(short)
        rows.limit_drafts_to_pages()

    def reserve_ahead(self, width: int) -> None:
        """Reserve pages for the drafts of the next step while the device computes this step. The pages suffice
        regardless of how many drafts this step accepts. Uses free pages only and evicts nothing."""
        rows = self.rows
        if rows is None or not width:
            return
        rows.set_draft_limits(width)
        short = rows.short_of_pages(width)
        for row in short:
            req, length = rows.reqs[row], int(rows.lens[row] + rows.draft_limits[row])
            if self._ledger.pages_for(length) - req.num_pages <= self._ledger.of(req).allocator.num_free:
                self._ledger.reserve(req, length)
        if short:
            rows.update_capacity(short)
