"""Test which adapters (LoRA) get the slots on the device.

.venv/bin/python -m pytest -q tests/core/test_adapter_slots.py
"""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import RequestError
from dovetail.scheduler.adapters import AdapterTable


def table_of(slots, *names):
    table = AdapterTable(slots)
    return table, [table.add(name, f"/{name}") for name in names]


def request(table, name, namespace=""):
    req = SimpleNamespace(adapter=None, namespace=namespace)
    table.attach(req, name)
    req.adapter.requests += 1
    return req


def start(table, req):
    assert table.may_run(req)
    table.entered(req)


def end(req):
    req.adapter.running -= 1
    req.adapter.requests -= 1


def test_the_adapter_that_was_used_least_recently_gives_way():
    table, (a, b, c) = table_of(2, "a", "b", "c")
    for adapter in (a, b):
        table.take_slot(adapter)
    first = request(table, "a")
    start(table, first)
    end(first)
    assert table.take_slot(c) == 2
    assert (a.slot, b.slot, c.slot) == (1, 0, 2)


def test_an_adapter_of_running_requests_stays_and_its_slot_is_reserved_for_one_that_waits():
    table, (a, b) = table_of(1, "a", "b")
    table.take_slot(a)
    running = request(table, "a")
    start(table, running)
    waits = request(table, "b")
    assert not table.may_run(waits)
    assert [*table.wanted.values()] == [b]
    assert not table.has_place(b)
    assert not table.may_run(request(table, "a")), "later requests of the adapter wait, so that the other gets its turn"
    end(running)
    assert table.has_place(b)
    assert table.take_slot(b) == 1
    start(table, waits)
    assert (a.slot, table.wanted) == (0, {})


def test_versions_have_namespaces_of_their_own():
    table, (a,) = table_of(1, "a")
    before = request(table, "a", "tenant")
    assert table.register(table.new("a", "/other")) is a
    after = request(table, "a", "tenant")
    assert before.adapter is a
    assert a.retired
    assert before.namespace != after.namespace
    assert {before.namespace, after.namespace} & {"tenant", ""} == set()


def test_an_adapter_that_is_not_known_is_read_from_the_directory_that_a_request_names():
    table, _ = table_of(1)
    with pytest.raises(RequestError, match="model names the adapter 'a', which the engine does not know"):
        table.attach(SimpleNamespace(adapter=None, namespace=""), "a")
    req = SimpleNamespace(adapter=None, namespace="")
    table.attach(req, "a", "/a")
    assert table.known["a"] is req.adapter
    with pytest.raises(RequestError, match="engine does not know"):
        AdapterTable(0).attach(req, "a", "/a")


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60), st.integers(1, 3))
def test_every_request_runs_at_last_and_no_slot_is_taken_from_a_running_one(events, slots):
    table, adapters = table_of(slots, *"abcde")
    waiting, running = [], []
    for index, ends in events:
        waiting.append(request(table, "abcde"[index]))
        if ends and running:
            end(running.pop(0))
        step(table, waiting, running, adapters, slots)
    for _ in range(3 * len(events) + 1):
        if running:
            end(running.pop(0))
        step(table, waiting, running, adapters, slots)
    assert not waiting


def step(table, waiting, running, adapters, slots):
    """Admit what may run, in order, and bring adapters that are wanted to free slots."""
    for req in [*waiting]:
        if table.may_run(req):
            table.entered(req)
            waiting.remove(req)
            running.append(req)
    for adapter in [*table.wanted.values()][:slots]:
        if table.has_place(adapter):
            table.take_slot(adapter)
    resident = [adapter for adapter in table.slots if adapter is not None]
    assert len({adapter.key for adapter in resident}) == len(resident)
    assert all(table.slots[adapter.slot - 1] is adapter for adapter in resident)
    for adapter in adapters:
        assert adapter.running == sum(req.adapter is adapter for req in running)
        assert adapter.slot or not adapter.running
