"""Test the stores of states that a KV store makes: a part of ``KVStoreSuite``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.interfaces.store import SLOT_ALIGNMENT, StateStore
from dovetail.testing.store_checks import StoreChecks, check_refused

RULE = StateShape((2, 4, 5), "float32")
STATES = (StateShape((6, 3)), RULE, StateShape((7,)), StateShape((2, 3), "bfloat16"), RULE)
GROUP = CacheGroup.of_states(3, STATES)
NUM_SLOTS = 5
MODEL_DTYPES = (torch.float32, torch.bfloat16)


class StateStoreCases(StoreChecks):
    """Test the states of a store that offers ``store.state``."""

    def states(
        self, model_dtype: torch.dtype = torch.bfloat16, more: int = 0, seed: int = 0, group: CacheGroup = GROUP
    ) -> tuple[StateStore, torch.Tensor]:
        """Return a store of states full of random bits, and its memory, whose slots are ``more`` bytes farther apart than
        they need to be. Skips if states are not offered."""
        self.require(Feature.STORE_STATE)
        factory = self.factory(model_dtype=model_dtype)
        random = torch.Generator().manual_seed(seed)
        shape = (NUM_SLOTS, factory.slot_bytes(group) + more)
        memory = torch.randint(256, shape, generator=random, dtype=torch.uint8).to(self.device)
        return factory.make_states(group, memory), memory

    def index(self, *slots: int) -> torch.Tensor:
        """Return ``slots`` as the engine passes them to ``copy``."""
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def test_states_are_in_the_slots_of_their_memory(self) -> None:
        """Each layer has its states, in the dtypes that their shapes name, else in that of the model, at addresses that stay.
        They are in the bytes of their slots, and no two share a byte."""
        for model_dtype in MODEL_DTYPES:
            store, memory = self.states(model_dtype, more=4 * SLOT_ALIGNMENT)
            size = self.factory(model_dtype=model_dtype).slot_bytes(GROUP)
            assert size % SLOT_ALIGNMENT == 0, "slots are aligned"
            assert (store.group, store.num_slots, store.device) == (GROUP, NUM_SLOTS, memory.device)
            named = [model_dtype, torch.float32, model_dtype, torch.bfloat16, torch.float32]
            assert len(store.memory) == GROUP.num_layers
            for states, again in zip(store.memory, store.memory, strict=True):
                assert [tuple(state.shape) for state in states] == [(NUM_SLOTS, *shape.shape) for shape in STATES]
                assert [state.dtype for state in states] == named
                assert all(state[1].is_contiguous() for state in states)
                assert [state.data_ptr() for state in states] == [state.data_ptr() for state in again]
            rest = memory[:, size:].clone()
            numbered = [(state[slot], slot, number) for number, (state, slot) in enumerate(_places(store))]
            for state, _, number in numbered:
                state.fill_(number)
            assert all((state == number).all() for state, _, number in numbered), "states share bytes"
            assert memory[:, size:].equal(rest), "a state is written behind its slot"
            memory[1:3] = 0
            assert all((state == 0).all() for own in _flat(store) for state in own[1:3]), "slots are rows of the memory"
            assert all((state == number).all() for state, slot, number in numbered if slot not in (1, 2)), (
                "other slots change"
            )

    def test_restored_snapshots_have_equal_bits(self) -> None:
        """A copy to another slot and back restores the states of all layers bit for bit, whatever has become of the first one
        since. A copy reads all before it writes any; other slots stay."""
        for model_dtype in MODEL_DTYPES:
            store, _ = self.states(model_dtype, more=SLOT_ALIGNMENT)
            before = _bits(store)
            store.copy(self.index(1), self.index(3))
            store.fill(7.0, [1])
            store.copy(self.index(3), self.index(1))
            assert _same(store, before, [0, 1, 2, 1, 4])
            store.copy(self.index(1, 2, 1), self.index(2, 1, 4))
            assert _same(store, before, [0, 2, 1, 1, 1])

    def test_exported_slots_have_equal_bits(self) -> None:
        """Slots that one store exports are the same in another one, bit for bit, whatever the distance of its slots; its other
        slots stay."""
        for model_dtype in MODEL_DTYPES:
            source, target = self.states(model_dtype)[0], self.states(model_dtype, 4 * SLOT_ALIGNMENT, seed=1)[0]
            assert source.layout == target.layout
            theirs, before = _bits(source), _bits(target)
            target.import_slots(source.export_slots([4, 2]), [1, 3])
            for own, given, old in zip(_bits(target), theirs, before, strict=True):
                assert own.equal(torch.stack([old[0], given[4], old[2], given[2], old[4]]))
            target.import_slots(source.export_slots([]), [])

    def test_damaged_exports_of_states_are_refused(self) -> None:
        """Bytes that were cut or changed, and slots of another layout or number, are refused by name before anything is
        written."""
        (source, _), (store, memory) = self.states(), self.states(seed=1)
        data, before = source.export_slots([1, 2]), memory.clone()
        rng = np.random.default_rng(0)

        def refused(data: bytes, fault: str | None = None, slots: Sequence[int] = (1, 2)) -> None:
            check_refused(lambda: store.import_slots(data, slots), fault)

        for size in (0, 3, len(data) // 2, len(data) - 1):
            refused(data[:size], "truncated")
        for place in rng.integers(0, len(data), 40).tolist():
            changed = bytearray(data)
            changed[place] ^= 1 << int(rng.integers(8))
            refused(bytes(changed))
        refused(data[:-1] + bytes([data[-1] ^ 1]), "checksum")
        refused(data, "pages", [1])
        others = [replace(GROUP, num_layers=2), replace(GROUP, states=STATES[1:]), GROUP.with_state_dtype("bfloat16")]
        for group in others:
            refused(self.states(group=group)[0].export_slots([1, 2]), "layout")
        refused(self.states(torch.float32)[0].export_slots([1, 2]), "layout")
        assert memory.equal(before), "something was written"

    def test_slots_can_be_filled(self) -> None:
        """All numbers of the slots that are named become the value, NaN too, in all layers; other slots stay."""
        store, _ = self.states(more=SLOT_ALIGNMENT)
        before = _bits(store)
        store.fill(float("nan"), [1, 3])
        assert all(state[[1, 3]].isnan().all() for state in _flat(store))
        assert all(own[[0, 2, 4]].equal(old[[0, 2, 4]]) for own, old in zip(_bits(store), before, strict=True))
        store.fill(0.0)
        assert not any(state.any() for state in _flat(store))


def _flat(store: StateStore) -> list[torch.Tensor]:
    return [state for layer in store.memory for state in layer]


def _places(store: StateStore) -> list[tuple[torch.Tensor, int]]:
    return [(state, slot) for state in _flat(store) for slot in range(NUM_SLOTS)]


def _bits(store: StateStore) -> list[torch.Tensor]:
    """Return a copy of the bytes of each state of each layer, uint8 ``[num_slots, bytes]``."""
    return [state.cpu().flatten(1).contiguous().view(torch.uint8).clone() for state in _flat(store)]


def _same(store: StateStore, before: Sequence[torch.Tensor], slots: Sequence[int]) -> bool:
    """Return True if each slot has the bits that ``slots`` names of those ``before``."""
    return all(own.equal(old[list(slots)]) for own, old in zip(_bits(store), before, strict=True))
