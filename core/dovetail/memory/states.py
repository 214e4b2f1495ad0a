"""Move the slots of states between requests, the prefix cache and the allocator. Only this module changes the owner of a
slot.

    working slot   the state after the tokens that the request's steps have computed
    snapshot       a copy of it at a multiple of the page size, which the prefix cache gets when the step that copies is
                   committed
    tail           the latest copy of a request that decodes, which is replaced by the next one and offered when the request ends

A slot is in exactly one of three places: the allocator, the prefix cache, or one request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.interfaces.cache import GroupDescriptor, Match, PrefixCache
    from dovetail.memory.arena import ArenaAllocator
    from dovetail.memory.table import RequestTable
    from dovetail.types import IntArray, Req


@dataclass(slots=True, eq=False)
class Snapshot:
    """Hold a copy of a request's states, in one slot of each state group. It holds the state after ``length`` tokens once
    the step that copies is committed; before, ``ready`` is False. ``slots`` is None once they are given to the cache or the
    allocator."""

    length: int
    slots: IntArray | None  # int32 [state groups]
    ready: bool = False


@dataclass(slots=True, eq=False)
class RequestStates:
    """Hold what a running request keeps of states. The request's first step begins with the state in the slots ``source``
    of the cache (None: with none), which is the one after ``begin`` tokens.

    ``points`` are the lengths, in ascending order, at which snapshots are still to be made of the tokens before ``end``.
    ``latest`` is the largest length of which there is a snapshot, and ``offered`` the largest of those that the cache was
    offered or has given."""

    slots: IntArray  # int32 [state groups]: the working slots
    source: IntArray | None
    begin: int
    end: int
    points: list[int] = field(default_factory=list)
    copied: list[Snapshot] = field(default_factory=list)  # of the prompt, by steps that are not committed
    tail: Snapshot | None = None
    latest: int = 0
    offered: int = 0


class StateLedger:
    """Manage the slots of running requests. Mutates ``Req.states``."""

    def __init__(
        self,
        allocator: ArenaAllocator,
        cache: PrefixCache,
        table: RequestTable,
        page_size: int,
        tokens_ahead: int,
        groups: Sequence[GroupDescriptor],
    ) -> None:
        """See ``PageLedger``."""
        self.allocator, self.cache, self.table = allocator, cache, table
        self._page_size, self._ahead = page_size, tokens_ahead
        self._paged = [number for number, group in enumerate(groups) if group.paged]
        self._states = [number for number, group in enumerate(groups) if not group.paged]
        assert tuple(self._states) == allocator.layout.states, "the arena has other state groups"
        self._nothing = [np.empty(0, np.int32) for _ in groups]
        self._tails: dict[int, RequestStates] = {}  # by uid: requests that have a tail

    def admit(self, req: Req, match: Match) -> None:
        """Give the request its working slots. They must be available."""
        slots = self.allocator.alloc_slots()
        assert slots is not None, "slots counted as available could not be taken"
        source = match.states if match.length else None
        req.states = RequestStates(slots, source, match.length, req.device_len)
        req.states.latest = req.states.offered = match.length

    def copy(self, req: Req, length: int) -> IntArray | None:
        """Return the slots for a copy of the request's states, which a step that begins after ``length`` tokens makes; None
        if there are none. While the prompt is computed, the copy is a new snapshot; afterwards it replaces the tail."""
        states: RequestStates = req.states
        tail = states.tail if length >= states.end else None
        slots = self._take_spare() if tail is None else tail.slots
        if slots is None:
            return None
        states.latest = length
        if tail is not None:
            tail.length, tail.ready = length, False
        elif length >= states.end:
            states.tail = Snapshot(length, slots)
            self._tails[req.uid] = states
        else:
            states.copied.append(Snapshot(length, slots))
        return slots

    def confirm(self, req: Req, length: int) -> None:
        """Record that the step that copied the states after ``length`` tokens is committed. A snapshot of the prompt is
        offered to the cache. The request must still have the slots that it had when the step was made."""
        states: RequestStates = req.states
        if states.tail is not None and states.tail.length == length:
            states.tail.ready = True
        for snapshot in states.copied:
            if snapshot.length == length:
                self._offer(req, snapshot)
        states.copied = [snapshot for snapshot in states.copied if snapshot.slots is not None]

    def release(self, req: Req, computed_len: int) -> None:
        """Take the slots of a request that leaves the table. Its tail, and its working slots if they hold the state at the end
        of a page, are offered to the cache first, as far as its first ``computed_len`` tokens are in the cache."""
        states: RequestStates = req.states
        tail, size = states.tail, self._page_size
        if tail is not None:
            self._tails.pop(req.uid, None)
            if tail.ready and tail.length <= computed_len:
                self._offer(req, tail)
        exact = computed_len == req.cached_len <= req.known_len and not req.in_flight and states.source is None
        if exact and computed_len % size == 0 and computed_len > states.offered:
            self._offer(req, Snapshot(computed_len, states.slots))
        else:
            self._free(states.slots)
        for snapshot in (*states.copied, *(() if tail is None else (tail,))):
            self._give_up(snapshot)
        req.states = None

    def tail_length(self, req: Req, default: int) -> int:
        """Return the length of the request's tail, which is where the next turn resumes; ``default`` without one."""
        tail = req.states.tail
        return default if tail is None else tail.length

    def drop_tail(self) -> bool:
        """Give back the slots of the tail that was begun first. Return False if no request has one."""
        if not self._tails:
            return False
        states = self._tails.pop(next(iter(self._tails)))
        assert states.tail is not None
        self._give_up(states.tail)
        states.tail = None
        return True

    def with_slots(self, pages: IntArray | Sequence[IntArray]) -> list[IntArray]:
        """Return ``pages``, which has those of each paged group, with no slots for the other groups."""
        parts = self._nothing.copy()
        for number, own in zip(self._paged, pages, strict=True):
            parts[number] = own
        return parts

    def are_held(self, pages: IntArray) -> bool:
        """Return True if none of ``pages [paged groups, n]`` is free. Holes (page 0) are ignored."""
        return self.allocator.are_held(self.with_slots(pages))

    def count(self, running: Iterable[Req]) -> int:
        """Return the number of slots of each state group that requests own. Asserts that no two of them own the same."""
        owned: list[IntArray] = []
        for req in running:
            states: RequestStates = req.states
            held = [snapshot.slots for snapshot in (*states.copied, *([] if states.tail is None else [states.tail]))]
            owned += [states.slots, *(slots for slots in held if slots is not None)]
            assert (states.tail is not None) == (req.uid in self._tails), f"{req.rid}: its tail is not counted"
        for row, number in enumerate(self._states):
            numbers = np.array([slots[row] for slots in owned], np.int32)
            assert len(np.unique(numbers)) == len(numbers), "a slot of a state is owned twice"
            parts = self._nothing.copy()
            parts[number] = numbers
            assert self.allocator.are_held(parts), "a slot of a running request is free"
            assert (numbers > 0).all(), "the slot of padding rows belongs to a request"
        return len(owned)

    def _take_spare(self) -> IntArray | None:
        """Return a slot of each state group that is free or has a snapshot that the cache can evict; None if there is
        none."""
        slots = self.allocator.alloc_slots()
        if slots is None:
            evictable = self.cache.evictable
            if self.allocator.allocatable(evictable, 1) < 0:
                return None
            self.allocator.free(self.cache.evict(self.allocator.shortage(0, evictable, 1)))
            slots = self.allocator.alloc_slots()
        return slots

    def _offer(self, req: Req, snapshot: Snapshot) -> None:
        """Offer a snapshot to the cache, which has the pages of these tokens. Free the slots that it does not take."""
        slots, length = snapshot.slots, snapshot.length
        assert slots is not None
        known, columns = length + self._ahead, length // self._page_size
        if known <= req.known_len and (columns <= req.shared_pages or not self._paged):
            pages = self.table.pages[:, req.slot, :columns].copy()
            held = self.cache.insert(req.token_ids[:known], pages, req.namespace, req.priority, slots)
            if held.states is not None and held.length == length:
                slots = np.where(held.states == slots, 0, slots)
                req.states.offered = max(req.states.offered, length)
        snapshot.slots = None
        self._free(slots)

    def _give_up(self, snapshot: Snapshot) -> None:
        if snapshot.slots is not None:
            self._free(snapshot.slots)
            snapshot.slots = None

    def _free(self, slots: IntArray) -> None:
        """Free the slots that are not 0."""
        parts = self._nothing.copy()
        for row, number in enumerate(self._states):
            parts[number] = slots[row : row + 1]
        self.allocator.free(parts)
