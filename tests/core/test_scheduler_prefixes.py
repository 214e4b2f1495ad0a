"""Test that prefixes are computed once: hit rates of whole workloads on a pretended device reach what is possible.

.venv/bin/python -m pytest -q tests/core/test_scheduler_prefixes.py
"""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.constraints.requests import RequestConstraints
from dovetail.constraints.service import GrammarService
from dovetail.interfaces.cache import CacheContext
from dovetail.memory.allocator import PageAllocator
from dovetail.memory.ledger import PageLedger
from dovetail.memory.table import RequestTable
from dovetail.messages import GenerateMsg
from dovetail.sampling_params import SamplingParams
from dovetail.scheduler.limits import SchedulerLimits
from dovetail.scheduler.scheduler import Scheduler
from dovetail.scheduler.waits import PrefixWaits
from dovetail.types import Req, StepResult
from dovetail_cache.config import RadixConfig
from dovetail_cache.radix import RadixCache
from dovetail_policies.config import FcfsConfig
from dovetail_policies.simple import Fcfs

sys.path.insert(0, str(Path(__file__).parent))
from pretended import reqs_of

PAGE, CHUNK = 16, 8192
each_lag = pytest.mark.parametrize("lag", [False, True], ids=["at-once", "one-step-late"])


class Service:
    """Hold a scheduler and serve it tokens that are all 1, committed at once or one step late."""

    def __init__(self, lag, num_pages=1 << 17, max_running=512, **limits):
        settings = {"max_running": max_running, "max_waiting": 10**6, "chunk_size": CHUNK, "context_len": 40_000}
        cache = RadixCache(RadixConfig(), CacheContext(PAGE))
        ledger = PageLedger(
            PageAllocator(num_pages), cache, RequestTable(np.zeros((1, max_running + 1, 2500), np.int32)), PAGE
        )
        policy = Fcfs(FcfsConfig(), None)
        limits = SchedulerLimits(**(settings | {"vocab_size": 40_000} | limits))
        constraints = RequestConstraints(GrammarService(None), limits.vocab_size, [])
        self.scheduler = Scheduler(limits, ledger, policy, constraints, None, frozenset())
        self.lag, self.launched = lag, None
        self.texts, self.rids = {}, []
        self.computed = 0

    def add(self, rid, prompt, new):
        self.texts[rid] = list(prompt)
        self.scheduler.add(GenerateMsg(rid, list(prompt), SamplingParams(max_new_tokens=new, ignore_eos=True), 0))

    def step(self):
        """Make a step. Return its plan; ``rids`` are the ids of its rows then."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.computed += int(plan.extend_lens[: plan.num_extend].sum())
            self.rids = [r.rid for r in reqs_of(self.scheduler, plan)]
        done = self.launched if self.lag else plan
        self.launched = plan
        for answer in self.scheduler.commit(done, self.tokens(done)) if done is not None else ():
            self.texts[answer.rid] += answer.token_ids
        return plan

    @staticmethod
    def tokens(plan):
        return StepResult(np.ones((int(plan.samples.sum()), 1), np.int64))

    def finish(self, bound=20_000):
        for _ in range(bound):
            if not self.scheduler.has_work:
                return
            assert self.step() is not None or self.launched is not None or self.lag, (
                "nothing runs, and nothing can be scheduled"
            )
        raise AssertionError("the scheduler does not come to an end")

    @property
    def hit_rate(self):
        totals = self.scheduler.totals
        return totals.cached_tokens / totals.prompt_tokens


def ids(rng, count):
    return [rng.randrange(1000, 30_000) for _ in range(count)]


@each_lag
def test_groups_of_questions_compute_each_prefix_once(lag):
    rng = random.Random(0)
    service = Service(lag)
    asked = [[*prefix, *ids(rng, 128)] for prefix in [ids(rng, 2048) for _ in range(32)] for _ in range(16)]
    rng.shuffle(asked)
    for i, prompt in enumerate(asked):
        service.add(str(i), prompt, 4)
    service.finish()
    assert service.computed == 32 * 2048 + 512 * 128
    assert service.hit_rate == 15 * 2048 / (16 * 2176)  # 0.882


@each_lag
def test_conversations_compute_each_turn_once(lag):
    rng = random.Random(0)
    service = Service(lag)
    system = ids(rng, 1024)
    texts = [system] * 32
    computed = 0
    for turn in range(6):
        for i, text in enumerate(texts):
            service.add(f"{turn}.{i}", [*text, *ids(rng, 64)], 96)
        service.finish()
        texts = [service.texts[f"{turn}.{i}"] for i in range(32)]
        assert {len(text) for text in texts} == {1024 + (turn + 1) * 160}
        # the last token of an answer never entered a step: its page is not cached
        computed += 32 * (64 + PAGE) if turn else 1024 + 32 * 64
        assert service.computed == computed
    assert round(service.hit_rate, 3) == 0.944


def req_of(uid, tokens, namespace=""):
    req = Req(str(uid), np.array(tokens, np.int32), len(tokens), SamplingParams(), uid=uid, namespace=namespace)
    req.device_len = req.known_len = len(tokens)
    return req


def test_a_wait_ends_when_what_is_shared_is_there():
    """The wait does not last until the whole prompt of the other request is computed; after that only a longer prefix
    is waited for."""
    rng = random.Random(0)
    shared = ids(rng, 500)
    other, longer = req_of(0, [*shared, *ids(rng, 2000)]), req_of(1, [*shared, *[5] * 100])
    req = req_of(2, [*shared, *[5] * 50, 6])
    waits = PrefixWaits(PAGE)
    waits.begin([other])
    assert waits.start_waiting(req, 0)
    for pages in range(500 // PAGE):
        other.shared_pages = pages
        waits.begin([other])
        assert waits.is_waiting(req)
    other.shared_pages = 500 // PAGE
    assert not waits.is_waiting(req)
    assert not waits.start_waiting(req, 496)
    waits.add(longer)
    assert waits.start_waiting(req, 496)
    waits.begin([other])
    assert not waits.is_waiting(req), "the request that it waits for has ended"


def test_a_wait_needs_the_same_beginning_and_a_whole_page_more():
    rng = random.Random(0)
    text = ids(rng, 1024)
    changed = [*text]
    changed[3] += 1
    others = [req_of(0, changed), req_of(1, text, "tenant"), req_of(2, text[: 512 + PAGE - 1])]
    waits = PrefixWaits(PAGE)
    waits.begin(others)
    assert not waits.start_waiting(req_of(3, text), 512)
    assert not waits.start_waiting(req_of(3, text[: 496 + PAGE]), 496), "the logits of the last token are needed"
    assert waits.start_waiting(req_of(3, text[: 496 + PAGE + 1]), 496)


def test_no_request_waits_for_a_page_whose_next_token_differs():
    rng = random.Random(0)
    shared = ids(rng, 512)
    other, req = req_of(0, [*shared, 5, *ids(rng, 2000)]), req_of(1, [*shared, 6, 7])
    for ahead, most in ((0, 32), (1, 31)):
        waits = PrefixWaits(PAGE, ahead=ahead)
        waits.begin([other])
        assert not waits.start_waiting(req, most * PAGE)
        assert waits.start_waiting(req, (most - 1) * PAGE)
        other.shared_pages = most - 1
        assert waits.is_waiting(req)
        other.shared_pages = most
        assert not waits.is_waiting(req)


@each_lag
def test_others_go_first_while_a_request_waits(lag):
    """The chunk is filled with requests behind the waiting ones, which enter as soon as their prefix is computed."""
    rng = random.Random(0)
    service = Service(lag, chunk_size=1024)
    shared = ids(rng, 512)
    for rid in ("first", "same-a", "same-b"):
        service.add(rid, [*shared, *ids(rng, 32)], 4)
    service.add("other", ids(rng, 300), 4)
    assert service.step() is not None
    assert service.rids == ["first", "other"]
    assert [r.rid for r in service.scheduler.waiting] == ["same-a", "same-b"]
    entered = []
    for _ in range(2):
        plan = service.step()
        entered += service.rids[: plan.num_extend]
    assert entered == ["same-a", "same-b"]


@each_lag
@pytest.mark.parametrize("end", ["abort", "fail"])
def test_a_waiting_request_goes_on_when_the_other_ends(lag, end):
    rng = random.Random(0)
    service = Service(lag, chunk_size=1024)
    shared = ids(rng, 512)
    for rid in "ab":
        service.add(rid, [*shared, *ids(rng, 32)], 4)
    if end == "abort":
        service.step()
        assert service.rids == ["a"]
        service.scheduler.abort("a", "")
    else:
        plan = service.step() if lag else service.scheduler.schedule()
        assert [r.rid for r in reqs_of(service.scheduler, plan)] == ["a"]
        service.scheduler.fail(plan, "")
        service.launched = None
    service.finish()
    assert len(service.texts["b"]) == 512 + 32 + 4


def test_a_request_that_leaves_while_it_waits_is_forgotten():
    service = Service(False, chunk_size=1024)
    for rid in "ab":
        service.add(rid, [7] * 512, 4)
    service.step()
    assert len(service.scheduler._admission._waits[0]._waits) == 1
    service.scheduler.abort("b", "")
    assert service.scheduler._admission._waits[0]._waits == {}


@each_lag
@pytest.mark.parametrize("num_pages", [1 << 17, 200], ids=["much-memory", "little-memory"])
def test_no_request_waits_for_ever(lag, num_pages):
    """New requests with ever longer parts of its prompt do not keep the oldest one waiting, whatever is evicted
    meanwhile."""
    rng = random.Random(0)
    service = Service(lag, num_pages, chunk_size=64)
    text = ids(rng, 1024)
    service.add("rival", [*text[:80], *ids(rng, 64)], 4)
    service.add("oldest", text, 4)
    oldest = service.scheduler.waiting[-1]
    for step in range(300):
        if oldest.finish is not None:
            break
        length = 80 + 16 * (step % 60)
        service.add(f"n{step}", [*text[:length], *ids(rng, 40)], 4)
        service.step()
    assert oldest.finish is not None, "the oldest request has starved"
    service.finish()


def test_a_queue_that_waits_is_not_compared_again():
    """199 requests wait for one prompt: each is matched once when it starts to wait and once when it is admitted."""
    rng = random.Random(0)
    service = Service(False, chunk_size=1024 + 2 * 16)
    prefix = ids(rng, 1024)
    for i in range(200):
        service.add(str(i), [*prefix, *ids(rng, 16)], 2)
    cache = service.scheduler.ledger.cache
    asked, match = [0], cache.match

    def counted(*args):
        asked[0] += 1
        return match(*args)

    cache.match = counted
    service.finish()
    assert service.computed == 1024 + 200 * 16
    assert asked[0] <= 2 * 200 + 5
