"""Define broken schedule policies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from mutant import Mutant, Suite

from dovetail.interfaces.cache import CachedPrefixes, Match, PrefixCache
from dovetail.interfaces.features import Feature
from dovetail.interfaces.policy import PolicyContext, SchedulePolicy
from dovetail.testing.policy import PolicySuite, make_cache
from dovetail.types import IntArray, Req
from dovetail_policies.config import FcfsConfig, LpmConfig
from dovetail_policies.lpm import LongestPrefixMatch
from dovetail_policies.simple import Fcfs


class Loses(Fcfs):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return super().order(waiting, running)[:10]


class LosesTheUnimportant(Fcfs):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return [req for req in super().order(waiting, running) if req.priority > -2]


class Doubles(Fcfs):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return super().order(waiting, running)[:1] * len(waiting)


class Mutates(Fcfs):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        for req in waiting:
            req.priority += 1
        return super().order(waiting, running)


class SortsTheQueue(Fcfs):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        assert isinstance(waiting, list)
        waiting.sort(key=lambda req: -req.uid)
        return list(waiting)


class Starves(Fcfs):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return sorted(waiting, key=lambda req: -req.priority)


class Drops(Fcfs):
    """Drop the requests for which ``drops`` is true."""

    drops: ClassVar[Callable[[Req], bool]]

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return [req for req in super().order(waiting, running) if not type(self).drops(req)]


class Defers(Drops):
    """Serve the requests for which ``drops`` is true when no other waits."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        ordered = Fcfs.order(self, waiting, running)
        return sorted(ordered, key=type(self).drops)


class DropsBeyondAHundred(Fcfs):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return super().order(waiting, running)[:100]


class DropsWhenBusy(Fcfs):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return super().order(waiting, running)[: None if len(running) <= 8 else 1]


class ReadsALimit(Fcfs):
    """Compute with ``max_new_tokens``, which may be None."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        sum(req.params.max_new_tokens + 0 for req in waiting)  # type: ignore[operator]
        return super().order(waiting, running)


class Sleeps(Fcfs):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        time.sleep(0.003 if len(waiting) > 100 else 0)
        return super().order(waiting, running)


class LastComeFirstServed(Fcfs):
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return super().order(waiting, running)[::-1]


class _OneNamespace:
    """Match a cache with the empty namespace."""

    def __init__(self, cache: CachedPrefixes) -> None:
        self._cache = cache

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        return self._cache.match(tokens)


class MixesTenants(LongestPrefixMatch):
    def __init__(self, config: LpmConfig, context: PolicyContext) -> None:
        super().__init__(config, PolicyContext(_OneNamespace(context.cache)))  # type: ignore[arg-type]


def suite(policy_class: type[SchedulePolicy], config: FcfsConfig | LpmConfig) -> Suite:
    class Suite(PolicySuite):
        name = "lpm" if isinstance(config, LpmConfig) else "fcfs"
        patience_seconds = 1

        def make(self, cache: PrefixCache | None = None) -> SchedulePolicy:
            return policy_class(config, PolicyContext(cache or make_cache()))  # type: ignore[call-arg]

        def offers(self, feature: Feature) -> bool:
            return True

    return Suite


FCFS, LPM = suite(Fcfs, FcfsConfig()), suite(LongestPrefixMatch, LpmConfig())
SEEDS = tuple((seed,) for seed in range(12))


def _of_fcfs(
    fault: str, policy_class: type[Fcfs], case: str, runs: Sequence[tuple[int, ...]] = SEEDS, says: str = ""
) -> Mutant:
    return Mutant(fault, case, suite(policy_class, FcfsConfig()), FCFS, runs, says)


def _starving(fault: str, starved: str, drops: Callable[[Req], bool]) -> Mutant:
    """Return a policy that serves the requests for which ``drops`` is true when no other waits."""
    policy_class = type("Deferring", (Defers,), {"drops": staticmethod(drops)})
    return _of_fcfs(fault, policy_class, "test_patience_is_bounded", [(starved,)], "starves")


def _dropping(fault: str, drops: Callable[[Req], bool]) -> Mutant:
    policy_class = type("Dropping", (Drops,), {"drops": staticmethod(drops)})
    return _of_fcfs(fault, policy_class, "test_order_is_a_permutation", says="not a permutation")


LONG = 512
MUTANTS = [
    _starving("starves long prompts", "a long prompt", lambda req: req.prompt_len > LONG),
    _starving("starves long outputs", "no limit of its output", lambda req: req.max_device_len - req.prompt_len > LONG),
    _starving("starves a namespace", "another namespace", lambda req: req.namespace == "tenant"),
    _starving("starves sessions", "a session", lambda req: bool(req.session)),
    _starving("starves grammars", "a grammar", lambda req: req.params.grammar is not None),
    _starving("starves prompts by their tokens", "one token", lambda req: int(req.token_ids[0]) > 50_000),
    _dropping("drops prompts of more than 1,000 tokens", lambda req: req.prompt_len > 1000),
    _dropping("drops requests of a session", lambda req: bool(req.session)),
    _dropping("drops requests with a grammar", lambda req: req.params.grammar is not None),
    _of_fcfs("drops requests beyond 100", DropsBeyondAHundred, "test_order_is_a_permutation", says="not a permutation"),
    _of_fcfs("drops requests if more than 8 run", DropsWhenBusy, "test_order_is_a_permutation", says="not a perm"),
    _of_fcfs("takes max_new_tokens to be a number", ReadsALimit, "test_order_is_a_permutation", says="NoneType"),
    _of_fcfs("sleeps", Sleeps, "test_order_does_not_block", [()], "without computing"),
    _of_fcfs("loses a request", Loses, "test_order_is_a_permutation"),
    _of_fcfs("puts one request into the queue twice", Doubles, "test_order_is_a_permutation"),
    _of_fcfs("sorts the scheduler's own queue", SortsTheQueue, "test_order_is_a_permutation"),
    _of_fcfs("raises priorities", Mutates, "test_order_changes_nothing"),
    _of_fcfs("never serves the lowest priority", LosesTheUnimportant, "test_a_finite_stream_is_served"),
    _of_fcfs("lets a request starve behind preferred ones", Starves, "test_patience_is_bounded", [("no advantage",)]),
    _of_fcfs("serves the last first", LastComeFirstServed, "test_equals_are_served_in_order_of_arrival", [()]),
    Mutant("ignores cached prefixes", "test_a_cached_prefix_goes_first", FCFS, LPM),
    Mutant(
        "prefers prefixes that another namespace has cached",
        "test_a_cached_prefix_goes_first",
        suite(MixesTenants, LpmConfig()),
        LPM,
    ),
]
