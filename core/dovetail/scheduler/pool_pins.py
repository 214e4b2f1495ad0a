"""Pin prefixes in the prefix caches of several pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.scheduler.pins import PinKey, Pins
    from dovetail.types import IntArray


class PoolPins:
    """Hold the pins of several pools (see ``memory.pools``). The methods have the contracts of ``Pins``. A prefix is pinned
    in the pool that has the most of it."""

    def __init__(self, members: Sequence[Pins]) -> None:
        self.members = tuple(members)
        self.clock = self.members[0].clock

    @property
    def pages(self) -> int:
        """Return the number of pages that at least one pin holds, of all pools."""
        return sum(member.pages for member in self.members)

    def __contains__(self, key: PinKey) -> bool:
        return any(key in member for member in self.members)

    def keep(self, key: PinKey, tokens: IntArray) -> None:
        """See ``Pins.keep``."""
        best = max(self.members, key=lambda member: member.cached(key, tokens))
        for member in self.members:
            if member is not best:
                member.release(key)
        best.keep(key, tokens)

    def renew(self, key: PinKey) -> None:
        """See ``Pins.renew``."""
        for member in self.members:
            member.renew(key)

    def release(self, key: PinKey) -> None:
        """See ``Pins.release``."""
        for member in self.members:
            member.release(key)

    def clear(self) -> None:
        """See ``Pins.clear``."""
        for member in self.members:
            member.clear()

    def expire(self) -> None:
        """See ``Pins.expire``."""
        for member in self.members:
            member.expire()

    def check_integrity(self) -> None:
        """See ``Pins.check_integrity``."""
        for member in self.members:
            member.check_integrity()
