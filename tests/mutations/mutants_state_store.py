"""Define broken stores of states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mutant import Mutant, Suite

from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.store import KVStoreFactory, PageLayout, StateStore, StoreContext
from dovetail.memory.page_format import export_parts, layout_of
from dovetail.memory.state_pool import StatePool
from dovetail.testing.store import KVStoreSuite
from dovetail_cache.config import PagedConfig
from dovetail_cache.stores import PagedStores


class OneDtype(StatePool):
    """Keep all states in the dtype of the model."""

    def __init__(self, group: CacheGroup, memory: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(group, memory, dtype)
        self.memory = tuple(tuple(state.to(dtype) for state in layer) for layer in self.memory)


class SharedLayers(StatePool):
    def __init__(self, group: CacheGroup, memory: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(group, memory, dtype)
        self.memory = (*self.memory[:-1], self.memory[0])


class OwnMemory(StatePool):
    def __init__(self, group: CacheGroup, memory: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(group, memory.clone(), dtype)


class CopiesOneByOne(StatePool):
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for number in range(len(source)):
            super().copy(source[number : number + 1], target[number : number + 1])


class RoundsCopies(StatePool):
    """Copy numbers in place of bits."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for layer in self.memory:
            for state in layer:
                state[target] = state[source].bfloat16().to(state.dtype)


class CopiesOneLayer(StatePool):
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for state in self.memory[0]:
            state[target] = state[source]


class ExportsOneLayer(StatePool):
    def export_slots(self, slots: Sequence[int]) -> bytes:
        parts = [part[:, :1].expand_as(part).contiguous() for part in self._parts]
        return export_parts(self.layout, parts, slots)


class LayoutOfNothing(StatePool):
    """Name no dtype and no shape in the layout."""

    @property
    def layout(self) -> PageLayout:
        return layout_of("states", 1, [])


class WritesBeforeItChecks(StatePool):
    def import_slots(self, data: bytes, slots: Sequence[int]) -> None:
        self.fill(0.0, slots)
        super().import_slots(data, slots)


class FillsOneLayer(StatePool):
    def fill(self, value: float, slots: Sequence[int] | slice = slice(None)) -> None:
        for state in self.memory[0]:
            state[slots] = value


def suite(store: type[StatePool] = StatePool, more: int = 0) -> Suite:
    class Made(PagedStores):
        def slot_bytes(self, group: CacheGroup) -> int:
            return super().slot_bytes(group) + more

        def make_states(self, group: CacheGroup, memory: torch.Tensor) -> StateStore:
            return store(group, memory, self._context.state_dtype)

    class Suite(KVStoreSuite):
        name = "paged"

        def make(self, context: StoreContext) -> KVStoreFactory:
            return Made(PagedConfig(), context)

    return Suite


SOUND = suite()
PLACES, RESTORED = "test_states_are_in_the_slots_of_their_memory", "test_restored_snapshots_have_equal_bits"
EXPORTED, DAMAGED = "test_exported_slots_have_equal_bits", "test_damaged_exports_of_states_are_refused"

MUTANTS = [
    Mutant("keeps all states in the dtype of the model", PLACES, suite(OneDtype), SOUND),
    Mutant("gives two layers the same states", PLACES, suite(SharedLayers), SOUND, says="states share bytes"),
    Mutant("takes memory of its own for states", PLACES, suite(OwnMemory), SOUND, says="slots are rows of the memory"),
    Mutant("declares slots that are not aligned", PLACES, suite(more=8), SOUND, says="slots are aligned"),
    Mutant("copies one slot after the other", RESTORED, suite(CopiesOneByOne), SOUND),
    Mutant("rounds the states that it copies", RESTORED, suite(RoundsCopies), SOUND),
    Mutant("copies the states of one layer", RESTORED, suite(CopiesOneLayer), SOUND),
    Mutant("exports the states of one layer", EXPORTED, suite(ExportsOneLayer), SOUND),
    Mutant("has the same layout for all states", DAMAGED, suite(LayoutOfNothing), SOUND),
    Mutant("writes states before it checks them", DAMAGED, suite(WritesBeforeItChecks), SOUND, says="something was written"),
    Mutant("fills the states of one layer", "test_slots_can_be_filled", suite(FillsOneLayer), SOUND),
]  # fmt: skip
