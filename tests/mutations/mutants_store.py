"""Define broken KV stores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from mutant import Mutant, Suite

from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.store import KVStore, KVStoreFactory, KVTensors, PageBytes, SlabMemory, StoreContext
from dovetail.memory.page_format import export_parts
from dovetail.memory.scaled import ScaledArenaKVPool, ScaledKVPool, scaled_page_bytes
from dovetail.ops.kv_dtypes import KVScaleRows, raw
from dovetail.ops.kv_scales import store_scaled
from dovetail.testing.store import KVStoreSuite

FULL = [(Feature.STORE_FULL,)]


class SwapsKeysAndValues(ScaledKVPool):
    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None:
        assert v is not None
        super().store(layer_id, v, k, out_loc)


class KeepsOldScales(ScaledKVPool):
    """Write the scales of a token to the location of another one."""

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None:
        assert v is not None
        rows = KVScaleRows(*(part.clone() for part in self._scale_rows[layer_id]))
        store_scaled(k, v, self._k_rows[layer_id], self._v_rows[layer_id], rows, out_loc)
        for own, part in zip(self._scale_rows[layer_id], rows, strict=True):
            own[out_loc.flip(0)] = part[out_loc]


class MovesItsTensors(ScaledKVPool):
    def tensors(self, layer_id: int) -> KVTensors:
        keys, values, scales = super().tensors(layer_id)
        return KVTensors(keys.clone(), values, scales)


class StartsWithNaN(ScaledKVPool):
    def _allocate_scales(self) -> list[torch.Tensor]:
        return [part.fill_(math.nan) for part in super()._allocate_scales()]


class LeavesScalesBehind(ScaledKVPool):
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for places in self._raw[:2]:
            places.index_copy_(1, target, places.index_select(1, source))


class CopiesOneByOne(ScaledKVPool):
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for number in range(len(source)):
            super().copy(source[number : number + 1], target[number : number + 1])


class ExportsNoScales(ScaledKVPool):
    def export_pages(self, pages: Sequence[int]) -> bytes:
        parts = [part if part.dtype is self.dtype else torch.ones_like(part) for part in self._parts]
        return export_parts(self.layout, parts, pages)


class TrustsItsImports(ScaledKVPool):
    """Write what has the right size."""

    def import_pages(self, data: bytes, pages: Sequence[int]) -> None:
        mine = self.export_pages(pages)
        if len(data) != len(mine) or data[:4] != mine[:4]:
            super().import_pages(data, pages)
        at = len(mine) - sum(raw(part)[list(pages)].nbytes for part in self._parts)
        for part in self._parts:
            memory = raw(part)[list(pages)]
            given = torch.frombuffer(bytearray(data[at : at + memory.nbytes]), dtype=memory.dtype)
            raw(part)[list(pages)] = given.view(memory.shape)
            at += memory.nbytes


class WritesBeforeItChecks(ScaledKVPool):
    def import_pages(self, data: bytes, pages: Sequence[int]) -> None:
        self.poison(pages)
        super().import_pages(data, pages)


class PoisonsNoScales(ScaledKVPool):
    def poison(self, pages: Sequence[int] | None = None) -> None:
        parts, self._parts = self._parts, [part for part in self._parts if part.dtype is self.dtype]
        super().poison(pages)
        self._parts = parts


class ForgetsItsScales(ScaledKVPool):
    def load_scales(self, layer_id: int, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        super().load_scales(layer_id, k_scale.mean(), v_scale)


class SharesScales(ScaledArenaKVPool):
    """Keep the scales of all parts of a page in one place."""

    def _allocate_scales(self) -> list[torch.Tensor]:
        parts = super()._allocate_scales()
        return [parts[0]] * len(parts)


def suite(
    store: type[ScaledKVPool] = ScaledKVPool,
    shared: type[ScaledArenaKVPool] = ScaledArenaKVPool,
    *,
    computed: bool = True,
    counted: bool = True,
) -> Suite:
    class Made(KVStoreFactory):
        def __init__(self, context: StoreContext) -> None:
            self.context = context

        def page_bytes(self, group: CacheGroup, page_size: int) -> PageBytes:
            return scaled_page_bytes(group, page_size, self.context.dtype, computed=computed and counted)

        def make(self, group: CacheGroup, num_pages: int) -> KVStore:
            own = self.context
            return store(group, num_pages, own.page_size, own.dtype, own.device, computed=computed)

        def make_shared(self, group: CacheGroup, index: int, slabs: SlabMemory) -> KVStore:
            return shared(group, index, self.context.page_size, slabs, computed=computed)

        @property
        def reads_scales(self) -> bool:
            return not computed

    class Suite(KVStoreSuite):
        name = "scaled"

        def make(self, context: StoreContext) -> KVStoreFactory:
            return Made(context)

    return Suite


SOUND, FIXED = suite(), suite(computed=False)
READ, DAMAGED = "test_what_was_stored_is_read", "test_damaged_exports_are_refused"

MUTANTS = [
    Mutant("swaps keys and values", READ, suite(SwapsKeysAndValues), SOUND, FULL),
    Mutant("writes scales to the wrong locations", READ, suite(KeepsOldScales), SOUND, FULL),
    Mutant("returns copies of its tensors", "test_the_layout_of_tensors", suite(MovesItsTensors), SOUND, FULL),
    Mutant("does not count scales", "test_pages_take_the_bytes_that_are_declared", suite(counted=False), SOUND, FULL),
    Mutant("begins with scales that are no numbers", "test_page_0_is_zero_at_first", suite(StartsWithNaN), SOUND, FULL),
    Mutant("copies no scales", "test_copies_take_everything_along", suite(LeavesScalesBehind), SOUND, FULL),
    Mutant("copies one location after the other", "test_copies_take_everything_along", suite(CopiesOneByOne), SOUND, FULL),
    Mutant("exports no scales", "test_exported_pages_give_the_same_numbers", suite(ExportsNoScales), SOUND, FULL),
    Mutant("does not check what it imports", DAMAGED, suite(TrustsItsImports), SOUND, FULL, "DID NOT RAISE"),
    Mutant("writes before it checks", DAMAGED, suite(WritesBeforeItChecks), SOUND, FULL, "something was written"),
    Mutant("poisons no scales", "test_poison_is_seen", suite(PoisonsNoScales), SOUND, FULL, "poisoned too"),
    Mutant("keeps all scales of a page in one place", "test_groups_may_share_slabs", suite(shared=SharesScales), SOUND),
    Mutant("forgets that heads have scales", "test_scales_of_the_checkpoint", suite(ForgetsItsScales, computed=False), FIXED),
]  # fmt: skip
