"""Test in which captured decode steps a batch may run.

.venv/bin/python -m pytest -q tests/core/test_graph_keys.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.engine.graph_keys import GraphKey, GraphKeys
from dovetail.ops.adapter_weights import AdapterCount
from dovetail.ops.low_rank import FEW_SLOTS, ONE_ROWS, SEVERAL_SLOTS, adapter_count
from dovetail.ops.triton.tuning import MAX_ROWS

NONE, ONE, FEW, SEVERAL, MANY = AdapterCount
SIZES = [1, 8, 64, MAX_ROWS, 2 * MAX_ROWS]
ADAPTERS: Any = SimpleNamespace(count=lambda batch: adapter_count(len({*batch.adapters} - {0})))


def batch_of(rows: int, adapters: int = 0, **given: Any) -> Any:
    """Return a batch whose rows have this number of different adapters; if there are more rows, some have none."""
    own = (np.arange(rows) + (adapters == rows)) % (adapters + 1) if adapters else None
    return SimpleNamespace(slots=np.zeros(rows), adapters=own, variant=0, shared=None, **given)


def keys(adapters: Any = ADAPTERS) -> GraphKeys:
    return GraphKeys(SIZES, shared=[0], adapters=adapters, own=None, has_variant=lambda variant, rows: True)


@pytest.mark.parametrize(
    ("rows", "adapters", "key"),
    [
        (3, 0, GraphKey(8, False)),
        (3, 1, GraphKey(8, False, adapters=ONE)),
        (ONE_ROWS, 1, GraphKey(64, False, adapters=ONE)),
        (ONE_ROWS + 1, 1, GraphKey(MAX_ROWS, False, adapters=FEW)),
        (3, 2, GraphKey(8, False, adapters=FEW)),
        (60, FEW_SLOTS, GraphKey(64, False, adapters=FEW)),
        (60, FEW_SLOTS + 1, GraphKey(64, False, adapters=SEVERAL)),
        (60, SEVERAL_SLOTS + 1, GraphKey(64, False, adapters=MANY)),
        (MAX_ROWS, FEW_SLOTS + 1, GraphKey(MAX_ROWS, False, adapters=MANY)),
        (MAX_ROWS + 1, 0, GraphKey(2 * MAX_ROWS, False)),
        (MAX_ROWS + 1, 1, GraphKey(2 * MAX_ROWS, False, adapters=MANY)),
        (2 * MAX_ROWS + 1, 0, None),
    ],
)
def test_a_batch_runs_in_the_smallest_graph_of_its_number_of_adapters(rows, adapters, key):
    assert keys().key_for(batch_of(rows, adapters)) == key


def test_a_batch_with_adapters_runs_in_no_graph_that_has_none():
    assert keys(None).key_for(batch_of(3, 1)) is None


def test_graphs_of_many_adapters_hold_few_ones_too_and_the_reverse_is_false():
    """More rows cost less than the kernels for more adapters."""
    assert [*keys().larger(GraphKey(64, False, adapters=ONE))] == [
        GraphKey(MAX_ROWS, False, adapters=FEW),
        GraphKey(64, False, adapters=FEW),
        GraphKey(64, False, adapters=SEVERAL),
        GraphKey(MAX_ROWS, False, adapters=MANY),
        GraphKey(64, False, adapters=MANY),
    ]
    assert [*keys().larger(GraphKey(64, False, adapters=FEW))] == [
        GraphKey(MAX_ROWS, False, adapters=FEW),
        GraphKey(64, False, adapters=SEVERAL),
        GraphKey(MAX_ROWS, False, adapters=MANY),
        GraphKey(64, False, adapters=MANY),
    ]
    assert [*keys().larger(GraphKey(64, False, adapters=SEVERAL))] == [
        GraphKey(MAX_ROWS, False, adapters=MANY),
        GraphKey(64, False, adapters=MANY),
    ]
    assert [*keys().larger(GraphKey(64, False, adapters=MANY))] == [GraphKey(MAX_ROWS, False, adapters=MANY)]
    assert [*keys().larger(GraphKey(64, False))] == [GraphKey(MAX_ROWS, False)]


def test_what_has_occurred_is_captured_once_for_each_number_of_rows():
    given = keys()
    plain = [GraphKey(rows, False) for rows in SIZES]
    assert [*given.possible()] == plain
    given.key_for(batch_of(1, 1))
    counts = {rows: ONE if rows <= ONE_ROWS else FEW if rows <= MAX_ROWS else MANY for rows in SIZES}
    one = [GraphKey(rows, False, adapters=count) for rows, count in counts.items()]
    assert [*given.possible()] == plain + one
    given.key_for(batch_of(MAX_ROWS, SEVERAL_SLOTS + 1))
    many = [GraphKey(rows, False, adapters=MANY) for rows in SIZES if rows <= MAX_ROWS]
    assert [*given.possible()] == plain + one + many, "products of more rows have one kernel for any number of adapters"


def test_graphs_have_only_the_variants_that_batches_of_their_numbers_of_rows_can_have():
    """A graph of 8 rows serves 2 rows too, and one of 64 rows serves at least 9."""
    given = GraphKeys(SIZES, shared=[0], adapters=None, own=None, has_variant=lambda variant, rows: rows <= 2)
    batch = batch_of(2)
    batch.variant = 1
    assert given.key_for(batch) == GraphKey(8, False, 1)
    plain = [GraphKey(rows, False) for rows in SIZES]
    assert [*given.possible()] == [*plain, GraphKey(1, False, 1), GraphKey(8, False, 1)]
