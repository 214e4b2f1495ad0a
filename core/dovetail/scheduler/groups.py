"""Keep track of groups of requests that begin with the same tokens. The members of a group are admitted together, and
their common prefix stays in the cache until all of them have been admitted.

    members   [ system prompt, document | question 1 ]    the first member is admitted, the others wait
              [ system prompt, document | question 2 ]    and are then admitted together
                common, in whole pages  ^                 pinned until the last member is admitted

Members may arrive one by one. The common prefix is the prefix that all members seen so far share. When it becomes
shorter, the pin becomes shorter too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.scheduler.pins import PinKey
from dovetail.scheduler.waits import common_length

if TYPE_CHECKING:
    from dovetail.scheduler.pins import Pins
    from dovetail.scheduler.pool_pins import PoolPins
    from dovetail.types import IntArray, Req

MAX_GROUPS = 1024
"""Limit the number of groups that are tracked. If there are more, the group that was renewed least recently is dropped
with its pin."""


@dataclass(slots=True)
class _Group:
    size: int
    common: IntArray  # the common prefix of all members, in whole pages
    deadline: float
    left: int = 0  # number of members that have left the waiting queue


class Groups:
    """Track the groups that have members which have not arrived or have not been admitted."""

    def __init__(self, pins: Pins | PoolPins, page_size: int, seconds: float, ahead: int = 0) -> None:
        """Track no groups yet. A group is dropped ``seconds`` after a member last arrived or was admitted. ``ahead`` is
        the number of tokens after a page that are part of the page's key in the cache."""
        self._pins, self._page_size, self._seconds, self._ahead = pins, page_size, seconds, ahead
        self._groups: OrderedDict[PinKey, _Group] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def joined_queue(self, req: Req) -> None:
        """Record that a request has joined the waiting queue."""
        if not req.group:
            return
        key, prompt = _key(req), req.token_ids[: req.prompt_len]
        group = self._groups.get(key)
        if group is not None:
            self._shorten(key, group, prompt)
        elif req.group_size > 1:
            self._groups[key] = _Group(req.group_size, prompt[: self._whole(req.prompt_len)].copy(), 0.0)
        self._renew(key)
        if len(self._groups) > MAX_GROUPS:
            self._forget(next(iter(self._groups)))

    def computed(self, req: Req, length: int) -> None:
        """Record that the pages of the first ``length`` tokens of a request were inserted into the cache. If they hold
        its whole prompt, the cache has the common prefix, and it is pinned unless it is pinned already."""
        key = _key(req)
        group = self._groups.get(key) if req.group else None
        if group is not None and length >= req.prompt_len and key not in self._pins:
            self._pins.keep(key, group.common)

    def left_queue(self, req: Req) -> None:
        """Record that a request has left the waiting queue: it was admitted for the first time, or it ended before
        that."""
        key = _key(req)
        group = self._groups.get(key) if req.group else None
        if group is None:
            return
        group.left += 1
        if group.left >= group.size:
            self._forget(key)
        else:
            self._renew(key)

    def expire(self) -> None:
        """Drop the groups whose deadline has passed."""
        while self._groups:
            key, group = next(iter(self._groups.items()))
            if group.deadline > self._pins.clock():
                return
            del self._groups[key]  # its pin, if there is one, has its own deadline

    def clear(self) -> None:
        """Drop all groups and their pins."""
        for key in list(self._groups):
            self._forget(key)

    def _shorten(self, key: PinKey, group: _Group, prompt: IntArray) -> None:
        length = self._whole(common_length(group.common, prompt))
        if length < len(group.common):
            group.common = group.common[:length]
            if key in self._pins:
                self._pins.keep(key, group.common)

    def _whole(self, length: int) -> int:
        """Return the number of tokens that the cache needs as a key to match the whole pages among the first ``length``
        tokens."""
        pages = (length - self._ahead) // self._page_size
        return pages * self._page_size + self._ahead if pages > 0 else 0

    def _renew(self, key: PinKey) -> None:
        group = self._groups.get(key)
        if group is not None:
            group.deadline = self._pins.clock() + self._seconds
            self._groups.move_to_end(key)
            self._pins.renew(key)

    def _forget(self, key: PinKey) -> None:
        del self._groups[key]
        self._pins.release(key)


def group_adjacent(reqs: Sequence[Req]) -> list[Req]:
    """Return ``reqs`` with the members of each group directly after its first member; the order is otherwise
    unchanged."""
    groups: dict[Hashable, list[Req]] = {}
    for req in reqs:
        groups.setdefault(_key(req) if req.group else req.uid, []).append(req)
    return [req for members in groups.values() for req in members]


def _key(req: Req) -> PinKey:
    return PinKey("group", req.namespace, req.group)
