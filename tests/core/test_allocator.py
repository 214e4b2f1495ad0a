"""Test the page allocator against a plain set.

Run: python -m pytest -q tests/core/test_allocator.py
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.memory.allocator import PageAllocator


def _free_columns(allocator: PageAllocator, held: np.ndarray, keep: np.ndarray) -> np.ndarray:
    allocator.free(np.ascontiguousarray(held[:, ~keep]))
    return held[:, keep]


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(2, 70), st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_every_page_has_one_owner(groups: int, num_pages: int, steps: list[tuple[bool, int]]):
    allocator = PageAllocator(num_pages, groups)
    held = np.empty((groups, 0), dtype=np.int32)
    rng = np.random.default_rng(0)
    for take, n in steps:
        if take:
            before = allocator.num_free
            pages = allocator.alloc(n)
            assert (pages is None) == (n > before)
            if pages is not None:
                assert pages.shape == (groups, n)
                assert pages.dtype == np.int32
                held = np.concatenate([held, pages], axis=1)
        else:
            order = rng.permutation(held.shape[1])
            held = held[:, order]
            held = _free_columns(allocator, held, np.arange(held.shape[1]) >= n)
        for group in range(groups):
            assert 0 not in held[group]
            assert len(set(held[group].tolist())) == held.shape[1]
        assert allocator.num_free == allocator.num_total - held.shape[1]
        allocator.check_integrity(held)
    allocator.free(held)
    assert allocator.num_free == allocator.num_total == num_pages - 1


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(2, 70), st.integers(0, 70), st.integers(0, 70))
def test_postponed_pages_are_handed_out_last(groups: int, num_pages: int, taken: int, postponed: int):
    allocator = PageAllocator(num_pages, groups)
    held = allocator.alloc(min(taken, allocator.num_total))
    assert held is not None
    free = list(range(held.shape[1] + 1, num_pages))
    count = min(postponed, len(free))
    allocator.postpone(count)
    allocator.check_integrity(held)
    rest = allocator.alloc(len(free))
    assert rest is not None
    assert rest.tolist() == [[*free[count:], *free[:count]]] * groups
    allocator.check_integrity(np.concatenate([held, rest], axis=1))


def test_fresh_pages_are_consecutive():
    allocator = PageAllocator(100)
    first, second, third = allocator.alloc(1), allocator.alloc(10), allocator.alloc(20)
    assert first is not None
    assert second is not None
    assert third is not None
    pages = np.concatenate([first, second, third], axis=1)
    assert pages.tolist() == [list(range(1, 32))]


def test_pages_are_consecutive_again_after_disorder():
    allocator = PageAllocator(1000)
    pages = allocator.alloc(999)
    assert pages is not None
    for column in np.random.default_rng(0).permutation(999):
        allocator.free(pages[:, column : column + 1])
    again = allocator.alloc(500)
    assert again is not None
    assert (np.diff(again) == 1).all()


def test_too_many_takes_nothing():
    allocator = PageAllocator(5)
    assert allocator.alloc(5) is None
    assert allocator.num_free == 4
    assert allocator.alloc(4) is not None
    assert allocator.alloc(1) is None
    nothing = allocator.alloc(0)
    assert nothing is not None
    assert nothing.shape == (1, 0)


@pytest.mark.parametrize("pages", [[[0]], [[3]], [[1, 1]], [[-1]], [[1, 2, 1]]])
def test_a_page_that_is_not_held_cannot_be_freed(pages: list[list[int]]):
    allocator = PageAllocator(8)
    allocator.alloc(2)
    with pytest.raises(AssertionError):
        allocator.free(np.array(pages, dtype=np.int32))


def test_double_free_in_one_group_is_caught():
    allocator = PageAllocator(8, num_groups=2)
    pages = allocator.alloc(2)
    assert pages is not None
    allocator.free(pages[:, :1])
    with pytest.raises(AssertionError):
        allocator.free(np.array([[pages[0, 1]], [pages[1, 0]]], dtype=np.int32))


@pytest.mark.parametrize("fault", ["lost", "twice", "wrong"])
def test_check_integrity_finds_a_wrong_owner(fault: str):
    allocator = PageAllocator(16)
    held = allocator.alloc(6)
    assert held is not None
    allocator.check_integrity(held)
    wrong = {"lost": held[:, 1:], "twice": held[:, [0, 0, 2, 3, 4, 5]], "wrong": held + 6}[fault]
    with pytest.raises(AssertionError):
        allocator.check_integrity(wrong)
