"""Test what prompts find that share prefixes, in models with states, through the scheduler: where snapshots are made decides it.

.venv/bin/python -m pytest -q tests/core/test_state_traffic.py
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from dovetail.constraints.requests import RequestConstraints
from dovetail.constraints.service import GrammarService
from dovetail.interfaces.cache import CacheContext, CacheGroupKind, GroupDescriptor
from dovetail.memory.arena import ArenaAllocator, PageBytes, make_layout
from dovetail.memory.ledger import PageLedger
from dovetail.memory.table import RequestTable
from dovetail.messages import GenerateMsg, TokenOutput
from dovetail.sampling_params import SamplingParams
from dovetail.scheduler.limits import SchedulerLimits
from dovetail.scheduler.scheduler import Scheduler
from dovetail.types import StepResult
from dovetail_cache.config import RadixConfig
from dovetail_cache.radix import RadixCache
from dovetail_policies.config import FcfsConfig
from dovetail_policies.simple import Fcfs

PAGE, PAGE_BYTES, SLOT_BYTES = 16, 1024, 50 * 1024
FULL = GroupDescriptor(num_bytes=PAGE_BYTES)
WINDOW = GroupDescriptor(CacheGroupKind.SLIDING, 1024, num_bytes=PAGE_BYTES)
STATE = GroupDescriptor(CacheGroupKind.STATE, num_bytes=SLOT_BYTES)
MODELS = {"full": (FULL, STATE), "states": (STATE,), "window": (WINDOW, STATE)}


class Service:
    """Hold a scheduler of a model with states, and give it tokens that count up. Memory holds ``units`` pages, of which 50
    are a slot."""

    def __init__(self, model: str, units: int, lag: bool = False, max_running: int = 64, **limits: Any) -> None:
        groups = MODELS[model]
        sizes = [PageBytes(PAGE_BYTES, 512) if group.paged else PageBytes(SLOT_BYTES, 0) for group in groups]
        layout = make_layout(sizes, units * PAGE_BYTES)
        self.cache = RadixCache(RadixConfig(), CacheContext(PAGE, groups))
        table = RequestTable(np.zeros((len(layout.paged), max_running + 1, 1300), np.int32))
        ledger = PageLedger(ArenaAllocator(layout), self.cache, table, PAGE, 0, groups)
        known = {"max_running": max_running, "max_waiting": 10**6, "chunk_size": 2048, "context_len": 20_000}
        settings = SchedulerLimits(**(known | {"vocab_size": 10**6} | limits))
        constraints = RequestConstraints(GrammarService(None), settings.vocab_size, frozenset())
        self.scheduler = Scheduler(settings, ledger, Fcfs(FcfsConfig(), None), constraints, None, frozenset())
        self.lag, self.launched = lag, None
        self.texts: dict[str, list[int]] = {}
        self.found: dict[str, int] = {}
        self.steps = self.cuts = 0

    def add(self, rid: str, prompt: list[int], new: int, **hints: Any) -> None:
        self.texts[rid] = list(prompt)
        self.scheduler.add(
            GenerateMsg(rid, list(prompt), SamplingParams(max_new_tokens=new, ignore_eos=True), 0, **hints)
        )

    def step(self) -> list[str]:
        """Make a step, and return the requests that have ended."""
        plan = self.scheduler.schedule()
        done = self.launched if self.lag else plan
        self.launched = plan
        ended = []
        self.steps += plan is not None
        if plan is not None:  # chunks that end before their prompts do
            self.cuts += plan.num_extend - int(plan.samples[: plan.num_extend].sum())
        tokens = StepResult(np.full((int(done.samples.sum()), 1), 7, np.int64)) if done is not None else None
        for answer in self.scheduler.commit(done, tokens) if done is not None and tokens is not None else ():
            assert isinstance(answer, TokenOutput)
            self.texts[answer.rid] += answer.token_ids
            self.found.setdefault(answer.rid, answer.cached_tokens)
            if answer.finish is not None:
                ended.append(answer.rid)
        return ended

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.has_work and self.launched is None:
                break
            self.step()
        assert not self.scheduler.has_work, "the scheduler does not come to an end"

    def serve(self, prompts: list[list[int]], new: int = 8) -> list[int]:
        """Serve prompts one after the other, and return how many tokens each has found."""
        for number, prompt in enumerate(prompts):
            self.add(str(number), prompt, new)
            self.finish()
        return [self.found[str(number)] for number in range(len(prompts))]

    def close(self) -> None:
        """Assert that nothing is lost."""
        self.scheduler.check_integrity()
        self.scheduler.flush_cache()
        assert not any(self.scheduler.ledger.allocator.num_held)


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 30_000) for _ in range(count)]


def converse(model: str, units: int, sessions: int = 128, turns: int = 6, lag: bool = False) -> tuple[float, int, int]:
    """Let sessions append turns and get answers, of which 8 run at a time; the next turn comes from a random session. Return
    the part of the prompt tokens of all turns but the first that was found, the number of these turns that found more than
    the 1,000 tokens with which all sessions begin, and their number."""
    rng = random.Random(0)
    service = Service(model, units, lag, max_running=8)
    texts = [ids(rng, 1000)] * sessions
    order = [session for session in range(sessions) for _ in range(turns)]
    rng.shuffle(order)
    begun, active = [0] * sessions, dict[str, int]()
    lengths: dict[str, int] = {}
    while order or active:
        while len(active) < 8 and (ready := [s for s in order[:32] if s not in active.values()]):
            order.remove(ready[0])
            rid = f"{ready[0]}.{begun[ready[0]]}"
            begun[ready[0]] += 1
            active[rid] = ready[0]
            prompt = [*texts[ready[0]], *ids(rng, rng.randint(150, 400))]
            lengths[rid] = len(prompt)
            service.add(rid, prompt, rng.randint(30, 200))
        for rid in service.step():
            texts[active.pop(rid)] = service.texts[rid]
    service.finish()
    service.close()
    later = [rid for rid in lengths if not rid.endswith(".0")]
    found = sum(service.found[rid] for rid in later) / sum(lengths[rid] for rid in later)
    return found, sum(service.found[rid] > 1000 for rid in later), len(later)


@pytest.mark.parametrize(
    ("model", "units", "least", "all_but"),
    [
        ("states", 8_000, 0.86, 0),
        ("full", 24_000, 0.84, 30),
        pytest.param("window", 24_000, 0.86, 0, marks=pytest.mark.full),
    ],
)
def test_sessions_that_append_turns(model: str, units: int, least: float, all_but: int) -> None:
    """In memory that does not hold all that 128 sessions have computed, turns resume near the end of the answer before. 0.865
    is all that can be found."""
    rate, found, possible = converse(model, units, lag=True)
    assert rate >= least
    assert found >= possible - all_but


def test_windows_of_the_last_snapshots_stay() -> None:
    """The next turn resumes at the last snapshot of a text, so the window before it stays where memory holds those of all
    sessions, but not all that they have computed."""
    _, found, possible = converse("window", 4_000, sessions=20, turns=4, lag=True)
    assert found == possible


@pytest.mark.parametrize("model", MODELS)
def test_answers_longer_than_a_window_are_found(model: str) -> None:
    """A request keeps the window before its tail while it generates, so that the next turn resumes there."""
    rng = random.Random(0)
    service = Service(model, 24_000, lag=True)
    for number in range(4):
        service.add(f"{number}.0", ids(rng, 200), 1100 + 97 * number)
        service.finish()
        text = service.texts[f"{number}.0"]
        service.add(f"{number}.1", [*text, *ids(rng, 50)], 2)
        service.finish()
        assert len(text) - service.found[f"{number}.1"] <= 128 + PAGE
    service.close()


def varying(together: bool, **limits: Any) -> tuple[list[float], Service]:
    """Serve a prompt of 1,700 tokens, then 64 that share 1,400 to 1,600 tokens with it. Return the part of what it shares that
    each of these found."""
    rng = random.Random(1500)
    base = ids(rng, 1700)
    shared = [rng.randint(1400, 1600) for _ in range(64)]
    service = Service("full", 40_000, lag=together, **limits)
    service.serve([base])
    for number, length in enumerate(shared):
        service.add(f"x{number}", [*base[:length], *[40_000 + rng.randrange(1000) for _ in range(200)]], 8)
        if not together:
            service.finish()
    service.finish()
    return [service.found[f"x{number}"] / length for number, length in enumerate(shared)], service


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_prefixes_that_vary_are_found(together: bool) -> None:
    """A snapshot in the middle serves the first that branches; those at junctions serve the others. Few snapshots suffice, and
    few steps more than without any."""
    found, service = varying(together)
    assert min(found) > 0.5
    assert sum(part > 0.9 for part in found) >= 60
    assert sum(found) / len(found) > 0.94
    assert service.cuts <= 16
    service.close()


def test_short_prompts_are_not_cut() -> None:
    """A prompt of 400 tokens takes one step, and one of 1,000 tokens two."""
    rng = random.Random(0)
    service = Service("full", 4_000)
    for length, steps in ((30, 1), (400, 1), (500, 1), (1000, 2), (1700, 3)):
        service.steps = 0
        service.add(str(length), ids(rng, length), 1)
        service.finish()
        assert service.steps == steps, length
    service.close()


def test_prompts_that_share_a_short_prefix() -> None:
    """The second of the prompts that share 100 tokens makes the snapshot from which the others resume."""
    rng = random.Random(0)
    service, common = Service("full", 40_000), ids(rng, 100)
    assert service.serve([[*common, *ids(rng, 300)] for _ in range(20)]) == [0, 0] + [96] * 18
    service.close()


def test_states_within_prompts_cost_no_step() -> None:
    """Prompts are one step if it has space for them. The states that are kept within them are found."""
    rng = random.Random(0)
    service = Service("full", 20_000, chunk_size=8192, state_chunk=64)
    for length, steps in ((30, 1), (1000, 1), (1700, 1), (8192, 1), (9000, 2)):
        service.steps, prompt = 0, ids(rng, length)
        service.add(str(length), prompt, 1)
        service.finish()
        assert service.steps == steps, length
        if length > 500:
            service.add(f"{length} again", prompt, 1)
            service.finish()
            assert length - 80 < service.found[f"{length} again"] < length
            service.add(f"{length} in part", [*prompt[: length * 3 // 5], *ids(rng, 50)], 1)
            service.finish()
            assert length < 1100 or service.found[f"{length} in part"] > length * 2 // 5
    service.close()


def test_prefixes_that_vary_are_found_with_states_within_prompts() -> None:
    found, service = varying(together=False, state_chunk=64)
    assert min(found) > 0.5
    assert sum(found) / len(found) > 0.93
    assert service.cuts <= 16
    service.close()
