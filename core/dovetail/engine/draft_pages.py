"""Number the pages of draft caches, which follow those of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dovetail.interfaces.executor import ArenaLayout
    from dovetail.types import IntArray


class DraftPages(NamedTuple):
    """Describe the pages of draft caches: there are ``num_pages``, page 0 included, one for each page that the target's
    first cache group with pages can have.

    If several groups share the target's memory, its page i of slab s has the number ``s * blocks + i`` (see
    ``memory.arena``), so that the numbers have gaps. Draft caches have memory of their own without gaps, in which the same
    page has the number ``s * pages + i``.
    """

    num_pages: int
    blocks: int = 1
    pages: int = 1

    @classmethod
    def in_arena(cls, layout: ArenaLayout) -> DraftPages:
        """Return the pages of draft caches for a target whose groups share a memory of ``layout``."""
        first = layout.paged[0]
        return cls(layout.num_slabs * layout.pages[first], layout.blocks[first], layout.pages[first])

    def of(self, numbers: IntArray) -> IntArray:
        """Return the pages of draft caches for pages of the target's first group. Page 0 remains page 0."""
        gap = self.blocks - self.pages
        return numbers - numbers // self.blocks * gap if gap else numbers
