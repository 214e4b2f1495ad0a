"""Keep cached prefixes in a radix tree over token runs (as RadixAttention does, https://arxiv.org/abs/2312.07104), in
whole pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache
from dovetail.types import IntArray
from dovetail_cache.config import RadixConfig
from dovetail_cache.eviction import EvictionQueue, evictable
from dovetail_cache.node import TOKEN_BYTES, Handle, Node, Root, child_key, common_length, split, truncate
from dovetail_cache.sharing import shared_prefixes


class RadixTree(PrefixCache):
    """Keep one tree per namespace. The cost of a call depends on the nodes of its path and the tokens compared, not on
    the size of the tree. All groups are full or latent."""

    def __init__(self, config: RadixConfig, context: CacheContext) -> None:
        """Create an empty cache. ``config.eviction`` decides which prefixes are evicted first."""
        self._page_size = context.page_size
        self._num_groups = context.num_paged
        self._roots: dict[str, Root] = {}
        self._queue = EvictionQueue(config.eviction)
        self._nothing = (0,) * len(context.groups)
        self._no_pages: IntArray = np.empty((context.num_paged, 0), dtype=np.int32)
        self._clock = 0
        self._total = 0
        self._locked = 0

    @property
    def total(self) -> tuple[int, ...]:
        """Return the number of pages that the cache owns, locked or not."""
        return (self._total,) * self._num_groups

    @property
    def evictable(self) -> tuple[int, ...]:
        """Return the number of pages of unlocked nodes. A lock counts on its whole path, so all of these pages can be
        evicted, leaves first."""
        return (self._total - self._locked,) * self._num_groups

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return the longest cached prefix. Does not split nodes: matching leaves the shape of the tree unchanged."""
        root = self._roots.get(namespace)
        if root is None:
            return self._match_of([], 0)
        path, length = self._walk(root, tokens)
        return self._match_of(path, length)

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        """Add the part of ``tokens`` that is not cached yet as one node below the cached part; see
        ``PrefixCache.insert``."""
        num_pages = len(tokens) // self._page_size
        assert pages.shape == (self._num_groups, num_pages), f"{pages.shape} pages for {len(tokens)} tokens"
        if num_pages == 0:
            return self._match_of([], 0)
        root = self._roots.get(namespace) or self._roots.setdefault(namespace, Root(namespace, self._num_groups))
        path, length = self._walk(root, tokens)
        end = num_pages * self._page_size
        if length < end:
            parent = self._end_at(path, length) if path else root
            path.append(self._grow(parent, tokens[length:end].tobytes(), pages[:, length // self._page_size :]))
        for node in path:
            node.priority = max(node.priority, priority)
        return self._match_of(path, end)

    def lock(self, handle: Handle) -> None:
        """Protect the path of ``handle``. If the handle ends inside a node, split that node. A lock counts as a use."""
        if handle.length == 0:
            return
        handle.node = node = self._settle(handle)
        while node.parent is not None:
            if node.locks == 0:
                self._locked += node.num_pages
            node.locks += 1
            node.uses += 1
            node = node.parent

    def unlock(self, handle: Handle) -> None:
        """Undo one ``lock`` of this same handle."""
        if handle.length == 0:
            return
        node = handle.node
        assert node is not None
        assert node.end == handle.length, "unlock needs a handle that was locked"
        while node.parent is not None:
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            if node.locks == 0:
                self._locked -= node.num_pages
                self._queue.push(node)
            node = node.parent

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        """Drop unlocked leaves in the configured order. The last leaf loses only as many pages of its tail as are
        needed."""
        missing = min(max(short), self._total - self._locked)
        freed: list[IntArray] = []
        while missing > 0:
            leaf = self._queue.pop()
            assert leaf is not None, "there are evictable pages and no evictable leaf"
            freed.append(self._shrink(leaf, min(missing, leaf.num_pages)))
            missing -= freed[-1].shape[1]
        if not freed:
            return [np.empty(0, dtype=np.int32) for _ in self._nothing]
        pages = freed[0] if len(freed) == 1 else np.concatenate(freed, axis=1)
        self._total -= pages.shape[1]
        return [pages[0]] if len(pages) == 1 else list(pages)

    def reset(self) -> list[IntArray]:
        """Drop everything that is not locked."""
        return self.evict(self.evictable)

    def shared_prefixes(self, handles: Sequence[Handle]) -> list[tuple[list[int], int]]:
        """Return the groups, found by the nodes that the paths share. The cost depends on the nodes of the paths, not
        on the size of the tree."""
        return shared_prefixes(handles)

    def check_integrity(self) -> None:
        """Assert links, lengths, counters, lock counts, the eviction queue, and that no page is held twice."""
        nodes: list[Node] = []
        for root in self._roots.values():
            assert root.children, "an empty namespace was kept"
            assert root.parent is None
            assert root.end == 0
            stack: list[Node] = [root]
            while stack:
                node = stack.pop()
                self._check_children(node)
                nodes.extend(node.children.values())
                stack.extend(node.children.values())
        assert sum(n.num_pages for n in nodes) == self._total, "total is wrong"
        assert sum(n.num_pages for n in nodes if n.locks) == self._locked, "evictable is wrong"
        assert len(self._queue) == sum(n.queued for n in nodes), "the eviction queue does not match the tree"
        self._check_nodes(nodes)

    def _check_nodes(self, nodes: list[Node]) -> None:
        for group in range(self._num_groups):
            self._check_pages([node.pages[group] for node in nodes])

    def _check_pages(self, held: list[IntArray]) -> None:
        pages = np.concatenate(held) if held else np.empty(0)
        assert len(np.unique(pages)) == len(pages), "a page is held twice"
        assert not (pages == 0).any(), "the padding page is held"

    def _check_children(self, node: Node) -> None:
        for key, child in node.children.items():
            assert child.parent is node
            assert key == child_key(child.key, self._page_size)
            assert child.start == node.end
            assert child.num_pages > 0
            assert child.pages.shape == (self._num_groups, child.num_pages)
            assert child.num_tokens == child.num_pages * self._page_size
            assert child.locks >= sum(c.locks for c in child.children.values()), "a descendant has more locks"
            assert child.last_used >= max((c.last_used for c in child.children.values()), default=0)
            assert child.queued or not evictable(child), "an unlocked leaf is not in the eviction queue"

    def _walk(self, root: Node, tokens: IntArray) -> tuple[list[Node], int]:
        """Return the nodes that agree with ``tokens`` on at least one page, and the number of tokens on which they
        agree. Only the last node may agree in part. Updates the recency of these nodes."""
        assert tokens.dtype == np.int32, "keys are int32"
        self._clock += 1
        page_size, page_bytes = self._page_size, self._page_size * TOKEN_BYTES
        key = tokens[: len(tokens) - len(tokens) % page_size].tobytes()
        path: list[Node] = []
        node, length = root, 0
        while node.end == length:
            start = length * TOKEN_BYTES
            child = node.children.get(key[start : start + page_bytes])
            if child is None:
                break
            length += common_length(child.key, key, length, page_size)
            child.last_used = self._clock
            path.append(child)
            node = child
        return path, length

    def _match_of(self, path: list[Node], length: int) -> Match:
        if not path:
            return Match(0, self._no_pages, Handle(None, 0), None, self._nothing)
        last = path[-1]
        pages = last.pages if len(path) == 1 else np.concatenate([node.pages for node in path], axis=1)
        if last.end != length:
            pages = pages[:, : length // self._page_size]
        return Match(length, pages, Handle(last, length), None, (length,) * self._num_groups, length)

    def _split(self, node: Node, length: int) -> Node:
        """Split a node after ``length`` tokens of its run, and return the upper part."""
        return split(node, length, self._page_size)

    def _end_at(self, path: list[Node], length: int) -> Node:
        """Split the last node of ``path`` if ``length`` is inside it, so that the path ends at ``length``. Return the
        last node."""
        node = path[-1]
        if node.end > length:
            node = path[-1] = self._split(node, length - node.start)
        return node

    def _grow(self, parent: Node, key: bytes, pages: IntArray) -> Node:
        """Return a new leaf below ``parent``."""
        leaf = Node(parent, key, pages.copy())
        leaf.last_used = self._clock
        parent.children[child_key(key, self._page_size)] = leaf
        self._total += leaf.num_pages
        self._queue.push(leaf)
        return leaf

    def _settle(self, handle: Handle) -> Node:
        """Return the node that ends where ``handle`` ends. Split a node if necessary."""
        node = handle.node
        while node is not None and node.parent is not None and node.start >= handle.length:
            node = node.parent
        assert node is not None
        assert node.parent is not None, "the prefix was evicted between match and lock"
        assert node.end >= handle.length, "the prefix was evicted between match and lock"
        if node.end > handle.length:
            node = self._split(node, handle.length - node.start)
        return node

    def _shrink(self, leaf: Node, count: int) -> IntArray:
        """Drop the last ``count`` pages of an unlocked leaf, and the leaf itself if these are all. Return the pages."""
        if count < leaf.num_pages:
            dropped = truncate(leaf, count, self._page_size)
            self._queue.push(leaf)
            return dropped
        parent = leaf.parent
        assert parent is not None
        del parent.children[child_key(leaf.key, self._page_size)]
        leaf.parent = None
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.namespace]
        self._queue.push(parent)
        return leaf.pages
