"""Test that errors of an executor end what they must.

.venv/bin/python -m pytest -q tests/core/test_verbs.py
"""

from types import SimpleNamespace

import pytest

from dovetail.errors import EngineDeadError, RankLostError
from dovetail.loop.drafter_guard import DrafterGuard
from dovetail.loop.failures import FailureHandler
from dovetail.loop.verbs import Verbs

INFO = SimpleNamespace(observes=True)


def test_a_rank_that_is_lost_while_pages_are_reserved_ahead_is_a_lost_device():
    def locate_updates(updates):
        raise RankLostError("rank 1 is gone")

    executor = SimpleNamespace(locate_updates=locate_updates, lost=str, info=INFO)
    scheduler = SimpleNamespace(reserve_ahead=lambda: None)
    failures = FailureHandler(None, executor, scheduler)
    verbs = Verbs(scheduler, executor, failures, DrafterGuard(executor, scheduler, failures))
    with pytest.raises(EngineDeadError, match="the device was lost: rank 1 is gone"):
        failures.run(verbs.reserve_ahead)


def test_requests_are_forgotten_before_the_plan_that_admits_them_again_is_launched():
    """A request can be retracted and admitted again by one call of ``schedule``."""
    events, gone = [], ["request 3"]
    plan = SimpleNamespace(number=1)
    executor = SimpleNamespace(
        forget=lambda departed: events.append(("forget", *departed)),
        launch=lambda plan: events.append(("launch",)),
        info=INFO,
    )
    scheduler = SimpleNamespace(
        schedule=lambda: plan,
        take_departed=lambda: [gone.pop()] if gone else [],
        has_work=True,
        limits=SimpleNamespace(draft_width=2),
    )
    failures = FailureHandler(None, executor, scheduler)
    verbs = Verbs(scheduler, executor, failures, DrafterGuard(executor, scheduler, failures))
    assert verbs.schedule() is plan
    assert verbs.launch(plan) is None
    assert events == [("forget", "request 3"), ("launch",)]


def test_an_error_of_the_engine_outside_of_a_step_is_not_one_of_the_scheduler():
    def locate_updates(updates):
        raise RuntimeError("out of luck\nand more lines")

    executor = SimpleNamespace(locate_updates=locate_updates, lost=lambda error: None, info=INFO)
    scheduler = SimpleNamespace(reserve_ahead=lambda: None)
    failures = FailureHandler(None, executor, scheduler)
    verbs = Verbs(scheduler, executor, failures, DrafterGuard(executor, scheduler, failures))
    said = "the engine failed while it prepared page updates: RuntimeError: out of luck; the engine cannot go on"
    for call in (verbs.reserve_ahead, lambda: failures.run(int), lambda: failures.run_engine(int, "later")):
        with pytest.raises(EngineDeadError, match=said):
            failures.run(call)


def test_a_forward_pass_that_fails_is_taken_back_and_one_that_ran_is_not():
    taken = []
    for launch, sample in ((RuntimeError, None), (None, RuntimeError)):
        executor = SimpleNamespace(launch=_raising(launch), sample=_raising(sample), mask_buffer=None, info=INFO)
        scheduler = SimpleNamespace(take_back=taken.append)
        verbs = Verbs(scheduler, executor, None, None)
        plan = SimpleNamespace(number=len(taken), constrained=False)
        assert isinstance(verbs.forward(plan).error, RuntimeError)
    assert [plan.number for plan in taken] == [0]


def _raising(error):
    def call(*_):
        if error is not None:
            raise error

    return call
