"""Test prefix caches with groups of different kinds: random histories, and prefixes that differ by a few tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dovetail.interfaces.cache import CacheContext, GroupDescriptor, PrefixCache, first_needed
from dovetail.interfaces.features import Feature
from dovetail.testing.cache_machine import tokens_of
from dovetail.testing.cache_model import FULL, LATENT, STATE, CacheModel, sliding
from dovetail.testing.cache_sharing import check_groups, most_saved, saved
from dovetail.testing.cache_traffic import Traffic
from dovetail.testing.component import ComponentSuite

MIXED = "latent, sliding, sliding, state, state"
LAYOUTS: dict[str, tuple[GroupDescriptor, ...]] = {
    "full": (FULL,),
    "full, sliding": (FULL, sliding(9)),
    "full, state": (FULL, STATE),
    MIXED: (sliding(5), LATENT, STATE, sliding(18), STATE),
    "sliding": (sliding(6),),
    "state": (STATE,),
    "sliding, state": (STATE, sliding(4)),
}
"""Name combinations of groups. The windows are shorter and longer than the keys of the random histories."""


class GroupedCacheMachine(RuleBasedStateMachine):
    """Make random calls through a ``CacheModel``. A key continues the first pages of an earlier one, which is usually
    still cached, with up to four pages of three kinds."""

    KINDS = st.lists(st.integers(0, 2), max_size=4)
    EARLIER = st.tuples(st.integers(0, 7), st.integers(0, 7))

    def __init__(self, cache: PrefixCache, context: CacheContext, namespaces: Sequence[str]) -> None:
        super().__init__()
        self.model = CacheModel(cache, context)
        self.namespaces = namespaces
        self.keys: list[list[int]] = [[]]

    def key(self, earlier: tuple[int, int], kinds: list[int]) -> list[int]:
        """Return ``kinds`` after the beginning of an earlier key: ``earlier`` is how long ago, and how many pages."""
        back, count = earlier
        return [*self.keys[-1 - back % len(self.keys)][:count], *kinds]

    @rule(earlier=EARLIER, kinds=KINDS, tail=st.integers(0, 15), space=st.integers(0, 3))
    def match(self, earlier: tuple[int, int], kinds: list[int], tail: int, space: int) -> None:
        """Match a key with a tail of less than a page."""
        size, tokens = self.model.page_size, self.key(earlier, kinds)
        self.model.match(tokens_of(tokens, size, tail % size), self.namespaces[space // 3 % len(self.namespaces)])

    @rule(
        earlier=EARLIER,
        kinds=KINDS,
        space=st.integers(0, 3),
        holes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=6),
        behind=st.booleans(),
        states=st.integers(0, 3),
        priority=st.integers(0, 2),
    )
    def insert(
        self,
        earlier: tuple[int, int],
        kinds: list[int],
        space: int,
        holes: list[tuple[int, int]],
        behind: bool,
        states: int,
        priority: int,
    ) -> None:
        """Insert a key. Some pages are holes: any, or those behind the windows of the end, as of a request that has
        given them back. ``states`` selects the state groups that have a snapshot."""
        model, kinds = self.model, self.key(earlier, kinds)
        self.keys.append(kinds)
        if behind:
            holes = [
                (row, column)
                for row, group in enumerate(model.paged)
                for column in set(range(len(kinds))) - set(model.needed(group, len(kinds)))
            ]
        offered = model.fresh_states()
        offered[[row for row in range(len(offered)) if not states >> row & 1]] = 0
        namespace = self.namespaces[space // 3 % len(self.namespaces)]
        pages = model.fresh(len(kinds), holes)
        model.insert(tokens_of(kinds, model.page_size), pages, namespace, priority, offered if states else None)

    @rule(earlier=EARLIER, states=st.integers(0, 3), data=st.data())
    def compute(self, earlier: tuple[int, int], states: int, data: st.DataObject) -> None:
        """Do what a request does: match, lock, and insert a longer key, with holes behind the windows."""
        model, kinds = self.model, self.key(earlier, [])
        found = model.match(tokens_of(kinds, model.page_size), self.namespaces[0])
        model.lock(model.found[-1])
        kinds = [*kinds, *data.draw(self.KINDS)]
        self.keys.append(kinds)
        columns = found.length // model.page_size
        holes = [
            (row, column)
            for row, group in enumerate(model.paged)
            for column in set(range(columns)) - set(model.needed(group, columns))
        ]
        offered = model.fresh_states()
        offered[[row for row in range(len(offered)) if not states >> row & 1]] = 0
        tokens = tokens_of(kinds, model.page_size)
        model.insert(tokens, model.fresh(len(kinds), holes), self.namespaces[0], 0, offered)

    @precondition(lambda self: self.model.found)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        """Lock any prefix that was found since the last eviction, regardless of the inserts in between."""
        self.model.lock(data.draw(st.sampled_from(self.model.found)))

    @precondition(lambda self: self.model.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        """Undo any lock, in any order."""
        self.model.unlock(data.draw(st.integers(0, len(self.model.locked) - 1)))

    @precondition(lambda self: any(self.model.held))
    @rule(data=st.data(), everything=st.integers(0, 15))
    def evict(self, data: st.DataObject, everything: int) -> None:
        """Evict a few pages or snapshots of each group, often of one group only, rarely only what is not needed, and rarely
        all that is not protected."""
        if everything == 15:
            self.model.reset()
            return
        counts, count = st.sampled_from([0, 0, 1, 2]), len(self.model.groups)
        most = data.draw(st.lists(counts, min_size=count, max_size=count))
        if everything == 14:
            self.model.evict_unneeded(most)
        else:
            self.model.evict(most)

    @invariant()
    def counters_are_right(self) -> None:
        """Compare the counters."""
        self.model.check()

    def teardown(self) -> None:
        """Unlock and drop everything."""
        self.model.close()


GROUPED = CacheContext(4, (FULL, sliding(9), STATE))
"""A context of all kinds, in which the last two of three pages are needed to resume at 12 tokens."""


class GroupedCacheCases(ComponentSuite):
    """Test a prefix cache with sliding and state groups. Part of ``PrefixCacheSuite``."""

    examples: ClassVar[int]

    def make_for(self, context: CacheContext) -> PrefixCache:
        """Return a new cache for ``context``. Override this method to test a class that no plugin registers."""
        return self.build(context)

    def history_settings(self) -> settings:
        """Return the settings with which hypothesis runs the random histories."""
        raise NotImplementedError

    def grouped(self, context: CacheContext = GROUPED) -> CacheModel:
        """Return a new cache whose calls are all checked."""
        self.require(Feature.CACHE_REUSE)
        self.require(Feature.CACHE_GROUPS)
        return CacheModel(self.make_for(context), context)

    @pytest.mark.parametrize(("layout", "page_size"), [*((name, 4) for name in LAYOUTS), (MIXED, 1), (MIXED, 16)])
    def test_groups_agree_with_a_dictionary(self, layout: str, page_size: int) -> None:
        """Matches have what every group needs and no more; nothing is lost or freed twice; locks protect enough."""
        self.require(Feature.CACHE_GROUPS)
        namespaces = ("", "a") if self.offers(Feature.CACHE_NAMESPACES) else ("",)
        context, suite = CacheContext(page_size, LAYOUTS[layout]), self

        class Machine(GroupedCacheMachine):
            def __init__(self) -> None:
                super().__init__(suite.make_for(context), context, namespaces)

        examples = max(1, self.examples // 3)
        run_state_machine_as_test(Machine, settings=settings(self.history_settings(), max_examples=examples))

    def test_no_page_behind_the_window_is_needed(self) -> None:
        """A prompt whose first pages are holes is found where the window is whole, and nowhere else."""
        model = self.grouped(CacheContext(4, (FULL, sliding(9))))
        tokens = tokens_of([0] * 6, 4)
        model.insert(tokens, model.fresh(6, [(1, 0), (1, 1), (1, 2)]))
        assert model.match(tokens).length == 24
        assert model.match(tokens[:20]).reached == (20, 20)
        found = model.match(tokens[:19])
        assert (found.length, found.reached) == (0, (16, 0))

    def test_a_hole_is_filled(self) -> None:
        """A request that computes a missing page again gives it to the cache, and shorter prefixes are found."""
        model = self.grouped(CacheContext(4, (FULL, sliding(9))))
        tokens = tokens_of([0] * 6, 4)
        model.insert(tokens, model.fresh(6, [(1, 0), (1, 1), (1, 2)]))
        model.insert(tokens[:8], model.fresh(2))
        assert model.match(tokens[:20]).length == 20
        assert model.match(tokens[:16]).length == 8
        model.insert(tokens[:12], model.fresh(3))
        assert model.match(tokens[:16]).length == 16
        model.check()

    def test_a_snapshot_is_found_at_exactly_its_length(self) -> None:
        """A state group resumes where it has a snapshot, also inside what another prompt has computed."""
        model = self.grouped(CacheContext(4, (FULL, STATE)))
        tokens = tokens_of([0] * 6, 4)
        model.insert(tokens, model.fresh(6), states=model.fresh_states())
        assert model.match(tokens[:23]).reached == (20, 0)
        kept = model.insert(tokens[:12], model.fresh(3), states=model.fresh_states()).states
        assert model.match(tokens[:23]).length == 12
        again = model.insert(tokens[:12], model.fresh(3), states=model.fresh_states()).states
        assert again is not None
        assert kept is not None
        assert again.tolist() == kept.tolist(), (
            "the cache has a snapshot at this length: the offered one is the caller's"
        )
        assert model.match(tokens).length == 24
        assert model.cache.total == (6, 2)

    def test_a_lock_protects_the_window_and_the_snapshot(self) -> None:
        """Of a locked prefix, all pages of the full group stay, the window of its end, and the snapshot there."""
        self.require(Feature.CACHE_EVICT)
        model = self.grouped()
        tokens = tokens_of([0] * 6, 4)
        model.insert(tokens[:8], model.fresh(2), states=model.fresh_states())
        model.insert(tokens, model.fresh(6), states=model.fresh_states())
        model.match(tokens)
        model.lock(model.found[-1])
        assert model.cache.evictable == (0, 4, 1)
        model.evict((9, 9, 9))
        assert model.cache.total == (6, 2, 1)
        assert model.match(tokens).length == 24
        model.unlock(0)
        model.close()

    @pytest.mark.parametrize("window", [40, 100, 1000])
    def test_similar_prompts_find_what_they_share(self, window: int) -> None:
        """Prompts that share a multiple of the window, give or take up to 200 tokens, find all whole pages of it."""
        rng = random.Random(window)
        model = self.grouped(CacheContext(16, (FULL, sliding(window))))
        base = np.random.default_rng(window).integers(0, 1000, 3 * window + 250, dtype=np.int32)
        model.insert(base, model.fresh(len(base) // 16))
        for _ in range(8):
            shared = min(max(1, window * rng.randint(1, 3) + rng.randint(-200, 200)), len(base) - 1)
            prompt = base[: shared + rng.randint(1, window)].copy()
            prompt[shared:] += 1000
            found = model.match(prompt)
            assert found.length == shared // 16 * 16
            assert found.reached == (found.length, found.length)
            model.lock(model.found[-1])
            columns = len(prompt) // 16
            behind = [(1, column) for column in range(first_needed(sliding(window), found.length, 16))]
            model.insert(prompt, model.fresh(columns, behind))
            model.lock(model.found[-1])
            model.unlock(-2)
        model.check()
        model.close()

    @pytest.mark.parametrize("layout", [MIXED, "full, sliding", "full, state", "sliding, state"])
    def test_rows_share_the_pages_of_their_paths(self, layout: str) -> None:
        """Rows share as much as the pages of full and latent groups allow, whatever the other groups keep of their paths.
        Without such groups they share what their paths have in common. Where two rows need a page of a sliding group, it is the
        same."""
        self.require(Feature.CACHE_SHARED_PREFIXES)
        rng = random.Random(len(layout))
        context = CacheContext(4, LAYOUTS[layout])
        for _ in range(self.examples):
            model = self.grouped(context)
            for _ in range(rng.randrange(1, 7)):
                kinds = [rng.choice([0, 0, 1, 2]) for _ in range(rng.randrange(1, 7))]
                holes = [(rng.randrange(len(model.paged)), column) for column in range(len(kinds) - 1)]
                states = model.fresh_states() if rng.random() < 0.5 else None
                model.insert(tokens_of(kinds, 4), model.fresh(len(kinds), holes), states=states)
                model.lock(model.found[-1])
            for _ in range(rng.randrange(len(model.locked))):
                model.unlock(rng.randrange(len(model.locked)))
            model.evict([rng.randrange(4) for _ in context.groups])
            dense = [model.held[group] for group in model.paged if context.groups[group].dense]
            known: dict[Any, int] = {}
            numbers = [{p: known.setdefault(p, len(known)) for held in model.locked for p in held.prefixes}]
            paths = [
                np.array([[pages[prefix] for prefix in held.prefixes] for pages in dense or numbers], np.int32)
                for held in model.locked
            ]
            groups = model.cache.shared_prefixes([held.handle for held in model.locked])
            check_groups(groups, paths, 4)
            assert saved(groups) == most_saved(paths, 4), "other groups save more"
            model.close()

    @pytest.mark.parametrize("layout", [MIXED, "full, sliding", "sliding, state"])
    def test_requests_lose_no_page(self, layout: str) -> None:
        """Requests that are admitted, computed in chunks, forked, aborted and retracted leave each page with one owner."""
        self.require(Feature.CACHE_GROUPS)
        self.require(Feature.CACHE_EVICT)
        context = CacheContext(4, LAYOUTS[layout])
        sizes = tuple({"state": 12, "sliding": 40}.get(str(group.kind), 60) for group in context.groups)
        traffic = Traffic(self.make_for(context), context, sizes)
        run_traffic(traffic, 600, random.Random(len(layout)))


def run_traffic(traffic: Traffic, num_calls: int, rng: random.Random) -> None:
    """Make random calls, which check themselves: prompts that continue earlier ones, that fork at any token, that end,
    and requests that are aborted in the middle of their prompt or retracted."""
    size = traffic.page_size
    numbers = np.random.default_rng(rng.randrange(1000))
    bases = [numbers.integers(0, 50, size * 14, dtype=np.int32) for _ in range(5)]
    ended: list[np.ndarray] = []
    for call in range(num_calls):
        choice = rng.random()
        if not traffic.running or (choice < 0.3 and len(traffic.running) < 4):
            if ended and rng.random() < 0.4:
                more = numbers.integers(0, 50, rng.randint(1, 2 * size), dtype=np.int32)
                tokens = np.concatenate([rng.choice(ended), more])[: size * 20]
            else:
                cut = rng.randrange(1, size * 14)
                tokens = rng.choice(bases)[: cut + rng.randint(1, size * 14 - cut)].copy()
                tokens[cut:] += rng.randint(0, 3)
            traffic.admit(tokens, rng.choice(["", "tenant"]))
            continue
        req = rng.choice(traffic.running)
        if req.computed >= len(req.tokens):
            traffic.stop(req)
            ended = [*ended[-9:], req.tokens]
        elif choice > 0.95:
            traffic.stop(req, share=choice < 0.975)
        elif not traffic.compute(req, req.computed + rng.choice([1, size, 3 * size + 1]), snapshot=rng.random() < 0.7):
            traffic.stop(rng.choice(traffic.running))  # retract one
        if call % 50 == 0:
            traffic.check()
    traffic.close()
