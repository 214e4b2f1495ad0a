"""Choose the pool of a request that is admitted (see ``memory.pools``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.interfaces.cache import Match
    from dovetail.memory.ledger import PageLedger

EXCESS = 8
"""A pool is crowded if it has more requests than the one that has the fewest, by more than one in ``EXCESS`` of all, and at
least by one. A step takes as long as the rank that has the most to attend to."""


class PoolPlace(NamedTuple):
    """Hold a pool that has a slot for a request, the request's cached prefix there, and the number of requests that run
    there."""

    ledger: PageLedger
    match: Match
    running: int


def best_first(places: Iterable[PoolPlace], running: Sequence[int]) -> list[PoolPlace]:
    """Return ``places`` with the best first: pools that are not crowded before others, then those with more of the prefix,
    then those with fewer requests. ``running`` has the number of running requests of every pool."""
    most = min(running) + max(1, sum(running) // EXCESS)
    return sorted(places, key=lambda place: (place.running > most, -place.match.length, place.running))
