"""The requests that decode: their rows, kept from step to step while nobody joins or leaves, and the pages these need."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from dovetail.scheduler.rows import DecodeRows, decode_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.memory.ledger import PageLedger
    from dovetail.scheduler.sharing import Sharing
    from dovetail.types import Batch, IntArray, Req


class Decoding:
    """``reqs`` is the scheduler's own list; whoever changes it, or the pages of the cache that its requests read, calls
    ``invalidate``."""

    def __init__(self, ledger: PageLedger, reqs: list[Req], sharing: Sharing | None) -> None:
        """``sharing`` finds the rows that begin alike, where attention makes use of it."""
        self.reqs = reqs
        self.rows: DecodeRows | None = None  # None: they are to be made anew
        self._ledger, self._sharing = ledger, sharing

    def invalidate(self) -> None:
        """Somebody has joined or left, or reads other pages of the cache."""
        self.rows = None

    def invalidate_sharing(self) -> None:
        """Somebody may read other pages of the cache, of the same content."""
        if self._sharing is not None:
            self.rows = None

    def draft(self, counts: IntArray, most: int) -> None:
        """So many drafts of each row enter too, ``most`` at most. ``settle`` follows."""
        if self.rows is not None:
            self.rows.draft(counts, most)

    def settle(self, *, adapted: bool) -> None:
        """The requests' cursors have moved back to what was accepted; where it is ``adapted``, they get another number of drafts."""
        if self.rows is not None:
            self.rows.settle(adapted=adapted)

    def batch(self, rows: DecodeRows, width: int) -> Batch:
        """The next token of each row enters, with up to ``width`` drafts. Rows that begin alike stand together."""
        if self._sharing is not None and rows.grouping is None:
            grouping = self._sharing.group(rows.reqs)
            self.rows = rows = DecodeRows(grouping.reqs, self._ledger.page_size, grouping)
        batch = decode_batch(rows, self._ledger.table.take_updates(), width)
        rows.advance()
        return batch

    def reserve(self, width: int, retract: Callable[[], None]) -> DecodeRows:
        """All rows, with pages for their next tokens (``retract`` is called until they fit), and for ``width`` drafts of each as
        far as there are any."""
        rows = self.current()
        if width:
            rows.set_draft_limits(width)
        if not rows.short_of_pages(width):
            return rows
        while not self._reserve_next(rows):
            retract()
            rows = self.current()
        if width:
            self._reserve_drafts(rows, width)
        return rows

    def current(self) -> DecodeRows:
        """All that can take another token, the longest first: attention kernels start rows in their order, and whoever
        starts last should not take the longest. Where lengths cross later, that is not worth another order."""
        if self.rows is not None and self.rows.steps_left < 1:
            self.rows.recount_steps()
        if self.rows is None or self.rows.steps_left < 1:
            reqs = sorted(self.reqs, key=attrgetter("device_len"), reverse=True)
            self.rows = DecodeRows([r for r in reqs if r.remain_len > 0], self._ledger.page_size)
        return self.rows

    def _reserve_next(self, rows: DecodeRows) -> bool:
        """A page for the next token of each row that needs one, if need be one that was reserved for drafts. False if a row is
        left without: one must go."""
        short = rows.short_of_pages()
        reqs = [rows.reqs[row] for row in short]
        if reqs and not self._ledger.reserve_one_each(reqs):
            for req in rows.reqs:
                self._ledger.trim(req, req.device_len)
            if not all(self._ledger.reserve(r, r.device_len) for r in reqs):
                self.rows = None
                return False
            short = list(range(len(rows.reqs)))
        rows.update_capacity(short)
        return True

    def _reserve_drafts(self, rows: DecodeRows, width: int) -> None:
        """Pages for the drafts of each row. Where there are too few left, it gets as many drafts as its pages hold."""
        rows.set_draft_limits(width)
        short = rows.short_of_pages(width)
        for row in short:
            req = rows.reqs[row]
            most = (req.num_pages + self._ledger.available) * self._ledger.page_size
            self._ledger.reserve(req, min(req.device_len + int(rows.draft_limits[row]), most))
        rows.update_capacity(short)
        rows.limit_drafts_to_pages()

    def reserve_ahead(self, width: int) -> None:
        """Reserve pages for the drafts of the step after the one that computes now, however many of its own are accepted. Where
        pages are short nothing is evicted for it."""
        rows = self.rows
        if rows is None or not width:
            return
        rows.set_draft_limits(width)
        short = rows.short_of_pages(width)
        for row in short:
            req, length = rows.reqs[row], int(rows.lens[row] + rows.draft_limits[row])
            if self._ledger.pages_for(length) - req.num_pages <= self._ledger.allocator.num_free:
                self._ledger.reserve(req, length)
        if short:
            rows.update_capacity(short)
