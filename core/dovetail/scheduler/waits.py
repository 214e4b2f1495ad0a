"""Make requests wait for a prefix that is being computed for another request, instead of computing it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.types import IntArray, Req

LOOK_BACK = 256
"""Set the number of last tokens of a prefix that make up its key. Prompts with equal keys are compared token by token.
A larger value makes comparisons of different prompts rarer, and every look-up more expensive."""

Key = tuple[str, str, bytes]
"""Hold a namespace, a group (empty: requests of any group), and the last tokens of a prefix."""


class PrefixWaits:
    """Track which request waits for which other request. The other request is searched for once; later checks read its
    state only.

    Every wait ends: when the cache has the common prefix, when the prompt of the other request has been computed, or
    when the other request has left. The same request then waits again only for a longer prefix, or for a prefix that
    the cache has evicted meanwhile.
    """

    def __init__(
        self,
        page_size: int,
        *,
        only_groups: bool = False,
        ahead: int = 0,
        reach: Callable[[Req, int], int] | None = None,
    ) -> None:
        """Start without waits. With ``only_groups``, only the members of a group wait for each other. ``ahead`` is the
        number of tokens after a page that are part of the page's key in the cache. For models with states, ``reach`` returns
        how much of a prefix others can resume after once it is computed for a request (``Snapshots.reach``)."""
        self._reach = reach
        self._page_size, self._ahead = page_size, ahead
        self._only_groups = only_groups
        self._waits: dict[int, tuple[Req, int]] = {}  # by uid: the other request, and the number of pages in common
        self._computing: list[Req] = []
        self._uids: set[int] = set()
        # the requests being computed, by the length of a prefix and its key
        self._by_end: dict[int, dict[Key, list[Req]]] = {}

    def begin(self, computing: Sequence[Req]) -> None:
        """Begin a new step. ``computing`` are the running requests whose prompts are not completely in the cache
        yet."""
        self._computing = list(computing)
        self._uids = {req.uid for req in computing}
        self._by_end = {}

    def add(self, req: Req) -> None:
        """Record that the prompt of ``req`` is computed from this step on."""
        self._computing.append(req)
        self._uids.add(req.uid)
        for end, index in self._by_end.items():
            if end <= req.prompt_len:
                index.setdefault(self._key(req, end), []).append(req)

    def forget(self, req: Req) -> None:
        """End the wait of ``req``, if there is one."""
        self._waits.pop(req.uid, None)

    def is_waiting(self, req: Req) -> bool:
        """Return True if ``req`` waits and its wait has not ended."""
        wait = self._waits.get(req.uid)
        if wait is None:
            return False
        other, pages = wait
        if other.uid in self._uids and self._available(other) < pages:
            return True
        del self._waits[req.uid]
        return False

    def start_waiting(self, req: Req, cached: int) -> bool:
        """Let ``req`` wait if a prompt that is being computed shares a longer prefix with it than the ``cached`` tokens
        that it has in the cache. Return True if it waits."""
        end = cached + self._page_size + self._ahead
        # the last token must enter a step for its logits, but it may be one of the ``ahead`` tokens after the last page
        known = min(req.device_len - 1 + self._ahead, req.device_len)
        if end > known or (self._only_groups and not req.group):
            return False
        for other in self._index(end).get(self._key(req, end), ()):
            if np.array_equal(req.token_ids[:end], other.token_ids[:end]):
                mine, theirs = req.token_ids[:known], other.token_ids[: other.prompt_len]
                pages = (common_length(mine, theirs) - self._ahead) // self._page_size
                if self._reach is not None:
                    pages = self._reach(other, pages * self._page_size) // self._page_size
                    if pages * self._page_size <= cached:
                        continue
                self._waits[req.uid] = other, pages
                return True
        return False

    def _available(self, other: Req) -> int:
        """Return the number of pages of ``other`` after which others can resume now."""
        return other.shared_pages if self._reach is None else other.states.offered // self._page_size

    def _index(self, end: int) -> dict[Key, list[Req]]:
        """Return the requests being computed whose prompts have at least ``end`` tokens, by the key of their first
        ``end`` tokens."""
        index = self._by_end.get(end)
        if index is None:
            index = self._by_end[end] = {}
            for req in self._computing:
                if end <= req.prompt_len:
                    index.setdefault(self._key(req, end), []).append(req)
        return index

    def _key(self, req: Req, end: int) -> Key:
        scope = req.group if self._only_groups else ""
        return req.namespace, scope, req.token_ids[max(0, end - LOOK_BACK) : end].tobytes()


def common_length(a: IntArray, b: IntArray) -> int:
    """Return the length of the common prefix of two token arrays."""
    n = min(len(a), len(b))
    equal = a[:n] == b[:n]
    return n if equal.all() else int(np.argmin(equal))
