"""Test the request table: the device receives what the host has written, in that order.

.venv/bin/python -m pytest -q tests/core/test_request_table.py
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.memory.table import RequestTable

SLOTS, COLUMNS = 4, 12

run = st.tuples(
    st.just("run"), st.integers(1, SLOTS), st.integers(0, COLUMNS - 1), st.integers(1, COLUMNS), st.just(())
)
each = st.tuples(
    st.just("each"),
    st.just(0),
    st.just(0),
    st.just(0),
    st.permutations(range(1, SLOTS + 1)).map(lambda s: tuple(s[:3])),
)
step = st.tuples(st.sampled_from(["step", "failed step"]), st.just(0), st.just(0), st.just(0), st.just(()))


class Device:
    """Hold the page table as kernels see it: one entry after another."""

    def __init__(self, groups):
        self.pages = np.zeros((groups, SLOTS + 1, COLUMNS), np.int32)

    def take(self, updates):
        for i, (slot, column) in enumerate(zip(updates.slots, updates.columns, strict=True)):
            self.pages[:, slot, column] = updates.pages[:, i]


@pytest.mark.parametrize("groups", [1, 2])
@given(ops=st.lists(st.one_of(run, each, step), max_size=30))
def test_the_device_follows_the_host(groups, ops):
    """This includes entries that are written twice, and steps whose updates never reached the device."""
    memory = np.zeros((groups, SLOTS + 1, COLUMNS), np.int32)
    table, device, fresh = RequestTable(memory), Device(groups), iter(range(1, 10_000))

    def pages(count):
        return np.array([[next(fresh) for _ in range(count)] for _ in range(groups)], np.int32)

    for what, slot, column, count, slots in ops:
        if what == "run":
            table.write(slot, column, pages(min(count, COLUMNS - column)))
        elif what == "each":
            table.write_each(slots, [(3 * s) % COLUMNS for s in slots], pages(len(slots)))
        elif what == "step":
            ahead, updates = table.next_updates(), table.take_updates()
            assert updates is ahead
            device.take(updates)
            assert (device.pages == memory).all()
        else:
            table.put_back(table.take_updates())
    device.take(table.take_updates())
    assert (device.pages == memory).all()
    assert table.pages is memory
    assert len(table.take_updates().slots) == 0


def test_updates_are_int32_whatever_was_written():
    table = RequestTable(np.zeros((1, SLOTS + 1, COLUMNS), np.int32))
    table.write(1, 0, np.ones((1, 3), np.int32))
    table.write_each([2], [5], np.ones((1, 1), np.int32))
    assert {array.dtype for array in table.take_updates()[:3]} == {np.dtype(np.int32)}
