"""Define the nodes of the radix tree. A node is a run of tokens, compared as bytes, which takes a tenth of the time of
small arrays."""

from __future__ import annotations

import numpy as np

from dovetail.types import IntArray

TOKEN_BYTES = np.dtype(np.int32).itemsize


PartRank = tuple[float, ...]


class NodeParts:
    """Hold what the parts know about a node. ``begins``, ``states`` and ``state_locks`` have an entry for each sliding
    or state group; ``worth`` and ``entries`` have one for each part."""

    __slots__ = ("begins", "entries", "state_locks", "states", "worth")

    def __init__(self, num_sliding: int, num_states: int) -> None:
        self.begins: list[dict[int, int]] = [{} for _ in range(num_sliding)]  # locks by their first protected column
        self.states = [0] * num_states  # snapshots at the end of the node, 0 for none
        self.state_locks = [0] * num_states
        self.worth = [0.0] * (num_sliding + num_states)
        self.entries: list[PartRank | None] = [None] * (
            num_sliding + num_states
        )  # rank of the valid entry in the queue


class Node:
    """Hold a run of tokens that follows the tokens of its parent, and the pages that hold them."""

    __slots__ = (
        "children",
        "end",
        "key",
        "last_used",
        "locks",
        "pages",
        "parent",
        "parts",
        "priority",
        "queued",
        "uses",
    )
    parts: NodeParts  # set only by caches with sliding or state groups

    def __init__(self, parent: Node | None, key: bytes, pages: IntArray) -> None:
        self.parent = parent  # None for a root, and for a node that was removed from the tree
        self.key = key  # the bytes of n * page_size tokens, int32
        self.pages = pages  # int32 [groups, n]; written to only in caches with sliding groups, which hand out copies
        self.end: int = self.num_tokens + (parent.end if parent else 0)  # tokens from the root to the end of the run
        self.children: dict[bytes, Node] = {}  # by the first page of their keys
        self.locks = 0  # number of locks of this node and of all nodes below it
        self.last_used = 0
        self.uses = 0
        self.priority = 0
        self.queued = False  # has an entry in the eviction queue

    @property
    def start(self) -> int:
        """Return the number of tokens from the root to the start of the run."""
        return self.end - self.num_tokens

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the run."""
        return len(self.key) // TOKEN_BYTES

    @property
    def num_pages(self) -> int:
        """Return the number of pages of the run, in each group."""
        return self.pages.shape[1]


class Root(Node):
    """Represent the empty run with which all prefixes of a namespace begin."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, num_groups: int) -> None:
        super().__init__(None, b"", np.empty((num_groups, 0), dtype=np.int32))
        self.namespace = namespace


class Handle:
    """Identify a position in the tree: the first ``length`` tokens of the path of ``node``.

    Matching does not split nodes, so ``length`` may be inside the run of ``node``. Locking splits it there. Once
    locked, ``node`` always ends at ``length``: when a node is split, the lower part keeps its identity.
    """

    __slots__ = ("length", "node")

    def __init__(self, node: Node | None, length: int) -> None:
        self.node = node  # None: the empty prefix
        self.length = length


def child_key(key: bytes, page_size: int) -> bytes:
    """Return the key of a run among the children of its parent: its first page."""
    return key[: page_size * TOKEN_BYTES]


def common_length(run: bytes, tokens: bytes, start: int, page_size: int) -> int:
    """Return the number of tokens on which ``run`` and ``tokens`` from token ``start`` on agree, rounded down to whole
    pages."""
    begin = start * TOKEN_BYTES
    if tokens.startswith(run, begin):
        return len(run) // TOKEN_BYTES
    a, b = np.frombuffer(run, np.int32), np.frombuffer(tokens, np.int32, offset=begin)
    n = min(len(a), len(b))
    equal = a[:n] == b[:n]
    if not equal.all():
        n = int(np.argmin(equal))
    return n - n % page_size


def split(node: Node, length: int, page_size: int) -> Node:
    """Move the first ``length`` tokens of a run to a new node above ``node``, and return the new node.

    Copies both parts, so that one can be freed without the other.
    """
    assert node.parent is not None
    assert 0 < length < node.num_tokens
    count, cut = length // page_size, length * TOKEN_BYTES
    upper = Node(node.parent, node.key[:cut], node.pages[:, :count].copy())
    upper.locks, upper.last_used = node.locks, node.last_used
    upper.uses, upper.priority = node.uses, node.priority
    node.parent.children[child_key(upper.key, page_size)] = upper
    node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[:, count:].copy()
    upper.children[child_key(node.key, page_size)] = node
    return upper


def truncate(node: Node, count: int, page_size: int) -> IntArray:
    """Drop the last ``count`` pages of a run and return them. Copies the rest, so that the old run can be freed."""
    keep = node.num_pages - count
    dropped = node.pages[:, keep:]
    node.key, node.pages = node.key[: keep * page_size * TOKEN_BYTES], node.pages[:, :keep].copy()
    node.end -= count * page_size
    return dropped
