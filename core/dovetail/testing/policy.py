"""Test schedule policies: the conformance suite of their interface."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.interfaces.cache import CacheContext, PrefixCache
from dovetail.interfaces.features import Feature
from dovetail.interfaces.policy import PolicyContext, SchedulePolicy
from dovetail.registry.specs import ComponentKind
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from dovetail.testing.cache_reference import ReferenceCache
from dovetail.testing.component import ComponentSuite
from dovetail.types import Req

PAGE_SIZE = 4
UNLIMITED = 700
"""The largest number of output tokens of a request that sets no ``max_new_tokens``, in this suite."""
GRAMMAR = GrammarSpec(GrammarKind.REGEX, "[a-z]+")
PREFERRED = [0] * 40
"""A prompt that the cache has."""

STARVED: dict[str, dict[str, Any]] = {
    "no advantage": {"prompt": [7, 8, 9]},
    "a long prompt": {"prompt": [7] * 700},
    "no limit of its output": {"prompt": [7, 8, 9], "max_new_tokens": None},
    "one token": {"prompt": [60_000]},
    "another namespace": {"prompt": PREFERRED, "namespace": "tenant"},
    "a session": {"prompt": PREFERRED, "session": "chat"},
    "a grammar": {"prompt": PREFERRED, "grammar": GRAMMAR},
}
"""What a request has that waits while preferred requests keep arriving."""


def make_waiting(
    uid: int,
    prompt: Sequence[int],
    *,
    age: float = 0.0,
    priority: int = 0,
    namespace: str = "",
    max_new_tokens: int | None = 8,
    session: str = "",
    grammar: GrammarSpec | None = None,
) -> Req:
    """Return a request in the waiting queue, as ``Scheduler.add`` leaves it, that arrived ``age`` seconds ago. Without
    ``max_new_tokens`` its output may have ``UNLIMITED`` tokens, up to the end of the context."""
    outputs = UNLIMITED if max_new_tokens is None else max_new_tokens
    token_ids = np.zeros(len(prompt) + outputs, dtype=np.int32)
    token_ids[: len(prompt)] = prompt
    return Req(
        rid=f"req-{uid}",
        token_ids=token_ids,
        prompt_len=len(prompt),
        params=SamplingParams(max_new_tokens=max_new_tokens, grammar=grammar),
        namespace=namespace,
        priority=priority,
        session=session,
        arrival=time.monotonic() - age,
        uid=uid,
        device_len=len(prompt),
        known_len=len(prompt),
    )


def make_cache(*prompts: Sequence[int], namespace: str = "") -> PrefixCache:
    """Return a cache of page size ``PAGE_SIZE`` that holds the whole pages of ``prompts``."""
    cache = ReferenceCache(None, CacheContext(PAGE_SIZE))
    for index, prompt in enumerate(prompts):
        pages = np.arange(len(prompt) // PAGE_SIZE, dtype=np.int32)[None] + 1000 * index + 1
        cache.insert(np.array(prompt, dtype=np.int32), pages, namespace)
    return cache


def snapshot(req: Req) -> dict[str, object]:
    """Return the fields of a request, for a later comparison."""
    fields = {field.name: getattr(req, field.name) for field in dataclasses.fields(req)}
    return {**fields, "token_ids": req.token_ids.tolist()}


each_seed = pytest.mark.parametrize("seed", range(12))


def make_queue(seed: int) -> list[Req]:
    """Return up to 40 random requests of all kinds, many of which share a beginning; every fourth seed up to 300."""
    rng = np.random.default_rng(seed)
    return [
        make_waiting(
            uid,
            _make_prompt(rng),
            age=float(rng.uniform(0, 100)),
            priority=int(rng.integers(-2, 3)),
            namespace=("", "tenant", "other")[rng.integers(3)],
            max_new_tokens=(None, 0, 8, 600)[rng.integers(4)],
            session=("", "", "chat")[rng.integers(3)],
            grammar=(None, None, GRAMMAR)[rng.integers(3)],
        )
        for uid in range(rng.integers(120, 300) if seed % 4 == 3 else rng.integers(0, 40))
    ]


def _make_prompt(rng: np.random.Generator) -> list[int]:
    """Return a short prompt of a few different tokens, or at times one of up to 3,000 tokens of a large vocabulary."""
    if rng.random() < 0.8:
        return rng.integers(0, 3, rng.integers(1, 20)).tolist()
    return rng.integers(0, 150_000, int(10 ** rng.uniform(1, 3.5))).tolist()


class PolicySuite(ComponentSuite):
    """Test a schedule policy. ``class TestMine(PolicySuite): name = "mine"`` is a complete test file.

    A policy that bounds waiting also sets ``patience_seconds``: the longest time that a request of priority 0 can wait
    while requests of priority 1 keep arriving that have up to 700 tokens less.
    """

    kind: ClassVar[ComponentKind] = ComponentKind.POLICY
    patience_seconds: ClassVar[float | None] = None

    def make(self, cache: PrefixCache | None = None) -> SchedulePolicy:
        """Return a new policy. Override this method to test a class that no plugin registers."""
        return self.build(PolicyContext(cache or make_cache()))

    @each_seed
    def test_order_is_a_permutation(self, seed: int) -> None:
        """No request is dropped, duplicated or invented, and the queue itself is not changed."""
        waiting, running = make_queue(seed), make_queue(seed + 100)
        before = list(waiting)
        ordered = self.make(make_cache([0] * 8, [1] * 8)).order(waiting, running)
        assert isinstance(ordered, list)
        assert sorted(req.uid for req in ordered) == sorted(req.uid for req in before), "not a permutation of the queue"
        assert sorted(map(id, ordered)) == sorted(map(id, before)), "requests were replaced by others"
        assert ordered is not waiting
        assert list(map(id, waiting)) == list(map(id, before)), "the queue was changed"

    @each_seed
    def test_order_changes_nothing(self, seed: int) -> None:
        """Waiting and running requests and the cache are unchanged, and a second call returns the same order."""
        cache = make_cache([0] * 8, [1] * 8)
        waiting, running = make_queue(seed), make_queue(seed + 100)
        before = [snapshot(req) for req in waiting + running]
        policy = self.make(cache)
        first = policy.order(waiting, running)
        assert policy.order(waiting, running) == first
        assert [snapshot(req) for req in waiting + running] == before
        assert cache.total == cache.evictable == (4,)

    @each_seed
    def test_a_finite_stream_is_served(self, seed: int) -> None:
        """Requests arrive and leave one per step, and each of them is first eventually."""
        policy, stream = self.make(make_cache([0] * 8)), make_queue(seed)
        waiting: list[Req] = []
        served: list[int] = []
        for step in range(2 * len(stream)):
            waiting += stream[step : step + 1]
            leaving = policy.order(waiting, [])[:1]
            waiting = [req for req in waiting if req not in leaving]
            served += [req.uid for req in leaving]
        assert sorted(served) == [req.uid for req in stream]

    @pytest.mark.parametrize("starved", STARVED)
    def test_patience_is_bounded(self, starved: str) -> None:
        """After ``patience_seconds`` a request goes first, whatever it is, even if preferred requests keep arriving:
        of a higher priority, with a cached prefix, shorter, longer, of another namespace, without session or grammar."""
        if self.patience_seconds is None:
            pytest.skip(f"{self.name} declares no patience_seconds")
        policy = self.make(make_cache(PREFERRED))
        victim = make_waiting(0, age=1.01 * self.patience_seconds + 0.1, **STARVED[starved])
        others = [make_waiting(uid, PREFERRED, priority=1) for uid in range(1, 20)]
        assert policy.order([*others, victim], [])[0] is victim, f"a request with {starved} starves"

    def test_order_does_not_block(self) -> None:
        """The scheduler calls ``order`` in every step: it neither sleeps nor waits for anything, with few requests and
        with many.

        Voluntary context switches of the thread count its waits, whatever else the machine computes meanwhile; the
        smallest of some calls counts, because the interpreter's lock may be waited for too.
        """
        if not hasattr(resource, "RUSAGE_THREAD"):
            pytest.skip("this system does not count the context switches of a thread")
        policy = self.make(make_cache(PREFERRED))
        for waiting, running in ((make_queue(1), []), (make_queue(3), make_queue(0))):
            waits = []
            for _ in range(10):
                before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
                policy.order(list(waiting), list(running))
                waits.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)
            assert min(waits) == 0, f"order waits {min(waits)} times in each call without computing"

    def test_equals_are_served_in_order_of_arrival(self) -> None:
        """Requests that differ only in their arrival are served in the order of arrival."""
        policy = self.make()
        waiting = [make_waiting(uid, [1, 2, 3], age=1 - 0.1 * uid) for uid in range(8)]
        assert [req.uid for req in policy.order(waiting, [])] == list(range(8))

    def test_a_cached_prefix_goes_first(self) -> None:
        """A prefix-aware policy prefers requests with cached prefixes, and only in the namespace of the cached
        prefix."""
        self.require(Feature.POLICY_PREFIX_AWARE)
        policy = self.make(make_cache([1] * 12, [2] * 8))
        waiting = [
            make_waiting(0, [3] * 13, age=0.3),
            make_waiting(1, [1] * 13, age=0.2, namespace="tenant"),
            make_waiting(2, [2] * 13, age=0.1),
            make_waiting(3, [1] * 13),
        ]
        assert [req.uid for req in policy.order(waiting, [])] == [3, 2, 0, 1]
