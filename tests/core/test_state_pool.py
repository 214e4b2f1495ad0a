"""Test the pool of states.

Run: python -m pytest tests/core/test_state_pool.py
"""

from __future__ import annotations

import torch

from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.memory.state_pool import StatePool, bytes_per_slot

CONV, RULE = StateShape((6, 3)), StateShape((2, 4, 5), torch.float32)
LAYERS = [(CONV, RULE), (StateShape((7,)),), (CONV, RULE)]


def test_every_layer_has_contiguous_states_of_its_own() -> None:
    pool = StatePool(LAYERS, 4, torch.bfloat16)
    assert [[tuple(state.shape[1:]) for state in layer] for layer in pool.memory] == [
        [(6, 3), (2, 4, 5)],
        [(7,)],
        [(6, 3), (2, 4, 5)],
    ]
    states = [state for layer in pool.memory for state in layer]
    assert [state.dtype for state in states] == [torch.bfloat16, torch.float32] + [torch.bfloat16] * 2 + [torch.float32]
    assert all(state.is_contiguous() and not state.any() for state in states)
    for number, state in enumerate(states):
        state.fill_(number)
    assert all((state == number).all() for number, state in enumerate(states))


def test_a_copy_reads_all_slots_before_it_writes_any() -> None:
    pool = StatePool(LAYERS, 5, torch.float32)
    for layer in pool.memory:
        for state in layer:
            state.copy_(torch.randn_like(state))
    before = [[state.clone() for state in layer] for layer in pool.memory]
    pool.copy(torch.tensor([1, 2, 1]), torch.tensor([2, 1, 4]))
    for layer, old in zip(pool.memory, before, strict=True):
        for state, was in zip(layer, old, strict=True):
            assert torch.equal(state, was[[0, 2, 1, 3, 1]])


def test_the_bytes_of_a_slot_are_those_of_the_pool() -> None:
    pool = StatePool(LAYERS, 3, torch.bfloat16)
    allocated = sum(state.numel() * state.itemsize for layer in pool.memory for state in layer)
    assert bytes_per_slot(LAYERS, torch.bfloat16) * 3 == allocated == 3 * (2 * (36 + 160) + 14)


def test_a_fill_reaches_every_state() -> None:
    pool = StatePool(LAYERS, 3, torch.float32)
    pool.fill(float("nan"))
    assert all(state.isnan().all() for layer in pool.memory for state in layer)
