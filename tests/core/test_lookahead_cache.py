"""Test a cache in which the next tokens count, against a dictionary of prefixes.

Run: python -m pytest -q tests/core/test_lookahead_cache.py
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail.interfaces.cache import CacheContext, GroupDescriptor, PrefixCache
from dovetail.memory.lookahead import LookaheadCache, with_lookahead
from dovetail_cache.config import RadixConfig
from dovetail_cache.radix import RadixCache

Text = tuple[int, ...]


def make(page_size: int, ahead: int, groups: int = 1) -> PrefixCache:
    def build(context: CacheContext) -> PrefixCache:
        return RadixCache(RadixConfig(), context)

    return with_lookahead(build, CacheContext(page_size, (GroupDescriptor(),) * groups), ahead)


def tokens(text: Text) -> np.ndarray:
    return np.array(text, np.int32)


class Known:
    """Hold which page a text's n-th page is in, by all tokens up to those behind it."""

    def __init__(self, page_size: int, ahead: int) -> None:
        self.page_size, self.ahead = page_size, ahead
        self.pages: dict[tuple[str, Text], int] = {}

    def keys(self, text: Text, namespace: str) -> list[tuple[str, Text]]:
        ends = range(self.page_size + self.ahead, len(text) + 1, self.page_size)
        return [(namespace, text[:end]) for end in ends]

    def match(self, text: Text, namespace: str) -> list[int]:
        found = []
        for key in self.keys(text, namespace):
            if key not in self.pages:
                break
            found.append(self.pages[key])
        return found

    def insert(self, text: Text, pages: list[int], namespace: str) -> list[int]:
        keys = self.keys(text, namespace)
        for key, page in zip(keys, pages, strict=False):
            self.pages.setdefault(key, page)
        return [self.pages[key] for key in keys[: len(pages)]]


texts = st.lists(st.integers(0, 2), max_size=14).map(tuple)


@given(
    page_size=st.integers(1, 4),
    ahead=st.integers(0, 3),
    asked=st.lists(st.tuples(st.booleans(), texts, st.sampled_from(["", "tenant"])), max_size=25),
)
def test_prefixes_are_found_as_far_as_what_follows_is_the_same(page_size, ahead, asked):
    cache, known, free = make(page_size, ahead), Known(page_size, ahead), 1
    for inserts, text, namespace in asked:
        if inserts:
            count = len(text) // page_size
            pages = list(range(free, free + count))
            free += count
            found = cache.insert(tokens(text), np.array([pages], np.int32).reshape(1, -1), namespace)
            expected = known.insert(text, pages, namespace)
        else:
            found, expected = cache.match(tokens(text), namespace), known.match(text, namespace)
        assert found.pages.tolist() == [expected]
        assert found.length == len(expected) * page_size
        cache.check_integrity()
    assert cache.total == cache.evictable == (len(known.pages),)
    assert sorted(cache.reset()[0].tolist()) == sorted(known.pages.values())


def test_locked_pages_stay_and_shared_prefixes_are_found():
    cache = make(2, 1, groups=2)
    assert isinstance(cache, LookaheadCache)
    pages = np.array([[1, 2, 3], [11, 12, 13]], np.int32)
    held = [cache.insert(tokens((0, 0, 1, 1, 2, 2, last)), pages + 3 * i) for i, last in enumerate((3, 4))]
    assert held[0].pages.tolist() == pages.tolist()
    assert held[1].pages.tolist() == [[1, 2, 6], [11, 12, 16]], "the last page is followed by another token"
    for match in held:
        cache.lock(match.handle)
    assert cache.shared_prefixes([match.handle for match in held]) == [([0, 1], 4)]
    assert (cache.total, cache.evictable) == ((4, 4), (0, 0))
    cache.unlock(held[1].handle)
    assert [pages.tolist() for pages in cache.evict((9, 9))] == [[6], [16]]
    cache.unlock(held[0].handle)
    assert sorted(cache.reset()[0].tolist()) == [1, 2, 3]
