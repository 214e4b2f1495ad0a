"""Cache prefixes in a tree whose nodes are pages."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache
from dovetail.types import IntArray
from dovetail_example.config import PagesConfig


@dataclass(eq=False)
class Node:
    """Hold a page, and the pages that have followed it, by their tokens."""

    parent: Node | None
    key: object
    page: IntArray  # [groups]
    children: dict[object, Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0


class PageCache(PrefixCache):
    """Find prefixes with one dictionary look-up per page. The least recently used leaves are evicted first."""

    def __init__(self, config: PagesConfig, context: CacheContext) -> None:
        self._size = context.page_size
        self._no_page = np.empty(context.num_paged, np.int32)
        self._root = Node(None, None, self._no_page)
        self._clock = itertools.count()
        self._total = 0
        self._locked = 0

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """See ``PrefixCache``."""
        node, pages = self._root, []
        for key in self._keys(tokens, namespace):
            if key not in node.children:
                break
            node = self._touch(node.children[key])
            pages.append(node.page)
        return self._result(pages, node)

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        """See ``PrefixCache``. Every page that is new is kept."""
        node, held = self._root, []
        for key, page in zip(self._keys(tokens, namespace), pages.T, strict=True):
            if key not in node.children:
                node.children[key] = Node(node, key, page.copy())
                self._total += 1
            node = self._touch(node.children[key])
            held.append(node.page)
        return self._result(held, node)

    def lock(self, handle: Node) -> None:
        """See ``PrefixCache``."""
        for node in self._path(handle):
            self._locked += node.locks == 0
            node.locks += 1

    def unlock(self, handle: Node) -> None:
        """See ``PrefixCache``."""
        for node in self._path(handle):
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            self._locked -= node.locks == 0

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        """See ``PrefixCache``."""
        num_pages = max(short)
        leaves = [(node.used, id(node), node) for node in self._nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        freed: list[IntArray] = []
        while leaves and len(freed) < num_pages:
            node = heapq.heappop(leaves)[-1]
            freed.append(node.page)
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            if parent is not self._root and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, id(parent), parent))
        self._total -= len(freed)
        return list(self._columns(freed))

    def reset(self) -> list[IntArray]:
        """See ``PrefixCache``."""
        return self.evict(self.total)

    @property
    def evictable(self) -> tuple[int, ...]:
        """See ``PrefixCache``. A lock covers a page and all before it, so every page without a lock can be evicted."""
        return (self._total - self._locked,) * len(self._no_page)

    @property
    def total(self) -> tuple[int, ...]:
        """See ``PrefixCache``."""
        return (self._total,) * len(self._no_page)

    def check_integrity(self) -> None:
        """Assert that the counters are right and that locks cover whole paths."""
        nodes = list(self._nodes())
        assert len(nodes) == self._total
        assert sum(node.locks > 0 for node in nodes) == self._locked
        assert all(child.locks <= node.locks for node in nodes for child in node.children.values())

    def _keys(self, tokens: IntArray, namespace: str) -> list[object]:
        """Return the keys of the pages. The first contains the namespace."""
        size = self._size
        keys: list[object] = [tokens[i : i + size].tobytes() for i in range(0, len(tokens) - size + 1, size)]
        return [(namespace, keys[0]), *keys[1:]] if keys else []

    def _touch(self, node: Node) -> Node:
        node.used = next(self._clock)
        return node

    def _path(self, node: Node) -> list[Node]:
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def _nodes(self) -> list[Node]:
        nodes = list(self._root.children.values())
        for node in nodes:  # grows while it is walked
            nodes.extend(node.children.values())
        return nodes

    def _columns(self, pages: list[IntArray]) -> IntArray:
        return np.stack(pages, axis=1) if pages else np.empty((len(self._no_page), 0), np.int32)

    def _result(self, pages: list[IntArray], node: Node) -> Match:
        length = len(pages) * self._size
        return Match(length, self._columns(pages), node, reached=(length,) * len(self._no_page), common=length)
