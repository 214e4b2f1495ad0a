"""Requests wait for a prefix that another request's prompt is computing right now, instead of computing it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.types import IntArray, Req

LOOK_BACK = 256
"""Tokens at the end of a prefix that it is looked up by. Texts that differ further back are told apart by comparing them,
one by one: a larger value makes that rarer, and every look-up dearer."""

Key = tuple[str, str, bytes]
"""A namespace, a group (empty: whoever), and the last tokens of a prefix."""


class PrefixWaits:
    """Who waits for whom. A wait is found once and then costs a look at the one that is waited for.

    Nobody waits for ever: a wait ends when the other's prompt has put the common prefix into the cache, has been
    computed, or has left; the next wait of the same request can only be for a longer prefix, or for one that the cache
    has lost meanwhile.
    """

    def __init__(self, page_size: int, *, only_groups: bool = False, ahead: int = 0) -> None:
        """``only_groups``: members of a group wait for each other, and nobody else for anybody. The cache knows pages by the tokens
        ``ahead``, too."""
        self._page_size, self._ahead = page_size, ahead
        self._only_groups = only_groups
        self._waits: dict[int, tuple[Req, int]] = {}  # by uid: who is waited for, and the pages in common
        self._computing: list[Req] = []
        self._uids: set[int] = set()
        self._by_end: dict[int, dict[Key, list[Req]]] = {}  # those that are computing, by the end of a prefix and by it

    def begin(self, computing: Sequence[Req]) -> None:
        """A new step; ``computing`` are the requests of whose prompts some tokens are not in the cache yet."""
        self._computing = list(computing)
        self._uids = {req.uid for req in computing}
        self._by_end = {}

    def add(self, req: Req) -> None:
        """The prompt of ``req`` is computed from this step on."""
        self._computing.append(req)
        self._uids.add(req.uid)
        for end, index in self._by_end.items():
            if end <= req.prompt_len:
                index.setdefault(self._key(req, end), []).append(req)

    def forget(self, req: Req) -> None:
        """``req`` waits no longer."""
        self._waits.pop(req.uid, None)

    def is_waiting(self, req: Req) -> bool:
        """True if ``req`` waits, and what it waits for has not come."""
        wait = self._waits.get(req.uid)
        if wait is None:
            return False
        other, pages = wait
        if other.uid in self._uids and other.shared_pages < pages:
            return True
        del self._waits[req.uid]
        return False

    def start_waiting(self, req: Req, cached: int) -> bool:
        """True if a prompt that is being computed has more of this request's prefix than the ``cached`` tokens that the
        cache has: then ``req`` waits from now on."""
        end = cached + self._page_size + self._ahead
        # the logits of the last token are needed, but it may be one of those behind a page
        known = min(req.device_len - 1 + self._ahead, req.device_len)
        if end > known or (self._only_groups and not req.group):
            return False
        for other in self._index(end).get(self._key(req, end), ()):
            if np.array_equal(req.token_ids[:end], other.token_ids[:end]):
                mine, theirs = req.token_ids[:known], other.token_ids[: other.prompt_len]
                self._waits[req.uid] = other, (common_length(mine, theirs) - self._ahead) // self._page_size
                return True
        return False

    def _index(self, end: int) -> dict[Key, list[Req]]:
        """Those whose prompts have ``end`` tokens and more, by the last of these."""
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
    """How many tokens two texts have in common."""
    n = min(len(a), len(b))
    equal = a[:n] == b[:n]
    return n if equal.all() else int(np.argmin(equal))
