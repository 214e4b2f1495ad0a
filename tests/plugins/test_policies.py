"""Test the schedule policies: the suite for each, and how they differ.

Run: python -m pytest -q tests/plugins/test_policies.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from dovetail.interfaces.cache import Match
from dovetail.interfaces.policy import PolicyContext, SchedulePolicy
from dovetail.testing.cache_reference import ReferenceCache
from dovetail.testing.policy import PolicySuite, make_cache, make_waiting
from dovetail.types import IntArray, Req
from dovetail_policies.config import DfsWeightConfig, FcfsConfig, LpmConfig, PriorityConfig
from dovetail_policies.dfs_weight import DfsWeight, depth_first
from dovetail_policies.lpm import LongestPrefixMatch
from dovetail_policies.simple import Fcfs, Priority


class TestFcfs(PolicySuite):
    name = "fcfs"
    patience_seconds = 0


class TestPriority(PolicySuite):
    name = "priority"
    patience_seconds = 30


class TestLpm(PolicySuite):
    name = "lpm"
    patience_seconds = 10


class TestDfsWeight(PolicySuite):
    name = "dfs_weight"
    patience_seconds = 10


def _uids(policy: SchedulePolicy, waiting: Sequence[Req]) -> list[int]:
    return [req.uid for req in policy.order(waiting, [])]


def _context(*prompts: Sequence[int]) -> PolicyContext:
    return PolicyContext(make_cache(*prompts))


def test_fcfs_looks_at_arrival_not_at_the_queue():
    waiting = [make_waiting(uid, [1], age=float(age)) for uid, age in enumerate((3, 9, 1, 5))]
    assert _uids(Fcfs(FcfsConfig(), _context()), waiting) == [1, 3, 0, 2]


def test_priority_then_arrival():
    waiting = [make_waiting(0, [1], age=2, priority=0), make_waiting(1, [1], age=1, priority=5)]
    waiting += [make_waiting(2, [1], age=3, priority=5), make_waiting(3, [1], age=4, priority=-1)]
    for ageing in (None, 1000.0):
        policy = Priority(PriorityConfig(ageing_seconds=ageing), _context())
        assert _uids(policy, waiting) == [2, 1, 0, 3]


@pytest.mark.parametrize(("ageing", "expected"), [(None, [1, 0]), (30.0, [1, 0]), (15.0, [0, 1])])
def test_waiting_counts_as_priority(ageing: float | None, expected: list[int]):
    waiting = [make_waiting(0, [1], age=40, priority=0), make_waiting(1, [1], age=0, priority=2)]
    assert _uids(Priority(PriorityConfig(ageing_seconds=ageing), _context()), waiting) == expected


class _CountingCache(ReferenceCache):
    calls = 0

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        self.calls += 1
        return super().match(tokens, namespace)


def test_lpm_asks_the_cache_a_bounded_number_of_times():
    source = make_cache([1] * 8)
    cache = _CountingCache.__new__(_CountingCache)
    cache.__dict__.update(source.__dict__)
    policy = LongestPrefixMatch(LpmConfig(window=5), PolicyContext(cache))
    waiting = [make_waiting(uid, [1 if uid in (3, 700) else 2] * 9, age=9 - 0.01 * uid) for uid in range(800)]
    order = _uids(policy, waiting)
    assert cache.calls == 5
    assert order[:6] == [3, 0, 1, 2, 4, 5]  # 700 has the same prefix, but is outside the window
    assert order[5:] == list(range(5, 800))


def test_lpm_does_not_count_the_last_token():
    """The last prompt token is always computed, so a fully cached prompt is worth a page less."""
    policy = LongestPrefixMatch(LpmConfig(), _context([1] * 8, [2] * 8))
    waiting = [make_waiting(0, [1] * 8, age=0.1), make_waiting(1, [2] * 9)]
    assert _uids(policy, waiting) == [1, 0]


def test_overdue_requests_go_first_the_oldest_before_the_others():
    policy = LongestPrefixMatch(LpmConfig(max_wait_seconds=5), _context([1] * 8))
    waiting = [make_waiting(0, [1] * 9), make_waiting(1, [2] * 9, age=6), make_waiting(2, [3] * 9, age=7)]
    assert _uids(policy, waiting) == [2, 1, 0]


def _dfs(**fields: int) -> DfsWeight:
    return DfsWeight(DfsWeightConfig.model_validate({"granularity": 1, **fields}), _context())


def test_dfs_weight_runs_branches_together_the_heaviest_first():
    prompts = [[9, 9], [1, 2, 3], [1, 5, 6], [1, 2, 4], [7, 7, 1], [7, 7, 2], [1, 2, 3, 8]]
    waiting = [make_waiting(uid, prompt, age=1 - 0.1 * uid) for uid, prompt in enumerate(prompts)]
    # 1..: four requests; of those 1 2..: three; of those 1 2 3..: two
    assert _uids(_dfs(), waiting) == [1, 6, 3, 2, 4, 5, 0]


def test_dfs_weight_keeps_namespaces_apart():
    waiting = [make_waiting(uid, [1, 2, 3], age=1 - 0.1 * uid, namespace="ab"[uid % 2]) for uid in range(5)]
    assert _uids(_dfs(), waiting) == [0, 2, 4, 1, 3]


def test_dfs_weight_sharing_less_than_a_page_is_not_sharing():
    waiting = [make_waiting(0, [9] * 20, age=0.3)]
    waiting += [make_waiting(1, [1, 2, *[3] * 18], age=0.2), make_waiting(2, [1, 2, *[4] * 18], age=0.1)]
    assert _uids(_dfs(granularity=1), waiting) == [1, 2, 0]
    assert _uids(_dfs(granularity=16), waiting) == [0, 1, 2]


def test_dfs_weight_compares_up_to_its_depth():
    waiting = [make_waiting(uid, [1] * 10 + [last], age=1 - 0.1 * uid) for uid, last in enumerate((5, 6, 5))]
    assert _uids(_dfs(depth=11), waiting) == [0, 2, 1]
    assert _uids(_dfs(depth=10), waiting) == [0, 1, 2]


class _Trie:
    """Build an independent reference: a real trie, one token a level, walked depth first."""

    def __init__(self, members: list[tuple[int, list[int]]], depth: int = 0) -> None:
        self.oldest = min(age for age, _ in members)
        self.size = len(members)
        self.ended = [age for age, key in members if len(key) == depth]
        groups: dict[int, list[tuple[int, list[int]]]] = {}
        for age, key in members:
            if len(key) > depth:
                groups.setdefault(key[depth], []).append((age, key))
        self.children = [_Trie(group, depth + 1) for group in groups.values()]

    def walk(self) -> list[int]:
        """Visit heavier branches first, and older ones first among equals; a prompt that ends here is a branch of one."""
        branches = [(-child.size, child.oldest, child) for child in self.children]
        branches += [(-1, age, None) for age in self.ended]
        order: list[int] = []
        for _, age, child in sorted(branches, key=lambda branch: branch[:2]):
            order += child.walk() if child else [age]
        return order


@pytest.mark.parametrize("seed", range(20))
def test_dfs_weight_equals_a_walk_over_a_trie(seed: int):
    rng = random.Random(seed)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 7))] for _ in range(40)]
    waiting = [make_waiting(uid, prompt, age=1 - 0.01 * uid) for uid, prompt in enumerate(prompts)]
    assert _uids(_dfs(), waiting) == _Trie(list(enumerate(prompts))).walk()


def test_depth_first_of_nothing_and_of_one():
    assert depth_first([], []) == []
    assert depth_first([0], []) == [0]


def test_token_ids_are_sorted_as_numbers():
    """Adjacent prompts in the sorted order must be those that share most, with ids above 255 and 65535 as well."""
    ids = [1, 255, 256, 257, 65535, 65536, 70000, 2**31 - 1]
    prompts = [[token, tail] for token in ids for tail in (0, 1)]
    order = np.random.default_rng(0).permutation(len(prompts)).tolist()
    waiting = [make_waiting(uid, prompts[place], age=1 - 0.01 * uid) for uid, place in enumerate(order)]
    firsts = [waiting[uid].token_ids[0] for uid in _uids(_dfs(), waiting)]
    assert all(a == b for a, b in zip(firsts[::2], firsts[1::2], strict=True))
