"""Test when a server collects garbage.

.venv/bin/python -m pytest -q -p no:xdist tests/core/test_server_memory.py
"""

import asyncio
import subprocess
import sys

import pytest

from dovetail.config.server import LimitsSection
from dovetail.server import connections
from dovetail.server.connections import Connection, ConnectionGuard, ConnectionState

DEFERRED = """
import gc
from dovetail.server.memory import collect_if_due, defer_collections

def hold():
    return [[i] for i in range(200_000)]

oldest = []
gc.callbacks.append(lambda phase, info: phase == "stop" and info["generation"] == 2 and oldest.append(info))
collect_if_due()
assert not oldest, "collections were not deferred yet"
hold()
assert oldest, "200,000 objects at the same time cause a collection of the oldest generation"
defer_collections()
oldest.clear()
cycle = []
cycle.append(cycle)
del cycle
kept = hold()
assert not oldest
collect_if_due()
assert len(oldest) == 1
collect_if_due()
assert len(oldest) == 1, "nothing was allocated since"
"""


def test_a_request_of_many_inputs_causes_no_collection_of_all_objects():
    done = subprocess.run([sys.executable, "-c", DEFERRED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_nothing_is_collected_while_an_engine_process_imports():
    program = (
        "import gc, os, sys\n"
        "from dovetail.registry.setup import setup\n"
        "from dovetail.server.engine_process import open_loop\n"
        "config = setup([], env=os.environ, arguments={'model': {'path': 'tiny'}, 'device': 'cpu'})[0]\n"
        "found = []\n"
        "gc.callbacks.append(lambda phase, info: phase == 'start' and found.append('dovetail.engine.engine' in sys.modules))\n"
        "with open_loop(config):\n"
        "    assert found and all(found), found\n"
        "    assert gc.isenabled()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


class Open(Connection):
    unsent = 0


def test_garbage_is_collected_while_no_request_is_answered(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    monkeypatch.setattr(connections, "collect_if_due", lambda: calls.append("collect"))

    async def scenario() -> None:
        guard, connection = ConnectionGuard(LimitsSection()), Open()
        guard.opened(connection)
        for state, collects in ((ConnectionState.ANSWERING, False), (ConnectionState.IDLE, True)):
            guard._enter(connection, state)
            calls.clear()
            for _ in range(5):
                guard._tick()
            assert calls == ["collect"] * 5 * collects, state
        guard.stop()

    asyncio.run(scenario())
