"""Test that errors of an executor end what they must.

.venv/bin/python -m pytest -q tests/core/test_verbs.py
"""

from types import SimpleNamespace

import pytest

from dovetail.errors import EngineDeadError, RankLostError
from dovetail.loop.failures import FailureHandler
from dovetail.loop.verbs import Verbs


def test_a_rank_that_is_lost_while_pages_are_reserved_ahead_is_a_lost_device():
    def locate_updates(updates):
        raise RankLostError("rank 1 is gone")

    executor = SimpleNamespace(locate_updates=locate_updates, lost=str)
    scheduler = SimpleNamespace(reserve_ahead=lambda: None)
    failures = FailureHandler(None, executor, scheduler)
    verbs = Verbs(scheduler, executor, failures)
    with pytest.raises(EngineDeadError, match="the device was lost: rank 1 is gone"):
        failures.run(verbs.reserve_ahead)
